//! Norm, rotary embedding and SwiGLU.

use burn::tensor::{DType, Tensor};

use super::super::{Rope, plain, qk_norm_rope, rms_norm, swiglu};
use super::*;

/// 6e-8 · sqrt(576) ≈ 1.5e-6, times three; a little more in the weight gradient of 300 rows.
const TOLERANCE: f32 = 5e-6;

type RmsNorm = fn(Tensor<2>, Tensor<1>, f64) -> Tensor<2>;

fn norm(op: RmsNorm, t: usize, e: usize) -> impl Fn(&[Tensor<1>]) -> Tensor<1> + Sync {
    move |x| op(x[0].clone().reshape([t, e]), x[1].clone(), 1e-6).reshape([-1])
}

#[test]
fn rms_norm_is_the_plain_norm() {
    for (t, e) in [(1, 2), (1, 16), (3, 17), (33, 64), (300, 576), (65, 100)] {
        let inputs = [random(t * e, 1), random(e, 2)];
        let both = |inputs: &[Input]| {
            let name = format!("rms_norm {t}×{e}");
            compare(&name, inputs, TOLERANCE, &norm(rms_norm, t, e), &norm(plain::rms_norm, t, e));
        };
        both(&inputs);
        both(&[inputs[0].clone(), inputs[1].clone().frozen()]);
        both(&[inputs[0].clone().frozen(), inputs[1].clone()]);
        both(&[inputs[0].clone().frozen(), inputs[1].clone().frozen()]);
    }
}

#[test]
fn rms_norm_gradient_is_the_slope() {
    // Differences of f32 values over 2e-2 hold about three digits.
    assert_slopes("rms_norm", &[random(5 * 24, 3), random(24, 4)], 3e-3, &norm(rms_norm, 5, 24));
}

#[test]
fn rms_norm_repeats_bit_for_bit() {
    assert_same_bits("rms_norm", &[random(700 * 96, 5), random(96, 6)], &norm(rms_norm, 700, 96));
}

/// Positions restart at each document.
fn tables(t: usize, d: usize) -> Rope {
    let angle = |n: usize, c: usize| (n % 37) as f32 * 1e4f32.powf(-2.0 * (c % (d / 2)) as f32 / d as f32);
    let table = |f: fn(f32) -> f32| {
        let values: Vec<f32> = (0..t * d).map(|i| f(angle(i / d, i % d))).collect();
        Tensor::<2>::from_data(TensorData::new(values, [t, d]), &Device::flex())
    };
    Rope { cos: table(f32::cos), sin: table(f32::sin) }
}

type NormRope = fn(Tensor<3>, Option<Tensor<1>>, f64, &Rope) -> Tensor<3>;

fn rotated(op: NormRope, [t, h, d]: [usize; 3]) -> impl Fn(&[Tensor<1>]) -> Tensor<1> {
    let rope = tables(t, d);
    move |x| op(x[0].clone().reshape([t, h, d]), x.get(1).cloned(), 1e-6, &rope).reshape([-1])
}

#[test]
fn qk_norm_rope_is_the_plain_one() {
    for [t, h, d] in [[1, 1, 16], [3, 2, 64], [70, 3, 128], [300, 9, 64], [33, 1, 2]] {
        let (x, weight) = (random(t * h * d, 7), random(d, 8));
        for inputs in [
            vec![x.clone(), weight.clone()],
            vec![x.clone(), weight.clone().frozen()],
            vec![x.clone().frozen(), weight.clone()],
            vec![x.clone().frozen(), weight.frozen()],
            vec![x.clone()],
            vec![x.frozen()],
        ] {
            let name = format!("qk_norm_rope {t}×{h}×{d}, {} inputs", inputs.len());
            let shape = [t, h, d];
            compare(
                &name,
                &inputs,
                TOLERANCE,
                &rotated(qk_norm_rope, shape),
                &rotated(plain::qk_norm_rope, shape),
            );
        }
    }
}

#[test]
fn qk_norm_rope_repeats_bit_for_bit() {
    let shape = [500, 4, 32];
    let rope = tables(shape[0], shape[2]);
    let op = |x: &[Tensor<1>]| {
        qk_norm_rope(x[0].clone().reshape(shape), Some(x[1].clone()), 1e-6, &rope).reshape([-1])
    };
    assert_same_bits("qk_norm_rope", &[random(500 * 4 * 32, 9), random(32, 10)], &op);
}

type Swiglu = fn(Tensor<2>, Tensor<2>) -> Tensor<2>;

fn gated(op: Swiglu, t: usize, f: usize, size: f32) -> impl Fn(&[Tensor<1>]) -> Tensor<1> + Sync {
    move |x| {
        let shaped = |i: usize| x[i].clone().mul_scalar(size).reshape([t, f]);
        op(shaped(0), shaped(1)).reshape([-1])
    }
}

#[test]
fn swiglu_is_the_plain_one() {
    for (t, f, size) in [(1, 1, 1.0), (5, 33, 4.0), (40, 1536, 1.0), (7, 100, 120.0)] {
        let (gate, up) = (random(t * f, 11), random(t * f, 12));
        for inputs in [
            [gate.clone(), up.clone()],
            [gate.clone(), up.clone().frozen()],
            [gate.clone().frozen(), up.clone()],
            [gate.clone().frozen(), up.clone().frozen()],
        ] {
            // A handful of roundings an element, exp's 1.2e-7 among them.
            let name = format!("swiglu {t}×{f}, values to {size}");
            compare(&name, &inputs, 1e-6, &gated(swiglu, t, f, size), &gated(plain::swiglu, t, f, size));
        }
    }
}

#[test]
fn swiglu_gradient_is_the_slope() {
    assert_slopes("swiglu", &[random(60, 13), random(60, 14)], 3e-3, &gated(swiglu, 6, 10, 2.0));
}

#[test]
fn swiglu_repeats_bit_for_bit() {
    assert_same_bits("swiglu", &[random(90_000, 15), random(90_000, 16)], &gated(swiglu, 300, 300, 3.0));
}

/// f16 and bf16 have no CPU kernel: the plain version takes them, gradients included.
#[test]
fn half_floats_take_the_plain_version() {
    let (t, e) = (20, 32);
    for (dtype, tolerance) in [(DType::F16, 4e-3), (DType::BF16, 3e-2)] {
        let op = |norm: RmsNorm, gate: Swiglu| {
            move |x: &[Tensor<1>]| {
                let half = |x: &Tensor<1>| x.clone().cast(dtype);
                let y = norm(half(&x[0]).reshape([t, e]), half(&x[1]), 1e-6);
                gate(y.clone(), y).cast(DType::F32).reshape([-1])
            }
        };
        let inputs = [random(t * e, 17), random(e, 18)];
        let half = run(&inputs, &op(rms_norm, swiglu));
        let bits = |results: &[Vec<f32>]| results.concat().into_iter().map(f32::to_bits).collect::<Vec<_>>();
        assert_eq!(bits(&half), bits(&run(&inputs, &op(plain::rms_norm, plain::swiglu))), "{dtype:?}");
        let exact = |x: &[Tensor<1>]| {
            let y = plain::rms_norm(x[0].clone().reshape([t, e]), x[1].clone(), 1e-6);
            plain::swiglu(y.clone(), y).reshape([-1])
        };
        // A few roundings to 11 or 8 bits.
        assert_close(&format!("{dtype:?}"), &half, &run(&inputs, &exact), tolerance);
    }
}
