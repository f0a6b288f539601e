//! `linear` and `lora_linear`.

use burn::tensor::Tensor;

use super::super::{linear, plain};
use super::*;

/// 6e-8 · sqrt(1536) ≈ 2.4e-6, times two.
const TOLERANCE: f32 = 5e-6;

type Linear = fn(Tensor<2>, Tensor<2>) -> Tensor<2>;

fn shaped(op: Linear, [t, out, inner]: [usize; 3]) -> impl Fn(&[Tensor<1>]) -> Tensor<1> + Sync {
    move |x| op(x[0].clone().reshape([t, inner]), x[1].clone().reshape([out, inner])).reshape([-1])
}

#[test]
fn linear_is_the_plain_product() {
    for shape in [[1, 1, 1], [1, 64, 32], [3, 17, 5], [300, 192, 576], [65, 576, 1536]] {
        let [t, out, inner] = shape;
        let (x, weight) = (random(t * inner, 1), random(out * inner, 2));
        for inputs in [
            [x.clone(), weight.clone()],
            [x.clone(), weight.clone().frozen()],
            [x.clone().frozen(), weight.clone()],
            [x.clone().frozen(), weight.clone().frozen()],
        ] {
            let name = format!("linear {shape:?}");
            compare(&name, &inputs, TOLERANCE, &shaped(linear, shape), &shaped(plain::linear, shape));
        }
    }
}

#[test]
fn linear_repeats_bit_for_bit() {
    let inputs = [random(200 * 300, 3), random(150 * 300, 4)];
    assert_same_bits("linear", &inputs, &shaped(linear, [200, 150, 300]));
}
