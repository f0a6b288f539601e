//! Several adapter runs in one batch on a card: each as it is alone, to rounding.

use burn::tensor::{DType, Device, Tensor};
use embertune::config::{InitLoraWeights, TargetModules};
use embertune::data::{Batch, Stream};
use embertune::model::{Decoder, HfConfig, LoraSpec};
use embertune::ops::{self, AdamW};
use embertune::train::step::{GradSums, StepOptions, forward_backward, forward_backward_runs};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

use super::{card, floats};

const VOCABULARY: u32 = 640;

const CONFIG: &str = r#"{"model_type": "qwen3", "vocab_size": 640, "hidden_size": 256, "intermediate_size": 512,
    "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "max_position_embeddings": 4096, "tie_word_embeddings": true, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "hidden_act": "silu"}"#;

/// A random model in this type.
pub fn model(dtype: DType, device: &Device) -> Decoder {
    let folder = tempfile::tempdir().unwrap();
    let (source, out) = (folder.path().join("source"), folder.path().join("out"));
    std::fs::create_dir(&source).unwrap();
    std::fs::write(source.join("config.json"), CONFIG).unwrap();
    let random = Decoder::random(&HfConfig::load(&source).unwrap(), 3, &Device::flex());
    embertune::export::save_model(&random, &source, &out, DType::F32).unwrap();
    Decoder::load(&out, dtype, device, &mut |_, _| {}).unwrap()
}

pub fn spec(rank: usize, alpha: f64, targets: &[&str]) -> LoraSpec {
    LoraSpec {
        rank,
        alpha,
        dropout: 0.0,
        target_modules: TargetModules::List(targets.iter().map(|t| t.to_string()).collect()),
        exclude_modules: None,
        modules_to_save: vec![],
        use_rslora: false,
        rank_pattern: vec![],
        alpha_pattern: vec![],
        layers_to_transform: None,
        layers_pattern: vec![],
        init: InitLoraWeights::Default,
    }
}

/// Documents of these lengths with random tokens, two of three trained.
fn batch(lengths: &[usize], random: &mut ChaCha8Rng) -> Batch {
    let mut batch = Batch { cu_seqlens: vec![0], streams: vec![Stream::default()], ..Batch::default() };
    for &length in lengths {
        for position in 0..length {
            batch.input_ids.push(random.next_u32() % VOCABULARY);
            batch.position_ids.push(position as u32);
            batch.targets.push(random.next_u32() % VOCABULARY);
            batch.loss_mask.push(position + 1 < length && position % 3 != 0);
        }
        batch.cu_seqlens.push(batch.input_ids.len() as u32);
    }
    batch.run_tokens = vec![batch.tokens()];
    batch
}

/// B's that aren't zero.
pub fn with_values(model: Decoder, seed: u64) -> Decoder {
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let values = model.trainable_values().into_iter().map(|value| {
        let [n] = value.dims();
        let noise: Vec<f32> =
            (0..n).map(|_| random.next_u32() as f32 / u32::MAX as f32 * 0.04 - 0.02).collect();
        value.clone().inner() + Tensor::from_floats(noise.as_slice(), &value.device().without_autodiff())
    });
    let values = values.collect();
    model.set_trainable(values)
}

fn off(want: &[f32], got: &[f32]) -> f64 {
    let norm = |x: &mut dyn Iterator<Item = f64>| x.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut want.iter().zip(got).map(|(a, b)| f64::from(a - b)));
    difference / norm(&mut want.iter().map(|&x| f64::from(x))).max(1e-12)
}

const ALL: [&str; 7] = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"];

#[test]
fn runs_in_one_batch_are_as_alone() {
    let Some(device) = card() else { return };
    let specs = [spec(16, 32.0, &ALL), spec(5, 3.0, &["q_proj", "down_proj"]), spec(40, 40.0, &ALL[..6])];
    as_alone(&device, &specs, &[&[700, 1, 323], &[64], &[5, 300, 2047]]);
}

/// Their products are made together.
#[test]
fn many_runs_of_one_shape_are_as_alone() {
    let Some(device) = card() else { return };
    let specs: Vec<LoraSpec> = (0..6).map(|_| spec(8, 12.0, &ALL)).collect();
    as_alone(&device, &specs, &[[100, 28].as_slice(); 6]);
    // Five of a shape, and others before and between.
    let specs = [4, 16, 16, 16, 16, 7, 16].map(|rank| spec(rank, 2.0 * rank as f64, &ALL[..rank.min(7)]));
    as_alone(&device, &specs, &[&[33], &[256], &[200, 56], &[256], &[1, 255], &[256], &[256]]);
}

