//! The row-wise kernels on matrices: contracts in `tools/cuda/README.md`.

use burn::tensor::DType;

use super::driver::Side;
use super::gemm::Matrix;
use super::kernels::{Arg, Files, Grid, Module};
use super::memory::Layout;

/// The heads of a fused row `[q | k | …]`, and what turns them.
#[derive(Debug, Clone, Copy)]
pub struct Rotation {
    /// Norm weights of query and key heads, `[1, d]`.
    pub norms: Option<[Matrix; 2]>,
    /// f32 `[t, d]`
    pub cos: Matrix,
    /// f32 `[t, d]`
    pub sin: Matrix,
    /// Query heads, key heads.
    pub heads: [usize; 2],
    /// d
    pub size: usize,
    /// ε of the norms.
    pub eps: f32,
}

/// The module for activations like `x` and weights like `weight`.
fn module(files: Files, size: usize, x: &Matrix, weight: Option<&Matrix>) -> Module {
    let float32 = x.dtype == DType::F32;
    let wide = weight.is_some_and(|weight| weight.dtype == DType::F32);
    Module { weight_float32: wide && !float32, ..Module::of(files, size, float32) }
}

/// Threads that share a row of the norm, threads of a block, rows of a block.
fn norm_threads(width: usize) -> [usize; 3] {
    let mut row = 32;
    while width > row * 32 {
        row *= 2;
    }
    let block = row.max(256);
    [row, block, block / row]
}

