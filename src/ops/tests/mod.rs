//! Each CPU version against the plain version under Burn's autodiff, forward and backward.
//!
//! Tolerances are relative to the largest element of what is compared. Both sides round in f32
//! (6e-8) in different orders; with sums of k random terms of like size they drift apart by about
//! 6e-8 · sqrt(k), a few times that at worst over many elements. Each test states its factor.

use burn::tensor::{Device, Tensor, TensorData};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

mod attention;
mod elementwise;
mod loss;
mod optim;
mod products;
mod timings;

/// One float input of an op, flat; the op reshapes it.
#[derive(Clone)]
pub struct Input {
    pub values: Vec<f32>,
    pub tracked: bool,
}

/// A tracked input of values in (−1, 1), the same for the same seed.
pub fn random(len: usize, seed: u64) -> Input {
    let mut generator = ChaCha8Rng::seed_from_u64(seed);
    let values = (0..len).map(|_| (generator.next_u32() >> 8) as f32 / (1 << 23) as f32 - 1.0).collect();
    Input { values, tracked: true }
}

impl Input {
    /// The same values as a constant on the plain device.
    pub fn frozen(mut self) -> Self {
        self.tracked = false;
        self
    }

    fn tensor(&self) -> Tensor<1> {
        let device = match self.tracked {
            true => Device::flex().autodiff(),
            false => Device::flex(),
        };
        let tensor = Tensor::from_data(TensorData::new(self.values.clone(), [self.values.len()]), &device);
        if self.tracked { tensor.require_grad() } else { tensor }
    }
}

/// The result of an op, then the gradient of each tracked input, with a random gradient coming in.
pub fn run(inputs: &[Input], op: &dyn Fn(&[Tensor<1>]) -> Tensor<1>) -> Vec<Vec<f32>> {
    let plain: Vec<_> = inputs.iter().cloned().map(Input::frozen).map(|input| input.tensor()).collect();
    let len = op(&plain).dims()[0];
    run_with(inputs, &random(len, 999).values, op)
}

/// As [`run`], with this gradient coming in.
pub fn run_with(inputs: &[Input], incoming: &[f32], op: &dyn Fn(&[Tensor<1>]) -> Tensor<1>) -> Vec<Vec<f32>> {
    let tensors: Vec<_> = inputs.iter().map(Input::tensor).collect();
    let out = op(&tensors);
    let mut results = vec![floats(out.clone())];
    if inputs.iter().any(|input| input.tracked) {
        let incoming = Input { values: incoming.to_vec(), tracked: false }.tensor();
        let mut grads = (out * incoming).sum().backward();
        let tracked = tensors.iter().zip(inputs).filter(|(_, input)| input.tracked);
        results.extend(tracked.map(|(t, _)| floats(t.grad_remove(&mut grads).expect("a gradient"))));
    }
    results
}

/// The elements of a tensor.
pub fn floats<const D: usize>(x: Tensor<D>) -> Vec<f32> {
    x.into_data().try_into_vec().expect("f32")
}

/// Compares two runs, element by element, relative to the largest element of each result.
pub fn assert_close(name: &str, got: &[Vec<f32>], expected: &[Vec<f32>], tolerance: f32) {
    assert_eq!(got.len(), expected.len(), "{name}: number of results");
    for (n, (got, expected)) in got.iter().zip(expected).enumerate() {
        assert_eq!(got.len(), expected.len(), "{name}: length of result {n}");
        let largest = expected.iter().fold(0.0f32, |a, b| a.max(b.abs()));
        for (i, (a, b)) in got.iter().zip(expected).enumerate() {
            let error = (a - b).abs();
            // Written so that NaN fails.
            assert!(
                error <= tolerance * largest.max(1e-2),
                "{name}: result {n} (0 = output), element {i}: {a} instead of {b} (largest {largest})"
            );
        }
    }
}

/// The CPU version against the plain version.
pub fn compare(
    name: &str,
    inputs: &[Input],
    tolerance: f32,
    fast: &dyn Fn(&[Tensor<1>]) -> Tensor<1>,
    plain: &dyn Fn(&[Tensor<1>]) -> Tensor<1>,
) {
    assert_close(name, &run(inputs, fast), &run(inputs, plain), tolerance);
}

/// The same bits five times while other threads keep the machine busy, and with any number of
/// threads.
pub fn assert_same_bits(name: &str, inputs: &[Input], op: &(dyn Fn(&[Tensor<1>]) -> Tensor<1> + Sync)) {
    use std::sync::atomic::{AtomicBool, Ordering};
    let bits =
        |results: Vec<Vec<f32>>| -> Vec<u32> { results.into_iter().flatten().map(f32::to_bits).collect() };
    let first = bits(run(inputs, op));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut x = 1.0f64;
                while !stop.load(Ordering::Relaxed) {
                    for _ in 0..20_000 {
                        x = (x * 1.000_1).sin() + 1.0;
                    }
                    std::thread::yield_now();
                }
                assert!(x.is_finite());
            });
        }
        let again: Vec<bool> = (0..5).map(|_| bits(run(inputs, op)) == first).collect();
        let threads: Vec<bool> = [1, 2, 3, 7]
            .map(|threads| {
                let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
                pool.install(|| bits(run(inputs, op)) == first)
            })
            .to_vec();
        stop.store(true, Ordering::Relaxed);
        assert_eq!(again, [true; 5], "{name}: five times under load");
        assert_eq!(threads, [true; 4], "{name}: with 1, 2, 3 and 7 threads");
    });
}

/// The gradients of `op` against central differences of the sum of its output times a random
/// vector, on a few elements of each input.
pub fn assert_slopes(name: &str, inputs: &[Input], tolerance: f64, op: &dyn Fn(&[Tensor<1>]) -> Tensor<1>) {
    let results = run(inputs, op);
    let weights = random(results[0].len(), 999).values;
    let value = |inputs: &[Input]| -> f64 {
        let out = run(&inputs.iter().cloned().map(Input::frozen).collect::<Vec<_>>(), op).remove(0);
        out.iter().zip(&weights).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
    };
    let mut gradients = results[1..].iter();
    for (n, input) in inputs.iter().enumerate().filter(|(_, input)| input.tracked) {
        let gradient = gradients.next().expect("one a tracked input");
        let largest = gradient.iter().fold(0.0f32, |a, b| a.max(b.abs())).max(1e-3);
        for i in (0..input.values.len()).step_by((input.values.len() / 5).max(1)) {
            let at = |step: f32| {
                let mut moved = inputs.to_vec();
                moved[n].values[i] += step;
                value(&moved)
            };
            let step = 1e-2;
            let slope = (at(step) - at(-step)) / (2.0 * f64::from(step));
            let error = (slope - f64::from(gradient[i])).abs() / f64::from(largest);
            assert!(
                error < tolerance,
                "{name}: input {n}, element {i}: slope {slope}, gradient {}",
                gradient[i]
            );
        }
    }
}