/// The rows of the first aren't multiplied with the columns of the second, forward and backward (`SPLIT` in `layer/group.rs`).
#[test]
fn runs_of_very_different_ranks_are_as_alone() {
    let Some(device) = card() else { return };
    let specs = [spec(8, 12.0, &ALL), spec(512, 64.0, &ALL), spec(4, 2.0, &ALL)];
    as_alone(&device, &specs, &[&[768; 32], &[9, 20], &[100]]);
}

/// Runs that share a batch against each of them alone.
fn as_alone(device: &Device, specs: &[LoraSpec], lengths: &[&[usize]]) {
    for dtype in [DType::F32, DType::BF16] {
        let base = model(dtype, device);
        let mut random = ChaCha8Rng::seed_from_u64(11);
        let batches: Vec<Batch> = lengths.iter().map(|lengths| batch(lengths, &mut random)).collect();
        let mut together = base.clone();
        let runs: Vec<_> = specs.iter().cloned().zip(1..).collect();
        together.attach_runs(&runs).unwrap();
        let together = with_values(together, 5);
        let alone: Vec<GradSums> = (0..specs.len())
            .map(|run| {
                let mut one = base.clone();
                one.attach_runs(&runs[run..=run]).unwrap();
                let all = together.trainable_values();
                let own = together.trainable_of(run).into_iter().map(|n| all[n].clone());
                let one = one.set_trainable(own.collect());
                forward_backward(&one, &batches[run..=run], &StepOptions::default()).unwrap()
            })
            .collect();
        let joined = Batch::joined(&batches.iter().map(Some).collect::<Vec<_>>());
        let found =
            forward_backward_runs(&together, std::slice::from_ref(&joined), &StepOptions::default()).unwrap();
        let limit: f64 = if dtype == DType::F32 { 1e-5 } else { 2e-2 };
        for (run, (want, got)) in alone.iter().zip(&found).enumerate() {
            assert_eq!(want.trained_tokens, got.trained_tokens);
            let (a, b) = (want.loss(), got.loss());
            assert!((a - b).abs() <= limit * a.abs(), "{dtype:?} run {run}: loss {a}, {b}");
            assert_eq!(want.grads.len(), got.grads.len());
            for (n, (want, got)) in want.grads.iter().zip(&got.grads).enumerate() {
                let off = off(&floats(want.clone()), &floats(got.clone()));
                assert!(off <= limit, "{dtype:?} run {run}, parameter {n}: {off:.1e}");
            }
        }
        // The same bits twice; and a run without tokens changes nobody.
        let again = forward_backward_runs(&together, &[joined], &StepOptions::default()).unwrap();
        for (a, b) in found.iter().zip(&again) {
            assert_eq!(
                a.grads.iter().cloned().map(floats).collect::<Vec<_>>(),
                b.grads.iter().cloned().map(floats).collect::<Vec<_>>()
            );
        }
        let without: Vec<_> =
            batches.iter().enumerate().map(|(n, batch)| (n != 1).then_some(batch)).collect();
        let found =
            forward_backward_runs(&together, &[Batch::joined(&without)], &StepOptions::default()).unwrap();
        assert!(found[1].grads.is_empty() && found[1].trained_tokens == 0);
        for run in (0..specs.len()).filter(|&run| run != 1) {
            for (want, got) in alone[run].grads.iter().zip(&found[run].grads) {
                assert!(off(&floats(want.clone()), &floats(got.clone())) <= limit);
            }
        }
    }
}

