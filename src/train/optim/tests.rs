use burn::module::ParamId;
use burn::tensor::{Device, TensorData};

use super::*;

const LR: f64 = 0.1;
const DECAY: f64 = 0.5;

fn tensor(values: &[f32]) -> Tensor<1> {
    Tensor::from_data(TensorData::new(values.to_vec(), [values.len()]), &Device::flex())
}

fn values(tensor: &Tensor<1>) -> Vec<f64> {
    tensor.to_data().try_to_vec::<f32>().unwrap().into_iter().map(f64::from).collect()
}

fn optimizer(kind: OptimKind, name: &str, shape: &[usize]) -> Optimizer {
    let parameter = Trainable { name: name.into(), id: ParamId::new(), shape: shape.to_vec() };
    let config = OptimConfig { lr: LR, weight_decay: DECAY, max_norm: None, max_skipped: 0, kind };
    Optimizer::new(&config, &[parameter])
}

fn assert_close(got: &[f64], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (i, (got, want)) in got.iter().zip(want).enumerate() {
        // A few f32 operations on numbers near 1.
        assert!((got - want).abs() <= 2e-6 * (1.0 + want.abs()), "[{i}]: {got}, want {want}");
    }
}

/// Three updates with gradients that are sums of 4 tokens; `want` is the same in f64, written from
/// torch's documentation.
fn check(kind: OptimKind, mut want: impl FnMut(usize, f64, f64) -> f64) {
    let mut optimizer = optimizer(kind, "w", &[3]);
    let mut got = vec![tensor(&[1.0, -2.0, 0.5])];
    let mut expected = [1.0, -2.0, 0.5];
    for step in 1..=3 {
        let grads = [0.4, -0.8, 2.0].map(|g: f64| g * step as f64);
        got = optimizer.update(got, vec![tensor(&grads.map(|g| g as f32))], LR, 0.25, None);
        for (i, p) in expected.iter_mut().enumerate() {
            *p = want(3 * (step - 1) + i, *p, grads[i] / 4.0);
        }
        assert_close(&values(&got[0]), &expected);
    }
    assert_eq!(optimizer.updates(), 3);
}

fn adamw(moments_dtype: &str) -> OptimKind {
    OptimKind::AdamW { betas1: 0.9, betas2: 0.99, eps: 1e-8, moments_dtype: moments_dtype.into() }
}

#[test]
fn adamw_is_torchs() {
    let (mut m, mut v) = ([0.0; 3], [0.0; 3]);
    check(adamw("float32"), |n, p, g| {
        let (i, k) = (n % 3, (n / 3 + 1) as i32);
        m[i] = 0.9 * m[i] + 0.1 * g;
        v[i] = 0.99 * v[i] + 0.01 * g * g;
        let hat = (m[i] / (1.0 - 0.9f64.powi(k)), v[i] / (1.0 - 0.99f64.powi(k)));
        p * (1.0 - LR * DECAY) - LR * hat.0 / (hat.1.sqrt() + 1e-8)
    });
}

#[test]
fn sgd_is_torchs_with_and_without_nesterov() {
    for nesterov in [true, false] {
        let mut buffer = [None; 3];
        check(OptimKind::Sgd { nesterov, momentum: 0.9 }, |n, p, g| {
            // torch adds the decay to the gradient, and its first buffer is that sum itself.
            let g = g + DECAY * p;
            let b = buffer[n % 3].map_or(g, |b: f64| 0.9 * b + g);
            buffer[n % 3] = Some(b);
            p - LR * if nesterov { g + 0.9 * b } else { b }
        });
    }
}

#[test]
fn sgd_without_momentum_keeps_no_state() {
    check(OptimKind::Sgd { nesterov: false, momentum: 0.0 }, |_, p, g| p - LR * (g + DECAY * p));
    let mut optimizer = optimizer(OptimKind::Sgd { nesterov: false, momentum: 0.0 }, "w", &[1]);
    optimizer.update(vec![tensor(&[1.0])], vec![tensor(&[1.0])], LR, 1.0, None);
    assert!(optimizer.state(&Ranks::alone(), &Device::flex()).unwrap().is_empty());
}

