//! The operations a decoder is made of: each one public function, a plain version from Burn's own
//! tensor operations (the definition, and the oracle in tests), and faster versions per device.
//!
//! The model calls these functions and never asks for a device. Every function is differentiable in
//! its float tensors but for what it calls a constant. Tensors with and without autodiff may be
//! mixed; one that isn't tracked costs nothing: no gradient is computed for it, nothing saved.
//!
//! | device | version |
//! |---|---|
//! | `flex`, f32 | CPU kernels (`flex/` holds what they share), one tape node an op, hand-written backward |
//! | `cuda`, f32 and bf16 | own kernels and cuBLASLt (`cuda/`), likewise |
//! | any other, and f16 or bf16 on `flex` | [`plain`]; the loss in chunks (`chunked.rs`) |
//!
//! The CPU kernels keep two promises. Sums run in an order that depends on shapes alone, so results
//! are the same bits for any number of threads and any load. And a document's or run's values are the
//! same bits whatever it is packed with.
//!
//! To add an op: define it in `plain.rs`; write `NAME.rs` with a `#[backend_extension(Flex, Autodiff)]`
//! trait of one method, `impl … for Flex` (the kernel) and `impl … for Autodiff<Flex, C>` (the tape
//! node); choose between the two in a public function here; compare both in `tests/`, forward and
//! backward, with each input tracked and not.

use std::sync::Arc;

use burn::tensor::{DType, Device, Int, Tensor};

#[cfg(feature = "flex")]
mod attention;
mod chunked;
#[cfg(feature = "cuda")]
pub mod cuda;
mod each;
#[cfg(feature = "flex")]
mod flex;
mod layer;
#[cfg(feature = "flex")]
mod linear;
#[cfg(feature = "flex")]
mod linear_cross_entropy;
#[cfg(feature = "flex")]
mod lora_linear;
pub mod mapped;
mod next_token;
#[cfg(feature = "flex")]
mod optim;
pub mod plain;
#[cfg(feature = "flex")]
mod rms_norm;
#[cfg(feature = "flex")]
mod rope;

#[cfg(feature = "flex")]
mod swiglu;
#[cfg(any(feature = "flex", feature = "cuda"))]
mod tape;
#[cfg(all(test, feature = "flex"))]
mod tests;

pub use each::{add_each, apart, cast_each, stacked, sum_squares_of};
pub use layer::{Adapters, DecoderLayer, Kept, Projection, composed, decoder_layer, project, recomputes};
pub use next_token::{KeyValues, Next, is_finite, most_likely, next_layer, project_few, prompt_layer};

/// Document boundaries of a micro-batch: `[n + 1]` offsets from 0 to T.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Documents {
    /// Offsets on the host; a device copy is the op's own business.
    pub cu_seqlens: Arc<[u32]>,
}

impl Documents {
    /// `(start, end)` of each document.
    pub fn ranges(&self) -> impl Iterator<Item = (usize, usize)> + '_ {
        self.cu_seqlens.windows(2).map(|w| (w[0] as usize, w[1] as usize))
    }
}

/// Rotary tables of a micro-batch, `[T, d]` each in f32, in Hugging Face's layout
/// (the second half repeats the first).
#[derive(Debug, Clone)]
pub struct Rope {
    /// cos(position · inv_freq)
    pub cos: Tensor<2>,
    /// sin(position · inv_freq)
    pub sin: Tensor<2>,
}

/// The share of one adapter run in a stacked LoRA product.
#[derive(Debug, Clone, PartialEq)]
pub struct LoraPart {
    /// Tokens of this run in the micro-batch (contiguous, in run order).
    pub tokens: usize,
    /// Rows of A and columns of B that belong to this run; 0 where the run doesn't adapt this layer.
    pub rank: usize,
    /// α/r, or α/√r with rslora.
    pub scale: f32,
    /// Dropout on the adapter's input; `None` in evaluation or at p = 0.
    pub dropout: Option<Dropout>,
}

