//! `x · Wᵀ` on the CPU: one product, no copies.
//!
//! Saved for backward: W if x is tracked, x if W is tracked. A row of the result depends on that row
//! of x and on W alone, bit for bit (see [`product`]).

use burn::backend::autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, Ops};
use burn::backend::tensor::FloatTensor;
use burn::backend::{Autodiff, Backend, Dispatch, Flex, TensorMetadata, backend_extension};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;

use super::flex::gemm::{Matrix, Target, Threads, multiply, product};
use super::flex::{self, Buffer};

/// The product with a weight as Hugging Face stores it.
#[backend_extension(Flex, Autodiff)]
pub trait LinearOps: Backend {
    /// See [`super::linear`].
    fn linear(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// See [`super::linear`].
pub fn linear(x: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    assert_eq!(x.dims()[1], weight.dims()[1], "linear: width of x and of the weight");
    Tensor::from_dispatch(<Dispatch as LinearOps>::linear(x.into_dispatch(), weight.into_dispatch()))
}

impl LinearOps for Flex {
    fn linear(x: FlexTensor, weight: FlexTensor) -> FlexTensor {
        let (x, weight) = (flex::dense(x), flex::dense(weight));
        let (rows, columns) = (x.shape()[0], weight.shape()[0]);
        flex::tensor(product(flex::values(&x), rows, matrix(&weight).t(), Threads::All), [rows, columns])
    }
}

impl<C: CheckpointStrategy> LinearOps for Autodiff<Flex, C> {
    fn linear(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self> {
        let prepared = LinearBackward.prepare::<C>([x.node(), weight.node()]).compute_bound().stateful();
        let out = Flex::linear(x.primitive().clone(), weight.primitive().clone());
        let state = || {
            let x_state = weight.is_tracked().then(|| x.primitive().clone());
            (x_state, x.is_tracked().then(|| weight.primitive().clone()))
        };
        super::tape::record(prepared, state, out)
    }
}

#[derive(Debug)]
struct LinearBackward;

impl Backward<Flex, 2> for LinearBackward {
    /// x, W
    type State = (Option<FlexTensor>, Option<FlexTensor>);

    fn backward(self, ops: Ops<Self::State, 2>, grads: &mut Gradients, _: &mut Checkpointer) {
        let grad = flex::dense(grads.consume::<Flex>(&ops.node));
        let [x_node, weight_node] = ops.parents;
        let (x, weight) = ops.state;
        if let (Some(node), Some(weight)) = (x_node, weight) {
            grads.register::<Flex>(node.id, input_gradient(&grad, &flex::dense(weight)));
        }
        if let (Some(node), Some(x)) = (weight_node, x) {
            grads.register::<Flex>(node.id, weight_gradient(&grad, &flex::dense(x)));
        }
    }
}

/// The matrix of a dense tensor of rank 2.
pub fn matrix(x: &FlexTensor) -> Matrix<'_> {
    let shape = x.shape();
    Matrix::new(flex::values(x), shape[0], shape[1])
}

/// g · W
pub fn input_gradient(grad: &FlexTensor, weight: &FlexTensor) -> FlexTensor {
    let (rows, columns) = (grad.shape()[0], weight.shape()[1]);
    flex::tensor(product(flex::values(grad), rows, matrix(weight), Threads::All), [rows, columns])
}

/// gᵀ · x
pub fn weight_gradient(grad: &FlexTensor, x: &FlexTensor) -> FlexTensor {
    let (rows, columns) = (grad.shape()[1], x.shape()[1]);
    let mut out = Buffer::new(rows * columns);
    multiply(Target::write(out.slots(), rows, columns), matrix(grad).t(), matrix(x), Threads::All);
    // SAFETY: a product without `add` writes every element.
    flex::tensor(unsafe { out.finish() }, [rows, columns])
}
