//! How much memory training takes, from sizes alone.
//!
//! What is held all the time (weights, trained values, the optimizer's state) and, on top of it, the fullest of a
//! step's moments. With t tokens, n of them trained, and for each layer
//! `kept = 4e + 2q + 2k + 3f` (q = heads × head size, k the same of keys; `+ q + k` with head norms; less where nothing
//! is trained that needs an input; each adapter adds its rank):
//!
//! * the head, after the last layer: `L·kept + 2e` a token, `n·e` for its gradient, a chunk of logits
//! * the backward pass of the last layer: `L·kept` and what that layer works in
//! * the first layer's backward pass: all gradients and what that layer works in; then the embedding's gradient, where
//!   it is trained
//!
//! With recomputation `L·e` takes the place of `L·kept`, and one layer's `kept` comes back at a time.
//!
//! Where a layer is one op (bf16 on a CUDA card) what it keeps lies in a pool of its own, and the frozen weights of layers
//! with adapters are there once more; all else lies in Burn's pools, whose pages are as large as the largest tensor so
//! far. `memory/tests.rs` holds both against measurements.

use super::{HfConfig, Sizes};

#[cfg(all(test, feature = "flex"))]
mod tests;

/// Rows of logits that the head holds at once on the CPU (`ops::linear_cross_entropy`), and on a CUDA card.
const LOGITS_ROWS: [usize; 2] = [256, 4096];
/// Query rows of a block of attention on the CPU.
const ATTENTION_ROWS: usize = 64;
/// What the program itself takes on the CPU: code's data, threads, allocator, loader.
const PROGRAM: usize = 26 << 20;
/// The pool of the layer op has gaps: what it takes from the card, for each byte in use, by measurements.
const GAPS: f64 = 1.06;
const MIB: usize = 1 << 20;

/// Bytes that training takes at its fullest moment, by what takes them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Memory {
    /// Frozen weights.
    pub weights: u64,
    /// Trained parameters, the optimizer's state, and at the fullest moment their gradients and new values.
    pub trained: u64,
    /// What the backward pass needs, and what a layer works in.
    pub activations: u64,
    /// The head's chunk of logits and its gradients.
    pub head: u64,
    /// The program itself; on a card what its pools hold beyond what is in use.
    pub rest: u64,
}

impl Memory {
    /// All of it.
    pub fn total(&self) -> u64 {
        self.weights + self.trained + self.activations + self.head + self.rest
    }
}

/// Where a run's tensors lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// The process's memory, worked on by so many threads.
    Cpu {
        /// Each has memory to work in.
        threads: usize,
    },
    /// A card's pools.
    Card {
        /// Whether a layer is one op.
        fused: bool,
    },
}

/// What an estimate depends on beside the model.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Load {
    /// Tokens of a micro-batch.
    pub tokens: usize,
    /// Tokens of the longest document.
    pub longest: usize,
    /// Whether a step has more micro-batches than one: their gradients are summed up.
    pub sums: bool,
    /// Bytes of the type that frozen weights and activations have.
    pub compute_bytes: usize,
    /// Bytes of the optimizer's state for each trained parameter; of several ranks, its share.
    pub state_bytes: f64,
    /// Whether the optimizer's state is updated where it lies (AdamW's is).
    pub in_place: bool,
    /// Every how many layers one is recomputed.
    pub recompute: Option<usize>,
    /// Where it all lies.
    pub place: Place,
}

/// Widths of a token in a layer, and the layers that keep anything.
struct Widths {
    e: usize,
    q: usize,
    k: usize,
    f: usize,
    heads: usize,
    head_dim: usize,
    v: usize,
    qk_norm: bool,
    /// Whether one weight that is trained is embedding and head.
    tied: bool,
}

/// A moment of a step, in bytes beyond the frozen weights.
#[derive(Clone, Copy, Default)]
struct Moment {
    trained: usize,
    activations: usize,
    head: usize,
}

impl Moment {
    fn total(&self) -> usize {
        self.trained + self.activations + self.head
    }
}

/// The fullest.
fn fullest<const N: usize>(moments: [Moment; N]) -> Moment {
    moments.into_iter().max_by_key(Moment::total).unwrap_or_default()
}

/// An estimate at work.
struct Estimate<'a> {
    w: Widths,
    sizes: &'a Sizes,
    load: Load,
    /// Bytes of a tensor `[t, 1]`.
    column: usize,
}

