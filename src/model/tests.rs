//! Properties of the decoder and its adapters; values against transformers are in `tests/goldens.rs`.

use burn::module::Module;
use burn::store::ModuleSnapshot;
use burn::tensor::{DType, Device, Tensor};

use super::*;
use crate::config::{InitLoraWeights, LoraConfig, TargetModules};
use crate::data::{Batch, Stream};

fn config(tied: bool) -> HfConfig {
    HfConfig {
        model_type: "qwen3".into(),
        vocab_size: 40,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: 2,
        head_dim: 8,
        rms_norm_eps: 1e-6,
        rope_theta: 10_000.0,
        max_position_embeddings: 64,
        tie_word_embeddings: tied,
        qkv_bias: false,
        o_bias: false,
        mlp_bias: false,
        qk_norm: true,
        // Large enough that every part of the model matters.
        initializer_range: 0.3,
        dtype: None,
    }
}

fn spec(rank: usize, alpha: f64, targets: &[&str]) -> LoraSpec {
    let target_modules = TargetModules::List(targets.iter().map(|t| t.to_string()).collect());
    LoraSpec::from_config(&LoraConfig { rank, alpha, target_modules, ..LoraConfig::default() })
}

fn random(tied: bool) -> Decoder {
    Decoder::random(&config(tied), 1, &Device::flex())
}

/// Documents of the given lengths, every target trained.
fn batch(lengths: &[usize], salt: u32) -> Batch {
    let mut batch = Batch { cu_seqlens: vec![0], ..Batch::default() };
    for &length in lengths {
        for position in 0..length as u32 {
            let id = |p: u32| (7 * p + p * p * 3 + salt * 11 + length as u32) % 40;
            batch.input_ids.push(id(position));
            batch.position_ids.push(position);
            batch.targets.push(id(position + 1));
            batch.loss_mask.push(position + 1 < length as u32);
        }
        batch.cu_seqlens.push(batch.input_ids.len() as u32);
    }
    batch.run_tokens = vec![batch.tokens()];
    batch.streams = vec![Stream::default()];
    batch
}

/// Two batches end to end, one for each of two runs.
fn joined(first: &Batch, second: &Batch) -> Batch {
    let mut all = first.clone();
    let start = first.tokens() as u32;
    all.input_ids.extend(&second.input_ids);
    all.position_ids.extend(&second.position_ids);
    all.targets.extend(&second.targets);
    all.loss_mask.extend(&second.loss_mask);
    all.cu_seqlens.extend(second.cu_seqlens[1..].iter().map(|bound| bound + start));
    all.run_tokens = vec![first.tokens(), second.tokens()];
    all.streams = [&first.streams[..], &second.streams].concat();
    all
}

pub(super) fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.inner().into_data().as_slice::<f32>().unwrap().to_vec()
}

fn values(decoder: &Decoder) -> Vec<Vec<f32>> {
    decoder.trainable_values().into_iter().map(floats).collect()
}

/// Adapters whose B isn't zero, so that everything has a gradient.
pub(super) fn shaken(decoder: Decoder) -> Decoder {
    let shake = |(i, value): (usize, Tensor<1>)| {
        let n = value.dims()[0];
        let noise: Vec<f32> = (0..n).map(|j| ((i * 31 + j * 17) % 13) as f32 / 40.0 - 0.15).collect();
        value + Tensor::from_floats(noise.as_slice(), &Device::flex())
    };
    let shaken = decoder.trainable_values().into_iter().enumerate().map(shake).collect();
    decoder.set_trainable(shaken)
}

/// Two runs, and a batch that they share.
pub(crate) fn two_runs() -> (Decoder, Batch) {
    let mut decoder = random(false);
    let specs = [spec(3, 6.0, &["q_proj", "down_proj", "lm_head"]), spec(2, 1.0, &["q_proj", "up_proj"])];
    decoder.attach_lora(&specs, 5).unwrap();
    (shaken(decoder), joined(&batch(&[9, 4], 1), &batch(&[6], 2)))
}