impl Side<'_> {
    /// `y ← norm(x)`
    pub fn norm(&mut self, x: Matrix, weight: Matrix, y: Matrix, eps: f32) {
        let [_, threads, rows] = norm_threads(x.columns);
        let mut arguments = [x.pointer, 0, weight.pointer, 0, y.pointer].map(Arg::from).to_vec();
        arguments.extend([x.stride, x.stride, x.stride, y.stride, x.rows].map(Arg::from));
        arguments.push(eps.into());
        let grid = Grid::new(x.rows.div_ceil(rows), threads);
        self.launch(module(Files::Norm, x.columns, &x, Some(&weight)), "rms_norm_forward", grid, &arguments);
    }

    /// `dx ← the gradient of x, where norm(x) has dy, plus the residual`; and the weight's, f32, if there is a
    /// place for it. dx may be the residual.
    pub fn norm_backward(
        &mut self,
        [x, weight, dy, dx]: [Matrix; 4],
        residual: Option<Matrix>,
        d_weight: Option<Matrix>,
        eps: f32,
    ) {
        let [_, threads, rows] = norm_threads(x.columns);
        let mut blocks = x.rows.div_ceil(rows);
        let mut name = "rms_norm_backward";
        let pointers = [x.pointer, weight.pointer, dy.pointer, residual.map_or(0, |r| r.pointer), dx.pointer];
        let mut arguments = pointers.map(Arg::from).to_vec();
        let mut sums = None;
        if let Some(d_weight) = d_weight {
            blocks = blocks.min(8 * self.gpu.multiprocessors);
            name = "rms_norm_backward_weight";
            let partials = self.partials(blocks, x.columns);
            arguments.push(partials.1.pointer.into());
            sums = Some((partials, d_weight));
        }
        let strides = [x.stride, dy.stride, residual.map_or(x.columns, |r| r.stride), dx.stride, x.rows];
        arguments.extend(strides.map(Arg::from));
        arguments.push(eps.into());
        let module = module(Files::Norm, x.columns, &x, Some(&weight));
        self.launch(module, name, Grid::new(blocks, threads), &arguments);
        if let Some(((_block, partials), d_weight)) = sums {
            self.add_partials(partials, d_weight);
        }
    }

    fn partials(&mut self, blocks: usize, width: usize) -> (super::memory::Block, Matrix) {
        let mut layout = Layout::default();
        let place = layout.dense(blocks, width, DType::F32);
        let block = layout.block(self);
        let matrix = block.at(place);
        (block, matrix)
    }

    /// `out ← Σ rows`, in their order.
    fn add_partials(&mut self, partials: Matrix, out: Matrix) {
        let arguments = [
            partials.pointer.into(),
            out.pointer.into(),
            partials.rows.into(),
            partials.columns.into(),
            0usize.into(),
        ];
        let grid = Grid::new(partials.columns.div_ceil(32), 256);
        self.launch(Module::bf16(Files::Small, 0), "sum_partials", grid, &arguments);
    }

    /// Head norms and rotary embedding: the q and k columns of `qkv`, into q and k.
    pub fn rotate(&mut self, qkv: Matrix, q: Matrix, k: Matrix, by: &Rotation) {
        let mut arguments = vec![qkv.pointer.into()];
        arguments.extend(by.weights());
        arguments.extend([q.pointer, k.pointer].map(Arg::from));
        arguments.extend([qkv.stride, by.size, q.stride, k.stride, qkv.rows].map(Arg::from));
        arguments.extend(by.heads.map(Arg::from));
        arguments.push(by.eps.into());
        let grid = Grid::new(qkv.rows.div_ceil(8), 256);
        self.launch(by.module(&qkv), "qk_norm_rope_forward", grid, &arguments);
    }

    /// The gradients of the q and k columns of `qkv`, from those of q and k; and of the norms' weights, f32
    /// `[1, 2 d]`, if there is a place for them.
    pub fn rotate_backward(
        &mut self,
        [qkv, dq, dk, d_qkv]: [Matrix; 4],
        d_weights: Option<Matrix>,
        by: &Rotation,
    ) {
        let mut blocks = qkv.rows.div_ceil(8);
        let mut name = "qk_norm_rope_backward";
        let mut arguments = vec![qkv.pointer.into()];
        arguments.extend(by.weights());
        arguments.extend([dq.pointer, dk.pointer, d_qkv.pointer].map(Arg::from));
        let mut sums = None;
        if let Some(d_weights) = d_weights {
            blocks = blocks.min(8 * self.gpu.multiprocessors);
            name = "qk_norm_rope_backward_weight";
            let partials = self.partials(blocks, 2 * by.size);
            arguments.push(partials.1.pointer.into());
            sums = Some((partials, d_weights));
        }
        let strides = [qkv.stride, by.size, dq.stride, dk.stride, d_qkv.stride, qkv.rows];
        arguments.extend(strides.map(Arg::from));
        arguments.extend(by.heads.map(Arg::from));
        arguments.push(by.eps.into());
        self.launch(by.module(&qkv), name, Grid::new(blocks, 256), &arguments);
        if let Some(((_block, partials), d_weights)) = sums {
            self.add_partials(partials, d_weights);
        }
    }

    /// Attention of one token, each a row, to itself and the `seen` tokens before it: the first rows of `kept`, keys and
    /// values, behind which the token's own are put.
    pub fn next_token(
        &mut self,
        [q, k, v, out]: [Matrix; 4],
        [keys, values]: [Matrix; 2],
        seen: usize,
        size: usize,
        scale: f32,
    ) {
        let (heads, group) = (q.columns / size, q.columns / k.columns);
        let mut arguments = [q, k, v, keys, values, out].map(|x| Arg::from(x.pointer)).to_vec();
        arguments.extend([keys.stride, seen, group].map(Arg::from));
        arguments.push(scale.into());
        let module = module(Files::NextToken, size, &q, None);
        self.launch(module, "next_token_attention", Grid::new(heads, 512), &arguments);
    }

    /// `out ← silu(gate) · up`; gate and up have one stride.
    pub fn swiglu(&mut self, gate: Matrix, up: Matrix, out: Matrix) {
        let mut arguments = [gate, up, out].map(|x| Arg::from(x.pointer)).to_vec();
        arguments.extend([gate.stride, out.stride, gate.rows].map(Arg::from));
        let grid = Grid::new((gate.rows * gate.columns).div_ceil(2048), 256);
        self.launch(module(Files::Swiglu, gate.columns, &gate, None), "swiglu_forward", grid, &arguments);
    }

    /// The gradients of gate and up (of one stride), and the output once more if there is a place for it.
    pub fn swiglu_backward(
        &mut self,
        [gate, up, d_out]: [Matrix; 3],
        [d_gate, d_up]: [Matrix; 2],
        out: Option<Matrix>,
    ) {
        let mut arguments = [gate, up, d_out, d_gate, d_up].map(|x| Arg::from(x.pointer)).to_vec();
        arguments.push(out.map_or(0, |out| out.pointer).into());
        let strides = [gate.stride, d_out.stride, d_gate.stride, out.map_or(gate.columns, |out| out.stride)];
        arguments.extend(strides.map(Arg::from));
        arguments.push(gate.rows.into());
        let grid = Grid::new((gate.rows * gate.columns).div_ceil(2048), 256);
        self.launch(module(Files::Swiglu, gate.columns, &gate, None), "swiglu_backward", grid, &arguments);
    }
}

impl Rotation {
    /// Pointers of q's and k's norm, cos and sin.
    fn weights(&self) -> [Arg; 4] {
        let [q, k] = self.norms.map_or([0, 0], |norms| norms.map(|norm| norm.pointer));
        [q, k, self.cos.pointer, self.sin.pointer].map(Arg::from)
    }

    fn module(&self, x: &Matrix) -> Module {
        module(Files::Rope, self.size, x, self.norms.as_ref().map(|[q, _]| q))
    }
}
