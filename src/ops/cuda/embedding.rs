//! Rows of the embedding; its gradient is one launch, each element summed in the tokens' order.

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Autodiff, Backend, Cube, Dispatch, TensorMetadata, backend_extension};
use burn::tensor::{DType, Int, Shape, Tensor};
use burn_cubecl::tensor::CubeTensor;

use super::super::tape::record;
use super::kernels::{Arg, Files, Grid, Module};
use super::tensor::{dense, empty, gpu, is_on_card, matrix, pointer};

/// Rows of a table.
#[backend_extension(Cube, Autodiff)]
pub trait EmbeddingOps: Backend {
    /// See [`crate::ops::embedding`].
    fn cuda_embedding(weight: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self>;
}

/// Whether [`embedding`] takes these tensors.
pub fn takes(ids: &Tensor<1, Int>, weight: &Tensor<2>) -> bool {
    is_on_card(weight) && ids.dims()[0] > 0 && weight.dims()[1].is_multiple_of(8)
}

/// See [`crate::ops::embedding`].
pub fn embedding(ids: Tensor<1, Int>, weight: Tensor<2>) -> Tensor<2> {
    let ids = ids.inner().cast(DType::I32).into_dispatch();
    Tensor::from_dispatch(<Dispatch as EmbeddingOps>::cuda_embedding(weight.into_dispatch(), ids))
}

impl EmbeddingOps for Cube {
    fn cuda_embedding(weight: CubeTensor, ids: CubeTensor) -> CubeTensor {
        Cube::float_select(weight, 0, ids)
    }
}

impl<C: CheckpointStrategy> EmbeddingOps for Autodiff<Cube, C> {
    fn cuda_embedding(weight: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self> {
        let prepared = EmbeddingBackward.prepare::<C>([weight.node()]).compute_bound().stateful();
        let weight = weight.into_primitive();
        let shape = weight.shape();
        let ids = dense(ids);
        let out = Cube::float_select(weight, 0, ids.clone());
        record(prepared, || State { ids, shape }, out)
    }
}

#[derive(Debug, Clone)]
struct State {
    ids: CubeTensor,
    /// Of the table.
    shape: Shape,
}

#[derive(Debug)]
struct EmbeddingBackward;

impl Backward<Cube, 1> for EmbeddingBackward {
    type State = State;

    fn backward(self, ops: Ops<State, 1>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = dense(grads.consume::<Cube>(&ops.node));
        let State { ids, shape } = ops.state;
        let [Some(node)] = ops.parents else { return };
        let out = empty(&grad, shape, grad.dtype);
        let [from, to] = [&grad, &out].map(matrix);
        let mut arguments = vec![from.pointer.into(), pointer(&ids).into(), to.pointer.into()];
        arguments.extend([from.stride, from.rows, from.columns].map(Arg::from));
        let grid = Grid::new(from.rows * from.columns.div_ceil(2048), 256);
        let module = Module::of(Files::Embedding, 0, grad.dtype == DType::F32);
        gpu(&grad).enter(|side| {
            side.clear(to);
            side.launch(module, "embedding_gradient", grid, &arguments);
        });
        grads.register::<Cube>(node.id, out);
    }
}