/// A model that is trained whole, in bf16 with f32 weights; and batches for it.
pub(crate) fn whole_in_bf16(tied: bool) -> (Decoder, [Batch; 3]) {
    let mut decoder = random(tied).train_all();
    decoder.dtype = DType::BF16;
    (decoder, [batch(&[9, 4], 1), batch(&[6, 1, 8], 2), batch(&[5], 3)])
}

/// Plain gradient descent; the losses before each step.
fn descend(mut decoder: Decoder, batch: &Batch, steps: usize, dropout: Option<u64>) -> (Decoder, Vec<f32>) {
    let mut losses = Vec::new();
    for _ in 0..steps {
        let inputs = decoder.inputs(batch, dropout).unwrap();
        let loss = decoder.loss_sum(&inputs);
        losses.push(floats(loss.clone())[0]);
        let grads = decoder.take_grads(&mut loss.backward());
        let step = |(value, grad): (Tensor<1>, Option<Tensor<1>>)| match grad {
            Some(grad) => value - grad.mul_scalar(1e-2),
            None => value,
        };
        let stepped = decoder.trainable_values().into_iter().zip(grads).map(step).collect();
        decoder = decoder.set_trainable(stepped);
    }
    (decoder, losses)
}

fn assert_close(got: &[f32], want: &[f32], what: &str) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (g, w) in got.iter().zip(want) {
        assert!((g - w).abs() <= 1e-6 + 1e-6 * w.abs(), "{what}: {g} {w}");
    }
}

#[test]
fn two_adapters_in_one_batch_train_as_each_alone() {
    for tied in [false, true] {
        let specs = [
            spec(4, 8.0, &["q_proj", "v_proj", "down_proj"]),
            spec(3, 12.0, &["q_proj", "gate_proj", "lm_head"]),
        ];
        let batches = [batch(&[9, 4], 1), batch(&[6, 1, 8], 2)];
        let mut both = random(tied);
        both.attach_lora(&specs, 5).unwrap();
        let both = shaken(both);
        let start = both.trainable().into_iter().zip(values(&both));
        let start: Vec<(String, Vec<f32>)> = start.map(|(t, v)| (t.name, v)).collect();
        let (both, _) = descend(both, &joined(&batches[0], &batches[1]), 3, None);
        let end: Vec<Vec<f32>> = values(&both);

        for run in 0..2 {
            let mine = |name: &str| name.contains(&format!(".adapters.{run}."));
            let mut alone = random(tied);
            alone.attach_lora(&specs[run..=run], 9).unwrap();
            let first = start.iter().filter(|(name, _)| mine(name));
            let first = first.map(|(_, v)| Tensor::from_floats(v.as_slice(), &Device::flex())).collect();
            let (alone, losses) = descend(alone.set_trainable(first), &batches[run], 3, None);
            assert!(losses[2] < losses[0], "run {run} learns: {losses:?}");
            let want = values(&alone);
            let got = start.iter().zip(&end).filter(|((name, _), _)| mine(name));
            let mut count = 0;
            for (((name, first), got), want) in got.zip(&want) {
                assert_close(got, want, &format!("tied {tied}, {name}"));
                assert_ne!(first, got, "{name} was trained");
                count += 1;
            }
            assert_eq!(count, want.len());
        }
    }
}

#[test]
fn a_run_without_tokens_is_left_alone() {
    let specs = [spec(2, 4.0, &["q_proj"]), spec(2, 4.0, &["q_proj", "o_proj"])];
    let mut decoder = random(false);
    decoder.attach_lora(&specs, 5).unwrap();
    let decoder = shaken(decoder);
    let mut batch = batch(&[9, 4], 1);
    batch.run_tokens = vec![0, batch.tokens()];
    batch.streams = vec![Stream::default(); 2];
    let loss = decoder.loss_sum(&decoder.inputs(&batch, None).unwrap());
    let grads = decoder.take_grads(&mut loss.backward());
    for (trainable, grad) in decoder.trainable().iter().zip(grads) {
        let touched = grad.is_some_and(|grad| floats(grad).iter().any(|g| *g != 0.0));
        assert_eq!(touched, trainable.name.contains(".adapters.1."), "{}", trainable.name);
    }
}