/// A counter-based dropout mask: element `(n, c)` depends on nothing but these fields, n and c,
/// so that recomputation, resume and any number of ranks see the same mask.
#[derive(Debug, Clone, PartialEq)]
pub struct Dropout {
    /// Probability of a zero.
    pub p: f32,
    /// The generator's key: seed, run and module mixed.
    pub key: u64,
    /// Where the part's tokens lie among all of the run's.
    pub stream: Stream,
}

/// Where the tokens of one run in a batch lie in the stream of all tokens that a run ever sees: pieces of
/// `row` tokens, `stride` from the start of one to the start of the next. Data parallel ranks have every R-th row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stream {
    /// Index in the stream of the run's first token in the batch.
    pub first: u64,
    /// Tokens of a piece.
    pub row: usize,
    /// Tokens in the stream from one piece's start to the next one's.
    pub stride: u64,
}

/// Runs a series of small ops. On the CPU, a thread of its pool does: each op starts at once there.
pub fn in_series<T: Send>(device: &Device, work: impl FnOnce() -> T + Send) -> T {
    #[cfg(feature = "flex")]
    return flex::in_pool(device, work);
    #[cfg(not(feature = "flex"))]
    {
        let _ = device;
        work()
    }
}

/// Root-mean-square norm over the last dimension: `weight · x / sqrt(mean(x²) + eps)`,
/// f32 inside (Hugging Face `Qwen3RMSNorm`).
///
/// # Shapes
/// - x: `[t, e]`, weight: `[e]` → `[t, e]`
pub fn rms_norm(x: Tensor<2>, weight: Tensor<1>, eps: f64) -> Tensor<2> {
    #[cfg(feature = "cuda")]
    if cuda::elements::takes_norm(&x, &weight) {
        return cuda::elements::rms_norm(x, weight, eps);
    }
    #[cfg(feature = "flex")]
    if flex::takes(&x) && flex::takes(&weight) {
        return rms_norm::rms_norm(x, weight, eps);
    }
    plain::rms_norm(x, weight, eps)
}

/// Norm of each head (where the model has one), then rotary embedding in Hugging Face's
/// half-split pairing: `x · cos + rotate_half(x) · sin`.
///
/// # Shapes
/// - x: `[t, h, d]`, weight: `[d]` → `[t, h, d]`
pub fn qk_norm_rope(x: Tensor<3>, weight: Option<Tensor<1>>, eps: f64, rope: &Rope) -> Tensor<3> {
    #[cfg(feature = "cuda")]
    if cuda::elements::takes_rope(&x, weight.as_ref(), rope) {
        return cuda::elements::qk_norm_rope(x, weight, eps, rope);
    }
    #[cfg(feature = "flex")]
    if flex::takes(&x) && weight.as_ref().is_none_or(flex::takes) && flex::takes(&rope.cos) {
        return rope::qk_norm_rope(x, weight, eps, rope);
    }
    plain::qk_norm_rope(x, weight, eps, rope)
}

/// Causal attention inside each document, grouped KV heads, softmax in f32.
///
/// # Shapes
/// - q: `[t, h, d]`, k, v: `[t, g, d]` with h a multiple of g → `[t, h, d]`
pub fn attention(q: Tensor<3>, k: Tensor<3>, v: Tensor<3>, documents: &Documents, scale: f32) -> Tensor<3> {
    #[cfg(feature = "cuda")]
    if cuda::attention::takes(&q, &k, &v) {
        return cuda::attention::attention(q, k, v, documents, scale);
    } else if cuda::tensor::is_on_card(&q) {
        return cuda::attention::by_products(q, k, v, documents, scale);
    }
    #[cfg(feature = "flex")]
    if [&q, &k, &v].into_iter().all(flex::takes) {
        return attention::attention(q, k, v, documents, scale);
    }
    plain::attention(q, k, v, documents, scale)
}

