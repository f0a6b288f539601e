//! `linear_cross_entropy` from Burn's tensor operations, in chunks of trained rows, for devices
//! without a kernel of their own: the logits of one chunk are all that is ever held.
//!
//! The gradients of a chunk are computed along with its loss, outside the tape. What goes on the
//! tape is a number that is always zero and has just these gradients.

use burn::tensor::{DType, IndexingUpdateOp, Int, Tensor};

/// Rows of a chunk.
const ROWS: usize = 256;

/// See [`super::linear_cross_entropy`].
pub fn linear_cross_entropy(
    hidden: Tensor<2>,
    weight: Tensor<2>,
    rows: Tensor<1, Int>,
    targets: Tensor<1, Int>,
) -> Tensor<1> {
    let x = hidden.select(0, rows.inner());
    let wanted = [x.is_tracked(), weight.is_tracked()];
    let head = Head { x: x.clone().inner(), weight: weight.clone().inner(), targets: targets.inner() };
    let n = head.x.dims()[0];
    let mut sum = Sum { loss: Tensor::zeros([1], (&head.x.device(), DType::F32)), dx: Vec::new(), dw: None };
    for first in (0..n).step_by(ROWS) {
        head.chunk(first, ROWS.min(n - first), wanted, &mut sum);
    }
    let mut loss = sum.loss;
    if wanted[0] && !sum.dx.is_empty() {
        loss = zero_with_gradient(x, Tensor::cat(sum.dx, 0)) + loss;
    }
    if let (true, Some(dw)) = (wanted[1], sum.dw) {
        loss = zero_with_gradient(weight, dw) + loss;
    }
    loss
}

struct Head {
    /// The trained rows.
    x: Tensor<2>,
    weight: Tensor<2>,
    targets: Tensor<1, Int>,
}

struct Sum {
    loss: Tensor<1>,
    /// Of each chunk's rows.
    dx: Vec<Tensor<2>>,
    dw: Option<Tensor<2>>,
}

impl Head {
    fn chunk(&self, first: usize, rows: usize, wanted: [bool; 2], sum: &mut Sum) {
        let x = self.x.clone().narrow(0, first, rows);
        let targets = self.targets.clone().narrow(0, first, rows).unsqueeze_dim::<2>(1);
        let logits = super::plain::linear(x.clone(), self.weight.clone()).cast(DType::F32);
        let picked = logits.clone().gather(1, targets.clone());
        let max = logits.clone().max_dim(1);
        let exponentials = (logits - max.clone()).exp();
        let total = exponentials.clone().sum_dim(1);
        sum.loss = sum.loss.clone() + (total.clone().log() + max - picked).sum();
        if wanted == [false; 2] {
            return;
        }
        let ones = Tensor::ones([rows, 1], (&x.device(), DType::F32));
        let slopes = (exponentials / total).scatter(1, targets, -ones, IndexingUpdateOp::Add);
        let slopes = slopes.cast(x.dtype());
        if wanted[0] {
            sum.dx.push(slopes.clone().matmul(self.weight.clone()));
        }
        if wanted[1] {
            let dw = slopes.transpose().matmul(x);
            sum.dw = Some(match sum.dw.take() {
                Some(before) => before + dw,
                None => dw,
            });
        }
    }
}

/// Zero, with `gradient` as its gradient with respect to `x`.
fn zero_with_gradient(x: Tensor<2>, gradient: Tensor<2>) -> Tensor<1> {
    let product = (x.cast(DType::F32) * gradient.cast(DType::F32)).sum();
    product.clone() - product.detach()
}