#[test]
fn a_missing_or_inconsistent_run_partition_is_an_error() {
    let mut decoder = random(false);
    let good = batch(&[5, 3], 1);
    let text = |decoder: &Decoder, run_tokens: Vec<usize>| {
        let streams = vec![Stream::default(); run_tokens.len()];
        decoder.inputs(&Batch { run_tokens, streams, ..good.clone() }, None).unwrap_err().to_string()
    };
    assert!(decoder.inputs(&good, None).is_ok());
    assert!(text(&decoder, vec![]).contains("adapter run"));
    assert!(text(&decoder, vec![7]).contains("sum to 7"));
    assert!(text(&decoder, vec![4, 4]).contains("inside a document"));
    assert!(text(&decoder, vec![5, 3]).contains("2 adapter runs, the model has 1"));
    decoder.attach_lora(&[spec(2, 2.0, &["q_proj"]), spec(2, 2.0, &["q_proj"])], 1).unwrap();
    assert!(text(&decoder, vec![8]).contains("1 adapter runs, the model has 2"));
    let parts = Batch { run_tokens: vec![5, 3], streams: vec![Stream::default(); 2], ..good.clone() };
    assert!(decoder.inputs(&parts, None).is_ok());
    let error = decoder.inputs(&Batch { streams: vec![Stream::default()], ..parts }, None).unwrap_err();
    assert!(error.to_string().contains("2 adapter runs and says of 1"), "{error}");
}

#[test]
#[should_panic(expected = "1 adapter runs, the model has 2")]
fn inputs_made_without_the_decoder_are_checked_in_the_forward_pass() {
    let mut decoder = random(false);
    decoder.attach_lora(&[spec(2, 2.0, &["q_proj"]), spec(2, 2.0, &["q_proj"])], 1).unwrap();
    let inputs = Inputs::new(&batch(&[5, 3], 1), &config(false), &Device::flex(), None).unwrap();
    decoder.loss_sum(&inputs);
}

#[test]
fn inconsistent_batches_are_errors() {
    let decoder = random(false);
    let good = batch(&[5, 3], 1);
    let text = |change: &dyn Fn(&mut Batch)| {
        let mut batch = good.clone();
        change(&mut batch);
        decoder.inputs(&batch, None).unwrap_err().to_string()
    };
    assert!(text(&|b| b.input_ids[2] = 40).contains("token id 40"));
    assert!(text(&|b| b.targets[0] = 41).contains("token id 41"));
    assert!(text(&|b| b.cu_seqlens = vec![0, 5]).contains("boundaries"));
    assert!(text(&|b| b.cu_seqlens = vec![0, 5, 5, 8]).contains("boundaries"));
    assert!(text(&|b| b.loss_mask.truncate(3)).contains("3 loss flags"));
    let untrained = |b: &mut Batch| b.targets[4] = 99; // the last of a document: no target
    let mut batch = good.clone();
    untrained(&mut batch);
    assert!(decoder.inputs(&batch, None).is_ok());
}

#[test]
fn a_fresh_adapter_changes_nothing_and_depends_on_seed_and_name_alone() {
    let base = random(false);
    let inputs = base.inputs(&batch(&[9, 4], 1), None).unwrap();
    let attached = |targets: &[&str], seed| {
        let mut decoder = random(false);
        decoder.attach_lora(&[spec(4, 8.0, targets)], seed).unwrap();
        decoder
    };
    let decoder = attached(&["q_proj", "up_proj"], 3);
    // Not to the bit: with adapters the softmax is the differentiable one, rounded elsewhere.
    for (got, want) in floats(decoder.logits(&inputs)).iter().zip(floats(base.logits(&inputs))) {
        assert!((got - want).abs() < 1e-5, "{got} {want}");
    }
    let of = |decoder: &Decoder, name: &str| {
        let at = decoder.trainable().iter().position(|t| t.name.contains(name)).unwrap();
        values(decoder).swap_remove(at)
    };
    let a = of(&decoder, "layers.1.mlp.up_proj.adapters.0.lora_a");
    assert_eq!(a, of(&attached(&["up_proj"], 3), "layers.1.mlp.up_proj.adapters.0.lora_a"));
    assert_ne!(a, of(&attached(&["up_proj"], 4), "layers.1.mlp.up_proj.adapters.0.lora_a"));
    assert_ne!(a, of(&decoder, "layers.0.mlp.up_proj.adapters.0.lora_a"));
    assert!(of(&decoder, "layers.1.mlp.up_proj.adapters.0.lora_b").iter().all(|b| *b == 0.0));
}