/// `silu(gate) · up`.
///
/// # Shapes
/// - gate, up: `[t, f]` → `[t, f]`
pub fn swiglu(gate: Tensor<2>, up: Tensor<2>) -> Tensor<2> {
    #[cfg(feature = "cuda")]
    if cuda::elements::takes_swiglu(&gate, &up) {
        return cuda::elements::swiglu(gate, up);
    }
    #[cfg(feature = "flex")]
    if flex::takes(&gate) && flex::takes(&up) {
        return swiglu::swiglu(gate, up);
    }
    plain::swiglu(gate, up)
}

/// `x · Wᵀ` with W as Hugging Face stores it.
///
/// # Shapes
/// - x: `[t, in]`, weight: `[out, in]` → `[t, out]`
pub fn linear(x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    #[cfg(feature = "cuda")]
    if cuda::products::takes(&x, &weight) {
        return cuda::products::linear(x, weight);
    }
    #[cfg(feature = "flex")]
    if flex::takes(&x) && flex::takes(&weight) {
        return linear::linear(x, weight);
    }
    plain::linear(x, weight)
}

/// `x · Wᵀ + s · (dropout(x) · Aᵀ) · Bᵀ`, each run's A, B, s and dropout on its own tokens.
///
/// # Shapes
/// - x: `[t, in]`, weight: `[out, in]`, a: `[Σ rank, in]`, b: `[out, Σ rank]` → `[t, out]`
/// - parts: in run order; Σ tokens = t, Σ rank = rows of a
///
/// # Panics
/// Where a shape or a sum over the parts is another.
pub fn lora_linear(
    x: Tensor<2>,
    weight: Tensor<2>,
    a: Tensor<2>,
    b: Tensor<2>,
    parts: &[LoraPart],
) -> Tensor<2> {
    let ([t, inner], [out, _]) = (x.dims(), weight.dims());
    let (tokens, ranks) = parts.iter().fold((0, 0), |sum, part| (sum.0 + part.tokens, sum.1 + part.rank));
    assert_eq!(weight.dims()[1], inner, "lora_linear: width of x and of the weight");
    assert_eq!(a.dims(), [ranks, inner], "lora_linear: A, from the parts' ranks and the width of x");
    assert_eq!(b.dims(), [out, ranks], "lora_linear: B, from the weight's rows and the parts' ranks");
    assert_eq!(tokens, t, "lora_linear: the parts' tokens and rows of x");
    #[cfg(feature = "cuda")]
    if cuda::products::takes(&x, &weight) {
        return match parts.iter().any(|part| part.dropout.is_some()) {
            false => cuda::products::lora_linear(x, weight, a, b, parts),
            true => plain::lora_by(x, weight, a, b, parts, linear),
        };
    }
    #[cfg(feature = "flex")]
    if [&x, &weight, &a, &b].into_iter().all(flex::takes) {
        return lora_linear::lora_linear(x, weight, a, b, parts);
    }
    plain::lora_linear(x, weight, a, b, parts)
}

/// Rows of the embedding.
///
/// # Shapes
/// - ids: `[t]`, weight: `[v, e]` → `[t, e]`
pub fn embedding(ids: Tensor<1, Int>, weight: Tensor<2>) -> Tensor<2> {
    #[cfg(feature = "cuda")]
    if cuda::embedding::takes(&ids, &weight) {
        return cuda::embedding::embedding(ids, weight);
    }
    plain::embedding(ids, weight)
}

/// Σ over `rows` of `logsumexp(logits) − logits[target]` with `logits = hidden · weightᵀ`,
/// accumulated in f32; rows that aren't named never reach the head.
///
/// # Shapes
/// - hidden: `[t, e]`, weight: `[v, e]`, rows, targets: `[n]` → `[1]`
pub fn linear_cross_entropy(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    rows: Tensor<1, Int>,
    targets: Tensor<1, Int>,
) -> Tensor<1> {
    #[cfg(feature = "cuda")]
    if cuda::loss::takes(&hidden, &weight, &rows) {
        return cuda::loss::linear_cross_entropy(hidden, weight, rows, targets);
    }
    #[cfg(feature = "flex")]
    if flex::takes(&hidden) && flex::takes(&weight) {
        return linear_cross_entropy::linear_cross_entropy(hidden, weight, rows, targets);
    }
    chunked::linear_cross_entropy(hidden, weight, rows, targets)
}

