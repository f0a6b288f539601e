//! `sum_squares` and `adamw`.

use super::super::optim::to_bf16;
use super::super::{AdamW, adamw, plain, sum_squares};
use super::*;
use burn::tensor::DType;

#[test]
fn sum_squares_is_the_sum_of_squares() {
    for len in [0, 1, 31, 33, 5000, 200_001] {
        let input = random(len, 1).frozen();
        let exact: f64 = input.values.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let got = f64::from(floats(sum_squares(input.tensor()))[0]);
        // Blocks of 1024 in f32, 32 terms a lane; the rest in f64, rounded at the end.
        assert!((got - exact).abs() <= 3e-7 * exact, "{len}: {got} instead of {exact}");
    }
}

#[test]
fn optimizer_repeats_bit_for_bit() {
    assert_same_bits("sum_squares", &[random(300_000, 2).frozen()], &|x| sum_squares(x[0].clone()));
    let step = AdamW {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.01,
        update: 3,
        grad_scale: 0.5,
        rounding: 0,
    };
    let inputs =
        [random(100_000, 3), random(100_000, 4), random(100_000, 5), random(100_000, 6)].map(|mut input| {
            input.tracked = false;
            input.values.iter_mut().for_each(|x| *x = x.abs());
            input
        });
    assert_same_bits("adamw", &inputs, &move |x| {
        let [p, m, v] = adamw(x[0].clone(), x[1].clone(), x[2].clone(), x[3].clone(), &step);
        Tensor::cat(vec![p, m, v], 0)
    });
}

/// Twenty updates of both versions, and of torch's formula in f64.
#[test]
fn adamw_is_torchs() {
    let len = 40_000;
    let start = random(len, 7).frozen();
    let zeros = || Tensor::<1>::zeros([len], &Device::flex());
    let mut fast = [start.tensor(), zeros(), zeros()];
    let mut slow = fast.clone();
    let mut exact: Vec<[f64; 3]> = start.values.iter().map(|&p| [f64::from(p), 0.0, 0.0]).collect();
    for update in 1..=20 {
        let step = AdamW {
            lr: 1e-2 / update as f64,
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            weight_decay: 0.1,
            update,
            grad_scale: 0.25,
            rounding: 0,
        };
        let grad = random(len, 100 + update as u64).frozen();
        fast = {
            let [p, m, v] = fast;
            adamw(p, m, v, grad.tensor(), &step)
        };
        slow = {
            let [p, m, v] = slow;
            plain::adamw(p, m, v, grad.tensor(), &step)
        };
        for ([p, m, v], g) in exact.iter_mut().zip(&grad.values) {
            let g = f64::from(*g) * step.grad_scale;
            *p *= 1.0 - step.lr * step.weight_decay;
            *m += (g - *m) * (1.0 - step.beta1);
            *v = *v * step.beta2 + g * g * (1.0 - step.beta2);
            let (c1, c2) = (1.0 - step.beta1.powi(update as i32), 1.0 - step.beta2.powi(update as i32));
            *p -= step.lr / c1 * *m / (v.sqrt() / c2.sqrt() + step.eps);
        }
    }
    let exact: Vec<Vec<f32>> = (0..3).map(|i| exact.iter().map(|x| x[i] as f32).collect()).collect();
    // Twenty updates of a few roundings each.
    assert_close("adamw and f64", &fast.map(floats), &exact, 1e-6);
    assert_close("plain adamw and f64", &slow.map(floats), &exact, 1e-6);
}

/// What the caller still holds isn't overwritten.
#[test]
fn adamw_leaves_shared_memory_alone() {
    let step = AdamW {
        lr: 1e-1,
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        weight_decay: 0.0,
        update: 1,
        grad_scale: 1.0,
        rounding: 0,
    };
    let kept = random(100, 8).frozen().tensor();
    let before = floats(kept.clone());
    let zeros = || Tensor::<1>::zeros([100], &Device::flex());
    let [moved, ..] = adamw(kept.clone(), zeros(), zeros(), random(100, 9).frozen().tensor(), &step);
    assert_eq!(floats(kept), before);
    assert_ne!(floats(moved), before);
}

/// Every value is one of its two neighbours in bf16, and the mean of many roundings is the value.
#[test]
fn bf16_by_chance_is_right_on_average() {
    let mut x = random(3000, 10).frozen().values;
    x.extend([0.0, -0.0, 1.0, -2.5, 3.3e38, 1e-40, f32::INFINITY, f32::NEG_INFINITY]);
    let tensor =
        || Tensor::<1>::from_data(burn::tensor::TensorData::new(x.clone(), [x.len()]), &Device::flex());
    const ROUNDS: u32 = 2000;
    let mut sums = vec![0.0; x.len()];
    for rounding in 0..ROUNDS {
        let got = to_bf16(tensor(), rounding, 16 * (rounding % 2));
        assert_eq!(got.dtype(), DType::BF16);
        for ((got, x), sum) in floats(got.cast(DType::F32)).iter().zip(&x).zip(&mut sums) {
            let lower = f32::from_bits(x.to_bits() & 0xffff_0000);
            let upper = f32::from_bits((x.to_bits() & 0xffff_0000).wrapping_add(0x1_0000));
            assert!(got == x || *got == lower || *got == upper, "{got} for {x}");
            *sum += f64::from(*got);
        }
    }
    for (sum, x) in sums.iter().zip(&x).filter(|(_, x)| x.abs() < 1e30) {
        let (mean, x) = (sum / f64::from(ROUNDS), f64::from(*x));
        // A neighbour is 2⁻⁷ away at most; the mean of 2000 draws, 5 deviations.
        assert!(
            (mean - x).abs() <= x.abs() * 2f64.powi(-7) * 0.5 / f64::from(ROUNDS).sqrt() * 5.0 + 1e-38,
            "{mean} for {x}"
        );
    }
}