#[test]
fn initial_values_have_pefts_distribution() {
    let mut wide = config(false);
    (wide.hidden_size, wide.num_hidden_layers) = (400, 1);
    let a_of = |init: InitLoraWeights| {
        let mut decoder = Decoder::random(&wide, 1, &Device::flex());
        decoder.attach_lora(&[LoraSpec { init, ..spec(8, 8.0, &["q_proj"]) }], 3).unwrap();
        values(&decoder).swap_remove(0)
    };
    let deviation = |a: &[f32]| (a.iter().map(|v| f64::from(v * v)).sum::<f64>() / a.len() as f64).sqrt();
    let a = a_of(InitLoraWeights::Default);
    let bound = 1.0 / 20.0; // 1/√400
    assert!(a.iter().all(|v| v.abs() <= bound) && a.iter().any(|v| v.abs() > 0.99 * bound));
    // A uniform distribution's deviation is bound/√3; 3,200 values estimate it within 2 %.
    assert!((deviation(&a) * 3f64.sqrt() / f64::from(bound) - 1.0).abs() < 0.04);
    // Gaussian: 1/r.
    assert!((deviation(&a_of(InitLoraWeights::Gaussian)) * 8.0 - 1.0).abs() < 0.05);
}

#[test]
fn dropout_is_the_same_when_recomputed_and_absent_in_evaluation() {
    let mut decoder = random(false);
    decoder.attach_lora(&[LoraSpec { dropout: 0.5, ..spec(4, 8.0, &["q_proj", "lm_head"]) }], 3).unwrap();
    let decoder = shaken(decoder);
    let batch = batch(&[9, 4], 1);
    let loss = |seed| floats(decoder.loss_sum(&decoder.inputs(&batch, seed).unwrap()))[0];
    assert_eq!(loss(Some(1)), loss(Some(1)));
    assert_ne!(loss(Some(1)), loss(Some(2)));
    assert_ne!(loss(Some(1)), loss(None));
    let later = Batch { streams: vec![Stream::unbroken(13)], ..batch.clone() };
    let moved = floats(decoder.loss_sum(&decoder.inputs(&later, Some(1)).unwrap()))[0];
    assert_ne!(loss(Some(1)), moved, "the mask counts tokens of the whole stream");
}

#[test]
fn recomputing_layer_by_layer_gives_the_same_gradients() {
    let mut decoder = random(true);
    decoder.attach_lora(&[LoraSpec { dropout: 0.2, ..spec(4, 8.0, &["q_proj", "down_proj"]) }], 3).unwrap();
    let decoder = shaken(decoder);
    let inputs = decoder.inputs(&batch(&[9, 4], 1), Some(7)).unwrap();
    let loss = decoder.loss_sum(&inputs);
    let want = decoder.take_grads(&mut loss.backward());

    let mut xs = vec![decoder.embed(&inputs).inner()];
    for i in 0..decoder.num_layers() {
        xs.push(decoder.layer(i, xs[i].clone(), &inputs).inner());
    }
    let leaf = |x: &Tensor<2>| x.clone().autodiff().require_grad();
    let mut got: Vec<Option<Tensor<1>>> = want.iter().map(|_| None).collect();
    let mut keep = |taken: Vec<Option<Tensor<1>>>| {
        for (got, taken) in got.iter_mut().zip(taken) {
            *got = taken.or(got.take());
        }
    };
    let x = leaf(&xs[decoder.num_layers()]);
    let part = decoder.head_loss(x.clone(), &inputs);
    assert_eq!(floats(part.clone()), floats(loss));
    let mut grads = part.backward();
    keep(decoder.take_grads(&mut grads));
    let mut g = x.grad_remove(&mut grads).unwrap();
    for i in (0..decoder.num_layers()).rev() {
        let x = leaf(&xs[i]);
        let mut grads = (decoder.layer(i, x.clone(), &inputs) * g.autodiff()).sum().backward();
        keep(decoder.take_grads(&mut grads));
        g = x.grad_remove(&mut grads).unwrap();
    }
    for (got, want) in got.into_iter().zip(want) {
        assert_close(&floats(got.unwrap()), &floats(want.unwrap()), "gradient");
    }
}