/// The loss of each of `rows`, as in [`linear_cross_entropy`], without a gradient.
///
/// # Shapes
/// - hidden: `[t, e]`, weight: `[v, e]`, rows, targets: `[n]` → `[n]`
pub fn token_losses(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    rows: Tensor<1, Int>,
    targets: Tensor<1, Int>,
) -> Tensor<1> {
    let (hidden, weight) = (hidden.inner(), weight.inner());
    #[cfg(feature = "cuda")]
    if cuda::loss::takes(&hidden, &weight, &rows) {
        return cuda::loss::token_losses(hidden, weight, rows, targets);
    }
    #[cfg(feature = "flex")]
    if flex::takes(&hidden) && flex::takes(&weight) {
        return linear_cross_entropy::token_losses(hidden, weight, rows, targets);
    }
    plain::token_losses(hidden, weight, rows.inner(), targets.inner())
}

/// Σ x², in an order that doesn't depend on thread timing.
pub fn sum_squares(x: Tensor<1>) -> Tensor<1> {
    #[cfg(feature = "flex")]
    if flex::takes(&x) && !x.is_autodiff() {
        return optim::sum_squares(x);
    }
    plain::sum_squares(x)
}

/// One AdamW update (torch.optim.AdamW): returns the new (parameter, m, v), all f32; m and v may be bf16 (see
/// [`AdamW::rounding`]).
///
/// # Shapes
/// - param, m, v, grad: `[n]`
///
/// # Panics
/// Where m and v are bf16 on a device for which [`holds_moments_in_bf16`] doesn't hold.
pub fn adamw(param: Tensor<1>, m: Tensor<1>, v: Tensor<1>, grad: Tensor<1>, step: &AdamW) -> [Tensor<1>; 3] {
    #[cfg(feature = "flex")]
    if optim::takes([&param, &m, &v, &grad]) {
        return optim::adamw(param, m, v, grad, step);
    }
    #[cfg(feature = "cuda")]
    if cuda::optim::takes_update([&param, &m, &v, &grad]) {
        let [updated] =
            cuda::optim::adamw(vec![[param, m, v, grad]], &[*step], None).try_into().expect("one for one");
        return updated;
    }
    assert!(m.dtype() == DType::F32 && v.dtype() == DType::F32, "adamw: moments in {:?}", m.dtype());
    plain::adamw(param, m, v, grad, step)
}

/// [`adamw`] of many parameters `[param, m, v, grad]`, each with its own scalars.
///
/// With `clip` the gradients are multiplied by its coefficient too, and nothing changes where the norm isn't finite;
/// only where [`clips_on_device`].
///
/// # Panics
/// Where there are not as many scalars as parameters, or where `clip` is given for other tensors.
pub fn adamw_of(tensors: Vec<[Tensor<1>; 4]>, steps: &[AdamW], clip: Option<&Clip>) -> Vec<[Tensor<1>; 3]> {
    assert_eq!(tensors.len(), steps.len(), "adamw_of: parameters and scalars");
    #[cfg(feature = "cuda")]
    if !tensors.is_empty()
        && tensors.iter().all(|[p, m, v, g]| cuda::optim::takes_update([p, m, v, g]))
        && cuda::optim::alike(steps, &tensors)
    {
        return cuda::optim::adamw(tensors, steps, clip);
    }
    assert!(clip.is_none(), "adamw_of: these tensors are clipped by the caller");
    let each = tensors.into_iter().zip(steps);
    each.map(|([param, m, v, grad], step)| adamw(param, m, v, grad, step)).collect()
}

/// Whether [`adamw`] takes moments in bf16 on this device.
pub fn holds_moments_in_bf16(device: &Device) -> bool {
    #[cfg(feature = "flex")]
    if flex::is_flex(device) {
        return true;
    }
    #[cfg(feature = "cuda")]
    if cuda::is_card(device) {
        return true;
    }
    let _ = device;
    false
}