#[test]
fn sign_sgd_is_prime_rls() {
    check(OptimKind::SignSgd, |_, p, g| p * (1.0 - LR * DECAY) - LR * g.signum());
}

fn muon() -> OptimKind {
    OptimKind::Muon { mu: 0.9, betas1: 0.9, betas2: 0.95 }
}

/// Row-major f64 matrices, for the reference of [`newton_schulz`].
fn product(a: &[f64], b: &[f64], [n, k, m]: [usize; 3]) -> Vec<f64> {
    let cell = |i: usize, j: usize| (0..k).map(|l| a[i * k + l] * b[l * m + j]).sum();
    (0..n * m).map(|c| cell(c / m, c % m)).collect()
}

#[test]
fn muon_orthogonalises_the_momentum_of_matrices() {
    let gradient = [0.3f32, -1.0, 0.7, 0.2, 0.9, -0.4];
    let mut optimizer = optimizer(muon(), "layers.0.up_proj.weight", &[3, 2]);
    let zero = tensor(&[0.0; 6]);
    let update = values(&optimizer.update(vec![zero.clone()], vec![tensor(&gradient)], LR, 1.0, None)[0]);
    // p = 0: the update is −0.2·√3·lr·U, with U's columns orthonormal up to the five steps' error.
    let scale = 0.2 * 3f64.sqrt() * LR;
    let u: Vec<f64> = update.iter().map(|v| -v / scale).collect();
    let transposed: Vec<f64> = (0..6).map(|c| u[(c % 3) * 2 + c / 3]).collect();
    let gram = product(&transposed, &u, [2, 3, 2]);
    assert!((0.6..1.3).contains(&gram[0]) && (0.6..1.3).contains(&gram[3]), "{gram:?}");
    assert!(gram[1].abs() < 0.3, "{gram:?}");
    // Momentum: the same gradient again changes nothing but the length, which is divided out.
    let again = values(&optimizer.update(vec![zero], vec![tensor(&gradient)], LR, 1.0, None)[0]);
    assert_close(&again, &update);
}

#[test]
fn newton_schulz_follows_its_polynomial() {
    let matrix: Vec<f32> = (0..6).map(|i| (i as f32 * 0.7).sin()).collect();
    let got = newton_schulz(tensor(&matrix).reshape([2, 3]));
    let norm = matrix.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
    let mut x: Vec<f64> = matrix.iter().map(|v| f64::from(*v) / norm).collect();
    let steps = [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ];
    for (a, b, c) in steps {
        let xt: Vec<f64> = (0..6).map(|n| x[(n % 2) * 3 + n / 2]).collect();
        let gram = product(&x, &xt, [2, 3, 2]);
        let square = product(&gram, &gram, [2, 2, 2]);
        let polynomial: Vec<f64> = gram.iter().zip(&square).map(|(g, s)| b * g + c * s).collect();
        let moved = product(&polynomial, &x, [2, 2, 3]);
        x = x.iter().zip(&moved).map(|(x, m)| a * x + m).collect();
    }
    assert_close(&values(&got.reshape([6])), &x);
}

#[test]
fn muon_leaves_vectors_head_and_embedding_to_adamw() {
    let names = |name: &str, shape: &[usize]| -> Vec<String> {
        let mut optimizer = optimizer(muon(), name, shape);
        let n = shape.iter().product();
        optimizer.update(vec![tensor(&vec![0.0; n])], vec![tensor(&vec![1.0; n])], LR, 1.0, None);
        optimizer.state(&Ranks::alone(), &Device::flex()).unwrap().into_iter().map(|t| t.name).collect()
    };
    assert_eq!(names("q_proj.lora_a", &[2, 3]), ["q_proj.lora_a.momentum_buffer"]);
    for (name, shape) in
        [("lm_head.weight", vec![2, 3]), ("model.embed_tokens.weight", vec![2, 3]), ("norm.weight", vec![4])]
    {
        assert_eq!(names(name, &shape), [format!("{name}.exp_avg"), format!("{name}.exp_avg_sq")]);
    }
}