/// Bytes of every parameter of the base.
fn base_bytes(decoder: &Decoder) -> Vec<(String, Vec<u8>)> {
    let tensors = decoder.collect(None, None, false).into_iter();
    let base = tensors.filter(|t| !t.name.contains(".adapters."));
    base.map(|t| (t.name.clone(), t.to_bytes().unwrap().to_vec())).collect()
}

#[test]
fn the_base_is_bit_unchanged_and_frozen() {
    let mut decoder = random(false);
    let (before, hash) = (base_bytes(&decoder), decoder.base_hash().unwrap());
    decoder.attach_lora(&[spec(4, 8.0, &["q_proj", "down_proj"])], 3).unwrap();
    let (decoder, losses) = descend(decoder, &batch(&[9, 4], 1), 4, None);
    assert!(losses[3] < losses[0], "{losses:?}");
    assert_eq!(base_bytes(&decoder), before);
    assert_eq!(decoder.base_hash().unwrap(), hash);
    let all = random(false).train_all();
    assert_ne!(shaken(all).base_hash().unwrap(), hash, "the hash sees a change");
    assert!(!decoder.model.norm.weight.val().is_autodiff());
    assert!(decoder.trainable().iter().all(|t| t.name.contains(".adapters.0.")));
    assert_eq!(decoder.trainable().len(), 8);
}

#[test]
fn a_batch_without_targets_adds_exactly_nothing() {
    let mut decoder = random(false);
    decoder.attach_lora(&[spec(4, 8.0, &["q_proj"])], 3).unwrap();
    let decoder = shaken(decoder);
    let mut batch = batch(&[9, 4], 1);
    batch.loss_mask.fill(false);
    let inputs = decoder.inputs(&batch, None).unwrap();
    assert!(!inputs.has_targets());
    let loss = decoder.loss_sum(&inputs);
    assert_eq!(floats(loss.clone()), [0.0]);
    for grad in decoder.take_grads(&mut loss.backward()).into_iter().flatten() {
        assert!(floats(grad).iter().all(|g| *g == 0.0));
    }
}

#[test]
fn modules_to_save_are_trained_whole() {
    for tied in [false, true] {
        let mut decoder = random(tied);
        let saves = ["embed_tokens".to_string(), "model.norm".to_string()];
        let spec = LoraSpec { modules_to_save: saves.to_vec(), ..spec(4, 8.0, &["q_proj"]) };
        let report = decoder.attach_lora(&[spec], 3).unwrap();
        assert_eq!(report.warnings.len(), usize::from(tied), "{:?}", report.warnings);
        let before = base_bytes(&decoder);
        let (decoder, _) = descend(decoder, &batch(&[9, 4], 1), 2, None);
        for ((name, now), (_, before)) in base_bytes(&decoder).iter().zip(&before) {
            let whole = name == "model.embed_tokens.weight" || name == "model.norm.weight";
            assert_eq!(now != before, whole, "tied {tied}: {name}");
        }
        assert!(decoder.lm_head.is_some(), "PEFT trains a copy: the head stays as it was");
    }
}