impl Memory {
    /// The estimate.
    pub fn estimate(config: &HfConfig, sizes: &Sizes, load: Load) -> Self {
        let (q, k) = config.attention_widths();
        let w = Widths {
            e: config.hidden_size,
            q,
            k,
            f: config.intermediate_size,
            heads: config.num_attention_heads,
            head_dim: config.head_dim,
            v: config.vocab_size,
            qk_norm: config.qk_norm,
            tied: config.tie_word_embeddings && sizes.trains_embedding && sizes.modules == 0,
        };
        let estimate = Estimate { w, sizes, load, column: load.tokens * load.compute_bytes };
        match load.place {
            Place::Cpu { .. } => estimate.on_cpu(),
            Place::Card { fused: false } => estimate.op_by_op(),
            Place::Card { fused: true } => estimate.fused(),
        }
    }
}

impl Estimate<'_> {
    // ---- what is held all the time ----

    fn frozen(&self) -> usize {
        (self.sizes.counts.total - self.sizes.counts.trainable) * self.load.compute_bytes
    }

    /// Trained parameters in f32.
    fn values(&self) -> usize {
        4 * self.sizes.counts.trainable
    }

    fn state(&self) -> usize {
        (self.sizes.counts.trainable as f64 * self.load.state_bytes) as usize
    }

    /// Trained weights in the type that is computed in.
    fn cast(&self) -> usize {
        if self.load.compute_bytes == 4 { 0 } else { self.sizes.saved * self.load.compute_bytes }
    }

    /// All gradients at the end of a backward pass, beside the sums of earlier ones: of weights that were rounded for it in
    /// that type, and in f32 where they are the first or have been added.
    fn gradients(&self) -> usize {
        let embedding = if self.sizes.trains_embedding { self.w.v * self.w.e } else { 0 };
        let rounded = if self.cast() == 0 { 0 } else { self.sizes.saved.saturating_sub(embedding) };
        let others = self.sizes.counts.trainable - rounded;
        self.values() + rounded * self.load.compute_bytes + if self.load.sums { 4 * others } else { 0 }
    }

    fn sums(&self) -> usize {
        if self.load.sums { self.values() } else { 0 }
    }

    /// Rotary tables: those of the micro-batch, and those that they are rows of.
    fn tables(&self) -> usize {
        2 * 4 * self.w.head_dim * (self.load.tokens + self.load.longest)
    }

    /// An f32 tensor as large as the embedding, if that is so.
    fn vocabulary(&self, is_trained: bool) -> usize {
        if is_trained { 4 * self.w.v * self.w.e } else { 0 }
    }

    // ---- layers, one by one ----

    /// The layers that the backward pass goes through; of each, the low ranks of its linear layers, `None` where the
    /// input isn't needed.
    fn layers(&self) -> &[[Option<usize>; 7]] {
        let layers = &self.sizes.layers;
        let trains = |layer: &[Option<usize>; 7]| layer.iter().any(Option::is_some);
        let first = match self.sizes.trains_embedding {
            true => 0,
            false => layers.iter().position(trains).unwrap_or(layers.len()),
        };
        &layers[first..]
    }

    /// Bytes that a layer keeps where each op has a node of its own.
    fn kept(&self, layer: &[Option<usize>; 7]) -> usize {
        let w = &self.w;
        let [q, k, v, o, gate, up, down] = layer.map(|rank| rank.is_some());
        let normed = w.e * (usize::from(q || k || v) + usize::from(gate || up));
        let heads = if w.qk_norm { 2 * (w.q + w.k) } else { w.q + w.k } + w.k;
        let attended = if o { w.q } else { 0 };
        let activated = if down { w.f } else { 0 };
        let ranks: usize = layer.iter().flatten().sum();
        (2 * w.e + normed + heads + attended + 2 * w.f + activated + ranks) * self.column
            + 4 * w.heads * self.load.tokens
    }

    /// Bytes that a layer's backward pass works in beyond what it gives back meanwhile: the MLP's, or attention's.
    fn work(&self) -> usize {
        let Widths { e, q, k, f, .. } = self.w;
        let mlp = (e + 2 * f) * self.column;
        let Place::Cpu { threads } = self.load.place else { return mlp };
        // A document's keys get their gradients in up to four parts (`ops/attention/backward.rs`).
        let parts = (self.load.longest / 1024 + 1).min(4);
        let sums: f64 = (1..=parts).map(|n| (n as f64 / parts as f64).sqrt()).sum();
        let attention = (2 * q + 2 * k) * self.column + (2.0 * sums * (k * self.column) as f64) as usize;
        let scores = threads * 2 * 4 * ATTENTION_ROWS * self.load.longest;
        mlp.max((attention + scores).saturating_sub((3 * f + e) * self.column))
    }

    /// The head's own tensors: the trained rows' gradient, a chunk of logits with its rows, a trained weight's gradient.
    fn head(&self) -> usize {
        let Widths { e, v, .. } = self.w;
        let on_card = matches!(self.load.place, Place::Card { .. });
        let rows = self.load.tokens.min(LOGITS_ROWS[usize::from(on_card)]);
        let b = self.load.compute_bytes;
        // An adapter on the head makes it a wider product with a weight of its own.
        let widened = match self.sizes.head_rank {
            0 => 0,
            rank => (v * b + v * 4) * (e + rank),
        };
        e * self.column + rows * (v + e) * b + self.vocabulary(self.sizes.trains_head) + widened
    }

    /// The fullest moment where each op has a node of its own.
    fn moments(&self) -> Moment {
        let (e, layers) = (self.w.e * self.column, self.layers());
        let all = |recomputed: &dyn Fn(usize) -> bool| -> usize {
            let of = |(n, layer)| if recomputed(n) { e } else { self.kept(layer) };
            layers.iter().enumerate().map(of).sum()
        };
        // The number of a layer counts from the first of the model.
        let below = self.sizes.layers.len() - layers.len();
        let one = layers.iter().map(|layer| self.kept(layer)).max().unwrap_or(0);
        let (kept, again) = match self.load.recompute {
            None => (all(&|_| false), 0),
            Some(every) => (all(&|n| (n + below).is_multiple_of(every.max(1))), one),
        };
        let held = self.values() + self.state() + self.sums() + self.cast();
        let of_head = self.vocabulary(self.sizes.trains_head);
        // Embedding's gradient is made whole and added: to the head's where both are one.
        let made = self.vocabulary(self.sizes.trains_embedding) * (1 + usize::from(self.w.tied));
        // Recomputed layers add up a pass's gradients in f32, before they are added to the step's.
        let gradients = match self.load.recompute {
            None => self.gradients(),
            Some(_) => self.values() + self.sums(),
        };
        let end = self.values() + self.state() + self.cast() + gradients;
        fullest([
            Moment { trained: held, activations: self.tables() + kept + 2 * e, head: self.head() },
            Moment {
                trained: held + of_head,
                activations: self.tables() + kept + again + self.work(),
                head: 0,
            },
            Moment { trained: end, activations: self.tables() + one + self.work(), head: 0 },
            Moment { trained: end + made, activations: self.tables(), head: 0 },
        ])
    }

    fn on_cpu(&self) -> Memory {
        let Moment { trained, activations, head } = self.moments();
        let used = self.frozen() + trained + activations + head;
        // The allocator's own share, and the gaps that blocks as large as the embedding leave among all others: measured.
        let large = self.vocabulary(self.sizes.trains_embedding || self.sizes.trains_head);
        let gaps = used / 100 + if self.load.in_place { large * 3 / 2 } else { large * 5 / 2 };
        memory([self.frozen(), trained, activations, head, PROGRAM + gaps])
    }

    // ---- a card ----

    /// On a card without the layer op: the logits in a pool of our own, all else in Burn's.
    fn op_by_op(&self) -> Memory {
        let Moment { trained, activations, head } = self.moments();
        let logits = self.logits().min(head);
        let used = self.frozen() + trained + activations + head - logits;
        let rest = self.in_pages(used) - used + gaps(logits);
        memory([self.frozen(), trained, activations, head, rest])
    }

    fn logits(&self) -> usize {
        self.load.tokens.min(LOGITS_ROWS[1]) * self.w.v.next_multiple_of(8) * self.load.compute_bytes
    }

    /// What Burn's pools reserve for so many bytes: the pages are as large as the largest tensor, the new values of all
    /// trained parameters are one.
    fn in_pages(&self, bytes: usize) -> usize {
        let b = if self.sizes.trains_embedding { 4 } else { self.load.compute_bytes };
        let largest = (self.w.v * self.w.e * b).max(self.w.e * self.column).max(self.values());
        let page = (largest + MIB).next_multiple_of(MIB);
        // Where they are what is largest they want a page without anything on it.
        let empty = usize::from(largest == self.values());
        (bytes.div_ceil(page) + empty) * page
    }

    /// With the layer op (`ops/cuda/layer`).
    fn fused(&self) -> Memory {
        let Widths { e, v, .. } = self.w;
        let layers = self.layers().len();
        let pool = self.of_layers();
        let x = e * self.column;
        let cast = self.cast();
        // The head's gradient is there in both types.
        let (of_head, of_both) = match self.sizes.trains_head || self.sizes.trains_embedding {
            true => (v * e * 6, v * e * 8),
            false => (0, 0),
        };
        let (values, held) = (self.values(), self.values() + self.state());
        let Moment { trained, activations, head } = fullest([
            Moment {
                trained: held + self.sums() + cast,
                activations: (layers + 4) * x + self.tables(),
                head: of_head,
            },
            Moment { trained: held + cast + self.gradients() + of_both, ..Moment::default() },
            Moment { trained: held + 2 * values, ..Moment::default() },
        ]);
        let used = self.frozen() + trained + activations + head;
        let rest = self.in_pages(used) - used + gaps(pool.weights + pool.activations + pool.head);
        let weights = self.frozen() + pool.weights;
        memory([weights, trained, activations + pool.activations, head + pool.head, rest])
    }

    /// The pool of the layer op at its fullest moment.
    fn of_layers(&self) -> Pool {
        let Widths { e, q, k, f, heads, .. } = self.w;
        let of_layer = |layer: &[Option<usize>; 7]| {
            let columns = |group: &[Option<usize>]| -> usize {
                group.iter().flatten().map(|rank| rank.next_multiple_of(8)).sum()
            };
            [columns(&layer[..3]), columns(&layer[3..4]), columns(&layer[4..6]), columns(&layer[6..])]
        };
        let layers: Vec<[usize; 4]> = self.layers().iter().map(of_layer).collect();
        let low = layers.iter().max_by_key(|low| low.iter().sum::<usize>()).copied().unwrap_or_default();
        let spare = |columns: usize| columns.next_multiple_of(64);
        let stacked = |low: &[usize; 4]| -> usize {
            let groups = [(q + 2 * k, e), (e, q), (2 * f, e), (e, f)];
            let of = |((out, input), &columns): ((usize, usize), &usize)| {
                (out + spare(columns)) * (input + spare(columns))
            };
            if low.iter().sum::<usize>() == 0 { 0 } else { groups.into_iter().zip(low).map(of).sum() }
        };
        let weights = layers.iter().map(stacked).sum::<usize>() * self.load.compute_bytes;
        let f32s = |columns: usize| 4 * columns * self.load.tokens;

        let light =
            |low: &[usize; 4]| (q + spare(low[1]) + low[0] + low[2] + low[3]) * self.column + f32s(heads);
        let again = (q + 2 * k + e + 2 * f) * self.column;
        let every = self.load.recompute.map(|every| every.max(1));
        let below = self.sizes.layers.len() - layers.len();
        let recomputed = |n: usize| every.is_some_and(|every| (n + below).is_multiple_of(every));
        let kept: usize = layers.iter().map(light).sum::<usize>()
            + (0..layers.len()).filter(|&n| !recomputed(n)).count() * again;
        let once = if every.is_some() { again } else { 0 };

        let mlp = (3 * f + spare(low[2]) + 2 * e) * self.column;
        let of_heads = (3 * q + 2 * k) * self.column + f32s(2 * heads);
        let attention = (q + 2 * k + spare(low[0])) * self.column + of_heads.max(2 * e * self.column);
        let ends = (2 * e + spare(low[1]) + spare(low[3])) * self.column;
        let backward = once + ends + mlp.max(attention);
        let (work, head) = match self.logits() > backward {
            true => (0, self.logits()),
            false => (backward, 0),
        };
        Pool { weights, activations: kept + work, head }
    }
}

/// Bytes in the layer op's pool.
struct Pool {
    weights: usize,
    activations: usize,
    head: usize,
}

/// What a pool of so many bytes in use holds beyond them.
fn gaps(bytes: usize) -> usize {
    ((GAPS - 1.0) * bytes as f64) as usize
}

fn memory(bytes: [usize; 5]) -> Memory {
    let [weights, trained, activations, head, rest] = bytes.map(|bytes| bytes as u64);
    Memory { weights, trained, activations, head, rest }
}