/// Whether [`adamw_of`] takes the clip coefficient from the device, so that nobody waits for the norm.
pub fn clips_on_device(grads: &[Tensor<1>]) -> bool {
    #[cfg(feature = "cuda")]
    return !grads.is_empty() && grads.iter().all(cuda::optim::takes);
    #[cfg(not(feature = "cuda"))]
    {
        let _ = grads;
        false
    }
}

/// Clipping by the global norm: `min(1, max_norm / (norm + 1e-6))` with `norm = grad_scale · √squares`.
#[derive(Debug, Clone)]
pub struct Clip {
    /// `[1]`, f32: [`sum_squares_of`] the gradients, added up.
    pub squares: Tensor<1>,
    /// `None`: no clipping; a norm that isn't finite still leaves everything as it was.
    pub max_norm: Option<f64>,
}

/// How our message begins where a device has no memory left: ops return tensors, so they panic.
pub const OUT_OF_MEMORY: &str = "the device has too little memory";

/// The message of a panic for want of memory, ours or CubeCL's; `None` for any other.
pub fn out_of_memory(panic: &(dyn std::any::Any + Send)) -> Option<String> {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or(panic.downcast_ref::<&str>().copied())?;
    let theirs =
        ["OUT_OF_MEMORY", "OutOfMemory", "out of memory"].into_iter().any(|words| text.contains(words));
    match text.starts_with(OUT_OF_MEMORY) {
        true => Some(text.into()),
        false => theirs.then(|| format!("{OUT_OF_MEMORY}: {text}")),
    }
}

/// The scalars of one AdamW update.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AdamW {
    /// Learning rate of this step.
    pub lr: f64,
    /// β₁
    pub beta1: f64,
    /// β₂
    pub beta2: f64,
    /// ε, added to √v̂
    pub eps: f64,
    /// Decoupled weight decay; 0 for this parameter if it isn't decayed.
    pub weight_decay: f64,
    /// k: 1 for the first update.
    pub update: usize,
    /// Factor on the gradient: 1/tokens, times the clip coefficient where there is no [`Clip`].
    pub grad_scale: f64,
    /// Which random numbers round moments that are held in bf16: a value x between two of bf16's goes up with probability
    /// (x − lower) / (upper − lower). To the nearest would not do: with β₂ = 0.999 a step of v is smaller than half of
    /// bf16's last digit, and v would stay for ever what it is.
    pub rounding: u32,
}

/// A hash of 32 bits (`lowbias32` of <https://github.com/skeeto/hash-prospector>), in `optimizer.cu` too.
pub(crate) fn mix(mut x: u32) -> u32 {
    x = (x ^ x >> 16).wrapping_mul(0x21f0_aaad);
    x = (x ^ x >> 15).wrapping_mul(0xd35a_2d97);
    x ^ x >> 15
}

impl Stream {
    /// Tokens that follow each other in the stream too.
    pub fn unbroken(first: u64) -> Self {
        Self { first, row: usize::MAX, stride: 0 }
    }

    /// Index in the stream of token `n`.
    pub fn index(&self, n: usize) -> u64 {
        self.first + (n / self.row) as u64 * self.stride + (n % self.row) as u64
    }
}

impl Default for Stream {
    fn default() -> Self {
        Self::unbroken(0)
    }
}

impl Dropout {
    /// The factors of the part's token `n`: 0 with probability p, else 1/(1 − p).
    pub fn factors(&self, n: usize, row: &mut [f32]) {
        use rand_chacha::ChaCha8Rng;
        use rand_chacha::rand_core::{Rng, SeedableRng};
        let mut generator = ChaCha8Rng::seed_from_u64(self.key);
        // One stream a token: no position depends on the width of the layer.
        generator.set_stream(self.stream.index(n));
        let keep = 1.0 / (1.0 - self.p);
        // A u32 below this is a zero; 2^32 itself stands for p = 1.
        let limit = (f64::from(self.p) * 2f64.powi(32)) as u64;
        for factor in row {
            *factor = if u64::from(generator.next_u32()) < limit { 0.0 } else { keep };
        }
    }
}