#[test]
fn weight_decay_only_where_it_is_wanted() {
    let moved = |name: &str| {
        let mut optimizer = optimizer(adamw("float32"), name, &[1]).decay_only(not_norm_or_bias);
        values(&optimizer.update(vec![tensor(&[1.0])], vec![tensor(&[0.0])], LR, 1.0, None)[0])[0]
    };
    assert_close(&[moved("q_proj.weight")], &[1.0 - LR * DECAY]);
    for name in ["input_layernorm.weight", "model.norm.weight", "q_proj.bias"] {
        assert_eq!(moved(name), 1.0, "{name}");
    }
}

#[test]
fn a_restored_optimizer_goes_on_bit_for_bit() {
    for kind in [muon(), adamw("float32"), adamw("bfloat16")] {
        let grad = || tensor(&[0.1, -0.2, 0.3, 0.4]);
        let mut first = optimizer(kind.clone(), "w", &[2, 2]);
        let value = first.update(vec![tensor(&[1.0, 2.0, 3.0, 4.0])], vec![grad()], LR, 1.0, None);
        let state: BTreeMap<_, _> = first
            .state(&Ranks::alone(), &Device::flex())
            .unwrap()
            .into_iter()
            .map(|t| (t.name.clone(), t))
            .collect();
        let mut second = optimizer(kind.clone(), "w", &[2, 2]);
        second.restore(state.clone(), 1).unwrap();
        let a = first.update(value.clone(), vec![grad()], LR, 1.0, None);
        let b = second.update(value, vec![grad()], LR, 1.0, None);
        assert_eq!(a[0].to_data(), b[0].to_data());
        // What doesn't fit is named.
        let other = optimizer(kind.clone(), "v", &[2, 2]).restore(state.clone(), 1).unwrap_err();
        assert!(other.contains("`v.") && other.contains("missing"), "{other}");
        let mut wide = optimizer(kind, "w", &[1, 4]);
        assert!(wide.restore(state, 1).unwrap_err().contains("[2, 2], wanted [1, 4]"));
    }
}

#[test]
fn bfloat16_holding_rounds_after_each_update() {
    let mut optimizer = optimizer(OptimKind::SignSgd, "w", &[1]).hold_in(DType::BF16);
    let got = values(&optimizer.update(vec![tensor(&[1.0])], vec![tensor(&[1.0])], LR, 1.0, None)[0])[0];
    // 0.85 has no bf16: the nearest is 0.8515625.
    assert_eq!(got, 0.851_562_5);
}

/// Gradients of noise about a mean, then of a tenth of it: v has to come down by steps of a thousandth, which bf16 rounded
/// to the nearest can't make.
#[test]
fn moments_in_bfloat16_follow_those_in_float32() {
    const N: usize = 2000;
    let moments = |dtype: &str| -> [f64; 2] {
        let kind = OptimKind::AdamW { betas1: 0.9, betas2: 0.999, eps: 1e-8, moments_dtype: dtype.into() };
        let mut optimizer = optimizer(kind, "w", &[N]);
        let mut value = tensor(&[1.0; N]);
        for step in 0..1500u64 {
            let size = if step < 300 { 1.0 } else { 0.1 };
            let noise = |i: usize| ops::mix(step as u32 * N as u32 + i as u32) as f32 / u32::MAX as f32;
            let grad: Vec<f32> = (0..N).map(|i| size * (0.5 + noise(i))).collect();
            value = optimizer.update(vec![value], vec![tensor(&grad)], 1e-4, 1.0, None).remove(0);
        }
        let state = optimizer.state(&Ranks::alone(), &Device::flex()).unwrap();
        let mean = |n: usize| values(&state[n].values).iter().sum::<f64>() / N as f64;
        [mean(0), mean(1)]
    };
    let (exact, got) = (moments("float32"), moments("bfloat16"));
    for (exact, got) in exact.iter().zip(&got) {
        assert!((got / exact - 1.0).abs() < 2e-3, "{got}, in float32 {exact}");
    }
}