#[test]
fn full_training_reaches_every_parameter_and_a_tied_one_by_both_its_uses() {
    let decoder = random(true).train_all();
    let counts = decoder.parameter_counts();
    assert_eq!(counts.total, counts.trainable);
    assert_eq!(counts.total, decoder.num_params());
    let batch = batch(&[9, 4], 1);
    let loss_of = |decoder: &Decoder| floats(decoder.loss_sum(&decoder.inputs(&batch, None).unwrap()))[0];
    let loss = decoder.loss_sum(&decoder.inputs(&batch, None).unwrap());
    let grads: Vec<Vec<f32>> =
        decoder.take_grads(&mut loss.backward()).into_iter().map(|g| floats(g.unwrap())).collect();
    let names: Vec<String> = decoder.trainable().into_iter().map(|t| t.name).collect();
    assert_eq!(names[0], "model.embed_tokens.weight");
    assert_eq!(names.last().unwrap(), "model.norm.weight");
    // Central differences along one direction per parameter: the derivative is Σ g·d.
    for (i, name) in names.iter().enumerate() {
        let direction: Vec<f32> = grads[i].iter().map(|g| g.signum()).collect();
        let step = 1e-3 / (direction.len() as f32).sqrt();
        let moved = |factor: f32| {
            let mut all = decoder.trainable_values();
            let shift = Tensor::from_floats(direction.as_slice(), &Device::flex()).mul_scalar(factor);
            all[i] = all[i].clone() + shift;
            f64::from(loss_of(&decoder.clone().set_trainable(all)))
        };
        let got = (moved(step) - moved(-step)) / f64::from(2.0 * step);
        let want: f64 = grads[i].iter().map(|g| f64::from(g.abs())).sum();
        // f32 losses of about 40 carry 4e-6; divided by the step, up to 2 % of the derivative.
        assert!((got - want).abs() < 0.03 * want + 0.05, "{name}: {got} {want}");
    }
}

#[test]
fn attaching_fails_as_a_whole() {
    let mut decoder = random(false);
    let bad = [spec(4, 8.0, &["q_proj", "qqq"]), spec(0, 8.0, &["value"])];
    let text = decoder.attach_lora(&bad, 1).unwrap_err().to_string();
    for part in ["run 0", "`qqq`", "run 1", "`value`", "`rank` is 0"] {
        assert!(text.contains(part), "{part} in {text}");
    }
    assert!(decoder.runs().is_empty() && decoder.trainable().is_empty());
}

#[test]
fn parameter_paths_are_hugging_face_names() {
    let names: Vec<String> = random(false).base_parameters().into_iter().map(|(name, _)| name).collect();
    assert_eq!(names.len(), 2 * 11 + 3);
    for name in ["model.embed_tokens.weight", "model.layers.1.self_attn.k_norm.weight", "lm_head.weight"] {
        assert!(names.iter().any(|n| n == name), "{name} in {names:?}");
    }
    let mut biased = config(true);
    (biased.qkv_bias, biased.mlp_bias) = (true, true);
    let biased = Decoder::random(&biased, 1, &Device::flex()).base_parameters();
    assert!(biased.iter().any(|(name, shape)| name == "model.layers.0.mlp.up_proj.bias" && shape == &[24]));
    assert!(!biased.iter().any(|(name, _)| name == "lm_head.weight"));
}

#[test]
fn half_precision_computes_in_half_and_trains_in_f32() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/model/qwen3-gqa");
    for dtype in [DType::F16, DType::BF16] {
        let mut half = Decoder::load(&dir, dtype, &Device::flex(), &mut |_, _| {}).unwrap();
        let mut full = Decoder::load(&dir, DType::F32, &Device::flex(), &mut |_, _| {}).unwrap();
        let spec = LoraSpec { modules_to_save: vec!["norm".into()], ..spec(4, 8.0, &["q_proj", "lm_head"]) };
        half.attach_lora(std::slice::from_ref(&spec), 1).unwrap();
        full.attach_lora(&[spec], 1).unwrap();
        let batch = batch(&[9, 4], 1);
        let (half, got) = descend(half, &batch, 2, None);
        let (_, want) = descend(full, &batch, 2, None);
        assert_eq!(half.logits(&half.inputs(&batch, None).unwrap()).dtype(), dtype);
        assert!(half.trainable_values().iter().all(|value| value.dtype() == DType::F32));
        for (got, want) in got.iter().zip(&want) {
            // bf16 keeps 8 bits: sums over few layers stay within 2 %.
            assert!((got - want).abs() < 0.02 * want, "{dtype:?}: {got} {want}");
        }
    }
}

#[test]
fn progress_reaches_the_whole() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/model/qwen3-untied-mha");
    let mut seen = Vec::new();
    Decoder::load(&dir, DType::F32, &Device::flex(), &mut |done, total| seen.push((done, total))).unwrap();
    let (done, total) = *seen.last().unwrap();
    assert!(done == total && total > 0 && seen.windows(2).all(|w| w[0].0 < w[1].0));
}
