//! The definition of each op, from Burn's tensor operations alone: differentiable through Burn's
//! autodiff, right on every device, slow.

use burn::tensor::{DType, Int, Tensor, TensorData, activation};

use super::{AdamW, Documents, Dropout, LoraPart, Rope};

/// See [`super::rms_norm`].
pub fn rms_norm(x: Tensor<2>, weight: Tensor<1>, eps: f64) -> Tensor<2> {
    let dtype = x.dtype();
    let x = x.cast(DType::F32);
    let inverse = x.clone().powi_scalar(2).mean_dim(1).add_scalar(eps).sqrt().recip();
    (x * inverse).cast(dtype) * weight.unsqueeze()
}

/// See [`super::qk_norm_rope`].
pub fn qk_norm_rope(x: Tensor<3>, weight: Option<Tensor<1>>, eps: f64, rope: &Rope) -> Tensor<3> {
    let [t, h, d] = x.dims();
    let dtype = x.dtype();
    let x = match weight {
        Some(weight) => rms_norm(x.reshape([t * h, d]), weight, eps).reshape([t, h, d]),
        None => x,
    };
    let cos = rope.cos.clone().cast(dtype).unsqueeze_dim::<3>(1);
    let sin = rope.sin.clone().cast(dtype).unsqueeze_dim::<3>(1);
    let first = x.clone().narrow(2, 0, d / 2);
    let second = x.clone().narrow(2, d / 2, d / 2);
    x * cos + Tensor::cat(vec![second.neg(), first], 2) * sin
}

/// See [`super::attention`].
pub fn attention(q: Tensor<3>, k: Tensor<3>, v: Tensor<3>, documents: &Documents, scale: f32) -> Tensor<3> {
    let [_, h, d] = q.dims();
    let [_, g, _] = k.dims();
    let dtype = q.dtype();
    let outputs = documents.ranges().filter(|(start, end)| start < end).map(|(start, end)| {
        let l = end - start;
        let heads = |x: Tensor<3>| x.narrow(0, start, l).swap_dims(0, 1).cast(DType::F32);
        let shared = |x: Tensor<3>| match h / g {
            // Not `repeat_dim(1, 1)`: its gradient sums over a dimension of size 1, which burn-cubecl
            // 0.22.1 gets wrong for a transposed tensor.
            1 => heads(x),
            n => heads(x).unsqueeze_dim::<4>(1).repeat_dim(1, n).reshape([h, l, d]),
        };
        let scores = heads(q.clone()).matmul(shared(k.clone()).swap_dims(1, 2)).mul_scalar(scale);
        let future = Tensor::<2>::ones([l, l], &scores.device())
            .triu(1)
            .greater_elem(0.5)
            .unsqueeze::<3>()
            .expand([h, l, l]);
        let weights = activation::softmax(scores.mask_fill(future, f32::NEG_INFINITY), 2);
        weights.matmul(shared(v.clone())).swap_dims(0, 1).cast(dtype)
    });
    Tensor::cat(outputs.collect(), 0)
}

/// See [`super::swiglu`].
pub fn swiglu(gate: Tensor<2>, up: Tensor<2>) -> Tensor<2> {
    activation::silu(gate) * up
}

/// See [`super::linear`].
pub fn linear(x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    x.matmul(weight.transpose())
}

/// See [`super::lora_linear`].
pub fn lora_linear(
    x: Tensor<2>,
    weight: Tensor<2>,
    a: Tensor<2>,
    b: Tensor<2>,
    parts: &[LoraPart],
) -> Tensor<2> {
    lora_by(x, weight, a, b, parts, linear)
}

/// [`lora_linear`] with these products.
pub(super) fn lora_by(
    x: Tensor<2>,
    weight: Tensor<2>,
    a: Tensor<2>,
    b: Tensor<2>,
    parts: &[LoraPart],
    linear: impl Fn(Tensor<2>, Tensor<2>) -> Tensor<2>,
) -> Tensor<2> {
    let base = linear(x.clone(), weight);
    let out = b.dims()[0];
    let (mut token, mut row) = (0, 0);
    let mut deltas = Vec::new();
    for part in parts.iter() {
        if part.rank == 0 && part.tokens > 0 {
            deltas.push(Tensor::zeros([part.tokens, out], (&x.device(), base.dtype())));
        } else if part.tokens > 0 {
            let x = x.clone().narrow(0, token, part.tokens).cast(DType::F32);
            let a = a.clone().narrow(0, row, part.rank);
            let b = b.clone().narrow(1, row, part.rank);
            let h = linear(dropout(x, part.dropout.as_ref()), a).mul_scalar(part.scale);
            deltas.push(linear(h, b).cast(base.dtype()));
        }
        token += part.tokens;
        row += part.rank;
    }
    base + Tensor::cat(deltas, 0)
}

/// Zeroes elements of `x` and scales the rest by 1/(1 − p).
pub fn dropout(x: Tensor<2>, dropout: Option<&Dropout>) -> Tensor<2> {
    let Some(dropout) = dropout else { return x };
    let [t, e] = x.dims();
    let mut factors = vec![0.0f32; t * e];
    for (n, row) in factors.chunks_exact_mut(e.max(1)).enumerate() {
        dropout.factors(n, row);
    }
    let mask = Tensor::<2>::from_data(TensorData::new(factors, [t, e]), &x.device());
    x * mask
}

/// See [`super::embedding`].
pub fn embedding(ids: Tensor<1, Int>, weight: Tensor<2>) -> Tensor<2> {
    weight.select(0, ids)
}

/// See [`super::linear_cross_entropy`].
pub fn linear_cross_entropy(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    rows: Tensor<1, Int>,
    targets: Tensor<1, Int>,
) -> Tensor<1> {
    token_losses(hidden, weight, rows, targets).sum()
}

/// See [`super::token_losses`].
pub fn token_losses(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    rows: Tensor<1, Int>,
    targets: Tensor<1, Int>,
) -> Tensor<1> {
    let logits = linear(hidden.select(0, rows), weight).cast(DType::F32);
    let picked = logits.clone().gather(1, targets.unsqueeze_dim(1));
    let max = logits.clone().detach().max_dim(1);
    let logsumexp = (logits - max.clone()).exp().sum_dim(1).log() + max;
    (logsumexp - picked).squeeze_dim(1)
}

/// See [`super::sum_squares`].
pub fn sum_squares(x: Tensor<1>) -> Tensor<1> {
    x.powi_scalar(2).sum()
}

/// See [`super::adamw`].
pub fn adamw(param: Tensor<1>, m: Tensor<1>, v: Tensor<1>, grad: Tensor<1>, step: &AdamW) -> [Tensor<1>; 3] {
    let grad = grad.mul_scalar(step.grad_scale);
    let k = step.update as i32;
    let m = m.mul_scalar(step.beta1) + grad.clone().mul_scalar(1.0 - step.beta1);
    let v = v.mul_scalar(step.beta2) + grad.powi_scalar(2).mul_scalar(1.0 - step.beta2);
    let denominator = v.clone().div_scalar(1.0 - step.beta2.powi(k)).sqrt().add_scalar(step.eps);
    let update = m.clone().mul_scalar(step.lr / (1.0 - step.beta1.powi(k))) / denominator;
    [param.mul_scalar(1.0 - step.lr * step.weight_decay) - update, m, v]
}