/// Whole models, and modules that are trained whole beside adapters, in bf16 with f32 weights: rounding the weights once a
/// step gives what rounding each where it is used gives, bit for bit.
#[test]
fn weights_are_rounded_once_a_step() {
    let Some(device) = card() else { return };
    let mut random = ChaCha8Rng::seed_from_u64(23);
    let batches = [batch(&[300, 1, 77], &mut random), batch(&[64], &mut random), batch(&[513], &mut random)];
    let base = model(DType::BF16, &device);
    let mut saved = base.clone();
    let modules_to_save = ["norm", "lm_head", "k_proj"].map(String::from).to_vec();
    saved.attach_lora(&[LoraSpec { modules_to_save, ..spec(8, 12.0, &["q_proj", "down_proj"]) }], 1).unwrap();
    for model in [base.train_all(), with_values(saved, 3)] {
        let mut want: Vec<Vec<f32>> = vec![Vec::new(); model.trainable().len()];
        for batch in &batches {
            let loss = model.loss_sum(&model.inputs(batch, None).unwrap());
            for (sum, grad) in want.iter_mut().zip(model.take_grads(&mut loss.backward())) {
                let grad = floats(grad.expect("each takes part").cast(DType::F32));
                sum.resize(grad.len(), 0.0);
                sum.iter_mut().zip(grad).for_each(|(sum, grad)| *sum += grad);
            }
        }
        assert!(want.iter().all(|grad| grad.iter().any(|&x| x != 0.0)));
        // Adapters beside a weight that is trained go op by op, but not in the pass that a recomputed layer makes first: there
        // the numbers are the same to rounding (1.2e-2 of q_proj's A) and no more.
        let recomputed: &[_] = if model.runs().is_empty() { &[None, Some(1)] } else { &[None] };
        for &recompute in recomputed {
            let options = StepOptions { recompute, ..StepOptions::default() };
            let got = forward_backward(&model, &batches, &options).unwrap().grads;
            let got: Vec<_> = got.into_iter().map(floats).collect();
            for (parameter, (got, want)) in model.trainable().iter().zip(got.iter().zip(&want)) {
                assert_eq!(got, want, "{}, recompute {recompute:?}", parameter.name);
            }
        }
    }
}

/// More parameters than one piece of the driver's memory holds, each allocated by itself and held by somebody else.
#[test]
fn parameters_in_many_allocations_are_updated() {
    let Some(device) = card() else { return };
    const N: usize = 1 << 16;
    let step = AdamW {
        lr: 0.1,
        beta1: 0.9,
        beta2: 0.999,
        eps: 1e-8,
        weight_decay: 0.0,
        update: 1,
        grad_scale: 1.0,
        rounding: 0,
    };
    let tensor = |value: f32| Tensor::<1>::full([N], value, &device);
    let tensors: Vec<[Tensor<1>; 4]> =
        (0..3000).map(|n| [tensor(n as f32), tensor(0.0), tensor(0.0), tensor(1.0)]).collect();
    let updated = ops::adamw_of(tensors.clone(), &vec![step; tensors.len()], None);
    for (n, [value, _, _]) in updated.into_iter().enumerate().step_by(97) {
        let (value, before) = (floats(value), floats(tensors[n][0].clone()));
        assert!(before.iter().all(|&x| x == n as f32), "what somebody else holds is left alone");
        assert!(
            value.iter().all(|&x| (x - (n as f32 - 0.1)).abs() < 1e-3 + n as f32 * 1e-6),
            "parameter {n}"
        );
    }
}

/// NCCL on the one card that there is: every call once.
#[test]
fn a_sum_over_one_card_is_what_it_was() {
    use embertune::ops::cuda::nccl::Communicator;
    let Some(device) = card() else { return };
    let id = match Communicator::unique_id() {
        Ok(id) => id,
        Err(error) => return eprintln!("skipped: {}", error.problem),
    };
    let gpu = embertune::ops::cuda::gpu_of(&device).map_err(|e| e.problem).unwrap();
    let one = Communicator::new(gpu, &id, 0, 1).map_err(|e| e.problem).unwrap();
    let values: Vec<f32> = (0..100_003).map(|n| (n as f32).sin()).collect();
    let tensor = || Tensor::<1>::from_floats(values.as_slice(), &device);
    let alive = || false;
    let short = Tensor::<1>::from_floats([0.5, -3.0, 7.0], &device);
    let sums = one.sum(vec![tensor(), short, tensor()]).unwrap();
    one.finish(&alive).unwrap();
    let sums: Vec<Vec<f32>> = sums.into_iter().map(floats).collect();
    assert_eq!(sums, [values.clone(), vec![0.5, -3.0, 7.0], values.clone()]);
    let spread = one.spread(vec![tensor(), tensor()], &[0, 0]).unwrap();
    one.finish(&alive).unwrap();
    assert!(spread.into_iter().all(|part| floats(part) == values));
    let mut numbers = [1.5, -2.0, 1e300];
    one.sum_f64(&mut numbers, &alive).unwrap();
    assert_eq!(numbers, [1.5, -2.0, 1e300]);
    let mut bytes: Vec<u8> = (0..200_000).map(|n| (n % 251) as u8).collect();
    let before = bytes.clone();
    one.broadcast(&mut bytes, &alive).unwrap();
    assert!(bytes == before);
}
