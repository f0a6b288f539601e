//! Times of the ops at the shapes of SmolLM2-135M, 4 × 512 tokens:
//! `cargo test --release ops::tests::timings -- --ignored --nocapture`

use std::sync::Arc;
use std::time::Instant;

use burn::tensor::{Int, Tensor};

use super::super::{AdamW, Documents, LoraPart, Rope};
use super::super::{
    adamw, attention, linear, linear_cross_entropy, lora_linear, qk_norm_rope, rms_norm, sum_squares, swiglu,
};
use super::*;

const T: usize = 2048;
const E: usize = 576;
const F: usize = 1536;
const V: usize = 49_152;

fn matrix(rows: usize, columns: usize) -> Tensor<2> {
    random(rows * columns, 1).frozen().tensor().reshape([rows, columns])
}

fn leaf<const D: usize>(x: Tensor<D>) -> Tensor<D> {
    x.autodiff().require_grad()
}

/// Milliseconds of the best of the rounds of 1.5 s, forward and backward, each with the processor's
/// time of all threads; `products` in floating-point operations forward and backward.
fn time<const D: usize>(name: &str, products: [f64; 2], forward: impl Fn() -> Tensor<D>) {
    let (mut best, mut busy) = ([f64::MAX; 2], [f64::MAX; 2]);
    let begin = Instant::now();
    while begin.elapsed().as_secs_f64() < 1.5 {
        let (start, cpu) = (Instant::now(), processor());
        let out = forward();
        best[0] = best[0].min(start.elapsed().as_secs_f64());
        busy[0] = busy[0].min(processor() - cpu);
        if out.is_tracked() {
            let (start, cpu) = (Instant::now(), processor());
            let _grads = out.backward();
            best[1] = best[1].min(start.elapsed().as_secs_f64());
            busy[1] = busy[1].min(processor() - cpu);
        }
    }
    let rate = |i: usize| products[i] / best[i] / 1e9;
    let rates =
        if products[0] > 0.0 { format!("{:6.0} {:6.0} GFLOP/s", rate(0), rate(1)) } else { String::new() };
    let ms = [best[0], busy[0], best[1], busy[1]].map(|seconds| seconds * 1e3);
    println!(
        "{name:34} forward {:7.2} ({:7.2}) ms, backward {:7.2} ({:7.2}) ms {rates}",
        ms[0], ms[1], ms[2], ms[3]
    );
}

/// Seconds that all threads of the process have run.
fn processor() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: writes the time into the struct it is given.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 * 1e-9
}

#[test]
#[ignore = "prints times, asserts nothing"]
fn timings() {
    println!("threads: {}", rayon::current_num_threads());
    for (name, out, inner) in [("q, o", E, E), ("k, v", 192, E), ("gate, up", F, E), ("down", E, F)] {
        let (x, w) = (leaf(matrix(T, inner)), matrix(out, inner));
        let work = 2.0 * (T * out * inner) as f64;
        time(&format!("linear {name}"), [work, work], || linear(x.clone(), w.clone()));
        let r = 8;
        let (a, b) = (leaf(matrix(r, inner)), leaf(matrix(out, r)));
        let parts = [LoraPart { tokens: T, rank: r, scale: 2.0, dropout: None }];
        let small = 2.0 * (T * r * (inner + out)) as f64;
        time(&format!("lora_linear {name}, r = {r}"), [work + small, work + 2.0 * small], || {
            lora_linear(x.clone(), w.clone(), a.clone(), b.clone(), &parts)
        });
    }
    let (x, weight) = (leaf(matrix(T, E)), matrix(1, E).reshape([E]));
    time("rms_norm", [0.0; 2], || rms_norm(x.clone(), weight.clone(), 1e-5));
    time("rms_norm, weight tracked", [0.0; 2], || rms_norm(x.clone(), leaf(weight.clone()), 1e-5));
    let (gate, up) = (leaf(matrix(T, F)), leaf(matrix(T, F)));
    time("swiglu", [0.0; 2], || swiglu(gate.clone(), up.clone()));
    time("residual add", [0.0; 2], || x.clone() + x.clone());
    let rope = Rope { cos: matrix(T, 64), sin: matrix(T, 64) };
    let q = leaf(matrix(T, E).reshape([T, 9, 64]));
    let head_weight = matrix(1, 64).reshape([64]);
    time("rope of q", [0.0; 2], || qk_norm_rope(q.clone(), None, 1e-6, &rope));
    time("qk_norm_rope of q", [0.0; 2], || qk_norm_rope(q.clone(), Some(head_weight.clone()), 1e-6, &rope));
    let kv = || leaf(matrix(T, 192).reshape([T, 3, 64]));
    for lengths in [vec![512; 4], vec![2048], vec![128; 16], vec![900, 40, 60, 1048]] {
        let ends = lengths.iter().scan(0, |end, len| {
            *end += len;
            Some(*end)
        });
        let documents = Documents { cu_seqlens: Arc::from_iter([0].into_iter().chain(ends)) };
        let (k, v) = (kv(), kv());
        let work: f64 = lengths.iter().map(|&len| 2.0 * f64::from(len).powi(2) * E as f64).sum();
        time(
            &format!("attention {lengths:?}").chars().take(34).collect::<String>(),
            [work, 2.5 * work],
            || attention(q.clone(), k.clone(), v.clone(), &documents, 0.125),
        );
    }
    let head = matrix(V, E);
    let ints = |values: Vec<i64>| {
        let len = values.len();
        Tensor::<1, Int>::from_data(TensorData::new(values, [len]), &Device::flex())
    };
    let rows: Vec<i64> = (0..T as i64).filter(|row| row % 4 != 0).collect();
    let targets = ints(rows.iter().map(|row| row * 31 % V as i64).collect());
    let work = 4.0 * (rows.len() * V * E) as f64;
    time(&format!("linear_cross_entropy, {} rows", rows.len()), [work, 0.0], || {
        linear_cross_entropy(x.clone(), head.clone(), ints(rows.clone()), targets.clone())
    });
    let flat = || matrix(1, 2_440_000).reshape([2_440_000]);
    let vector = flat();
    time("sum_squares of 2.44 M", [0.0; 2], || sum_squares(vector.clone()));
    let step = AdamW {
        lr: 1e-3,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.0,
        update: 1,
        grad_scale: 1.0,
        rounding: 0,
    };
    let [mut p, mut m, mut v] = [flat(), flat(), flat()];
    let grad = flat();
    for _ in 0..3 {
        let start = Instant::now();
        [p, m, v] = adamw(p, m, v, grad.clone(), &step);
        println!("adamw of 2.44 M: {:.2} ms", start.elapsed().as_secs_f64() * 1e3);
    }
}
