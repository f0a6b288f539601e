//! Files written and read back; values against PEFT are in `tests/goldens.rs`.

use std::path::{Path, PathBuf};

use burn::store::{ModuleSnapshot, ModuleStore};
use burn::tensor::{DType, Device, Tensor};

use super::*;
use crate::config::{LoraConfig, TargetModules};
use crate::data::Batch;
use crate::model::{Checkpoint, LoraSpec};

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/model").join(name)
}

fn load(dir: &Path) -> Decoder {
    Decoder::load(dir, DType::F32, &Device::flex(), &mut |_, _| {}).unwrap()
}

fn spec(targets: &[&str]) -> LoraSpec {
    let target_modules = TargetModules::List(targets.iter().map(|t| t.to_string()).collect());
    LoraSpec::from_config(&LoraConfig { rank: 3, alpha: 12.0, target_modules, ..LoraConfig::default() })
}

/// Every trainable value moved, so that nothing is as it was loaded.
fn shaken(decoder: Decoder) -> Decoder {
    let shake = |(i, value): (usize, Tensor<1>)| {
        let n = value.dims()[0];
        let noise: Vec<f32> = (0..n).map(|j| ((i * 31 + j * 17) % 13) as f32 / 40.0 - 0.15).collect();
        value + Tensor::from_floats(noise.as_slice(), &Device::flex())
    };
    let shaken = decoder.trainable_values().into_iter().enumerate().map(shake).collect();
    decoder.set_trainable(shaken)
}

fn logits(decoder: &Decoder) -> Vec<f32> {
    let ids: Vec<u32> = (0..12).map(|i| (i * i * 5 + 3) % 200).collect();
    let batch = Batch {
        position_ids: (0..12).collect(),
        targets: vec![1; 12],
        loss_mask: vec![true; 12],
        cu_seqlens: vec![0, 12],
        run_tokens: vec![12],
        streams: vec![Default::default()],
        input_ids: ids,
    };
    let logits = decoder.logits(&decoder.inputs(&batch, None).unwrap()).inner();
    logits.into_data().as_slice::<f32>().unwrap().to_vec()
}

fn assert_close(got: &[f32], want: &[f32]) {
    for (g, w) in got.iter().zip(want) {
        assert!((g - w).abs() <= 1e-4 + 1e-4 * w.abs(), "{g} {w}");
    }
}

fn saved(decoder: &Decoder, dir: &Path) {
    let meta = AdapterMeta { base_model_name_or_path: Some("tiny/base".into()) };
    save_adapter(decoder, 0, dir, &meta).unwrap();
}

#[test]
fn a_tied_head_that_is_adapted_is_untied_by_the_merge() {
    let folder = tempfile::tempdir().unwrap();
    // qwen3-bf16 stores the tied head too, qwen3-tied doesn't.
    for base in ["qwen3-tied", "qwen3-bf16"] {
        let (adapter, out) = (folder.path().join(format!("{base}-a")), folder.path().join(base));
        let mut decoder = load(&golden(base));
        let report = decoder.attach_lora(&[spec(&["q_proj", "lm_head"])], 1).unwrap();
        assert!(report.warnings[0].contains("tie_word_embeddings"), "{:?}", report.warnings);
        let decoder = shaken(decoder);
        saved(&decoder, &adapter);
        let report = merge_as(&golden(base), &adapter, &out, Some(DType::F32)).unwrap();
        assert!(report.untied);
        let merged = load(&out);
        assert!(!merged.config().tie_word_embeddings);
        assert_close(&logits(&merged), &logits(&decoder));
    }
}

#[test]
fn modules_trained_whole_are_saved_loaded_and_merged() {
    let folder = tempfile::tempdir().unwrap();
    for (base, save) in [
        ("qwen3-untied-mha", ["model.norm", "lm_head"]),
        ("qwen3-tied", ["q_norm", "embed_tokens"]),
        ("qwen3-tied", ["input_layernorm", "lm_head"]),
    ] {
        let name = format!("{base}-{}", save[0]);
        let (adapter, out) = (folder.path().join(format!("{name}-a")), folder.path().join(name));
        let mut decoder = load(&golden(base));
        let spec = LoraSpec { modules_to_save: save.map(String::from).to_vec(), ..spec(&["q_proj"]) };
        decoder.attach_lora(&[spec], 1).unwrap();
        let decoder = shaken(decoder);
        saved(&decoder, &adapter);
        let mut again = load(&golden(base));
        load_adapter(&mut again, 0, &adapter).unwrap();
        assert_eq!(logits(&again), logits(&decoder), "{base} {save:?}");
        assert_eq!(again.trainable().len(), decoder.trainable().len());
        let report = merge(&golden(base), &adapter, &out).unwrap();
        assert_eq!(report.untied, base == "qwen3-tied" && save[1] != "norm");
        assert_close(&logits(&load(&out)), &logits(&decoder));
    }
}

#[test]
fn the_store_is_one_of_burns() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("adapter");
    let mut decoder = load(&golden("qwen3-gqa"));
    decoder.attach_lora(&[spec(&["q_proj"]), spec(&["up_proj", "v_proj"])], 1).unwrap();
    let decoder = shaken(decoder);
    let mut store = PeftStore::new(&decoder, 1, &dir, &AdapterMeta::default()).unwrap();
    decoder.save_into(&mut store).unwrap();
    let keys = store.keys().unwrap();
    assert_eq!(keys.len(), 8);
    let a = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight";
    assert_eq!(store.get_tensor(a).unwrap().unwrap().shape.to_vec(), [3, 48]);

    let mut fresh = load(&golden("qwen3-gqa"));
    fresh.attach_lora(&[spec(&["q_proj"]), spec(&["up_proj", "v_proj"])], 2).unwrap();
    let result = fresh.load_from(&mut store).unwrap();
    assert_eq!((result.applied.len(), result.missing.len()), (8, 0));
    let of = |decoder: &Decoder, run: &str| -> Vec<Vec<f32>> {
        let named = decoder.trainable().into_iter().zip(decoder.trainable_values());
        let mine = named.filter(|(t, _)| t.name.contains(run));
        mine.map(|(_, v)| v.into_data().as_slice::<f32>().unwrap().to_vec()).collect()
    };
    assert_eq!(of(&fresh, ".adapters.1."), of(&decoder, ".adapters.1."));
    assert_ne!(of(&fresh, ".adapters.0."), of(&decoder, ".adapters.0."), "the other run is left alone");
    assert_eq!(fresh.trainable().len(), decoder.trainable().len(), "what was loaded is still trainable");
}

#[test]
fn an_attached_run_takes_only_its_own_kind() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("adapter");
    let mut decoder = load(&golden("qwen3-gqa"));
    decoder.attach_lora(&[spec(&["q_proj"])], 1).unwrap();
    saved(&shaken(decoder.clone()), &dir);
    load_adapter(&mut decoder, 0, &dir).unwrap();
    let mut other = load(&golden("qwen3-gqa"));
    other.attach_lora(&[LoraSpec { rank: 8, ..spec(&["q_proj"]) }], 1).unwrap();
    let text = load_adapter(&mut other, 0, &dir).unwrap_err().to_string();
    assert!(text.contains("r 3") && text.contains("rank 8"), "{text}");
    assert!(load_adapter(&mut other, 2, &dir).unwrap_err().to_string().contains("no adapter run 2"));
    load_adapter(&mut other, 1, &dir).unwrap();
    assert_eq!(other.runs().len(), 2);
}

#[test]
fn patterns_keep_their_meaning_when_the_file_sorts_them() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("adapter");
    let mut decoder = load(&golden("qwen3-gqa"));
    // Sorted, `.*` would come first and win everywhere.
    let rank_pattern = vec![("q_proj".into(), 2), (".*".into(), 5)];
    decoder.attach_lora(&[LoraSpec { rank_pattern, ..spec(&["q_proj", "v_proj"]) }], 1).unwrap();
    saved(&decoder, &dir);
    let mut again = load(&golden("qwen3-gqa"));
    load_adapter(&mut again, 0, &dir).unwrap();
    assert_eq!(again.runs()[0].modules, decoder.runs()[0].modules);
    assert_eq!(logits(&again), logits(&decoder));
}

#[test]
fn a_saved_model_loads_back() {
    let folder = tempfile::tempdir().unwrap();
    for base in ["qwen3-tied", "qwen3-untied-mha", "qwen2-bias"] {
        let decoder = shaken(load(&golden(base)).train_all());
        let out = folder.path().join(base);
        save_model(&decoder, &golden(base), &out, DType::F32).unwrap();
        let again = load(&out);
        assert_close(&logits(&again), &logits(&decoder));
        assert_eq!(again.config().tie_word_embeddings, decoder.config().tie_word_embeddings);

        let half = folder.path().join(format!("{base}-bf16"));
        save_model(&decoder, &golden(base), &half, DType::BF16).unwrap();
        let config = crate::model::HfConfig::load(&half).unwrap();
        assert_eq!(config.dtype.as_deref(), Some("bfloat16"));
        let file = Checkpoint::open_model(&half).unwrap();
        assert!(file.entries.values().all(|entry| entry.dtype == Dtype::BF16));
    }
}

#[test]
fn large_models_are_written_in_shards() {
    let folder = tempfile::tempdir().unwrap();
    let out = folder.path().join("sharded");
    let decoder = load(&golden("qwen3-gqa"));
    save_model_in_shards(&decoder, &golden("qwen3-gqa"), &out, (DType::F32, 100_000), &Card::default())
        .unwrap();
    let file = Checkpoint::open_model(&out).unwrap();
    assert!(file.files.len() >= 4, "{} shards", file.files.len());
    assert_eq!(logits(&load(&out)), logits(&decoder));
    let adapter = folder.path().join("adapter");
    let mut adapted = decoder;
    adapted.attach_lora(&[spec(&["q_proj"])], 1).unwrap();
    let adapted = shaken(adapted);
    saved(&adapted, &adapter);
    let merged = folder.path().join("merged");
    merge(&out, &adapter, &merged).unwrap();
    assert_eq!(Checkpoint::open_model(&merged).unwrap().files.len(), file.files.len());
    assert_close(&logits(&load(&merged)), &logits(&adapted));
}

#[test]
fn companions_are_copied_and_weights_are_not() {
    let folder = tempfile::tempdir().unwrap();
    let source = folder.path().join("source");
    std::fs::create_dir(&source).unwrap();
    for entry in std::fs::read_dir(golden("qwen3-tied")).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, source.join(path.file_name().unwrap())).unwrap();
    }
    for name in ["tokenizer.json", "chat_template.jinja", "generation_config.json", "pytorch_model.bin"] {
        std::fs::write(source.join(name), "{}").unwrap();
    }
    let out = folder.path().join("out");
    save_model(&load(&source), &source, &out, DType::F32).unwrap();
    let has = |name: &str| out.join(name).exists();
    assert!(has("tokenizer.json") && has("chat_template.jinja") && has("generation_config.json"));
    assert!(!has("pytorch_model.bin"));
}

#[test]
fn nothing_is_overwritten_and_nothing_half_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let (out, adapter) = (folder.path().join("out"), folder.path().join("adapter"));
    std::fs::create_dir(&out).unwrap();
    std::fs::write(out.join("mine.txt"), "mine").unwrap();
    let decoder = load(&golden("qwen3-gqa"));
    let text = save_model(&decoder, &golden("qwen3-gqa"), &out, DType::F32).unwrap_err().to_string();
    assert!(text.contains("not empty"), "{text}");
    let mut adapted = decoder.clone();
    adapted.attach_lora(&[spec(&["q_proj"])], 1).unwrap();
    saved(&adapted, &adapter);
    assert!(merge(&golden("qwen3-gqa"), &adapter, &out).is_err());
    assert_eq!(std::fs::read_dir(&out).unwrap().count(), 1);

    let text = save_model(&adapted, &golden("qwen3-gqa"), &folder.path().join("x"), DType::F32).unwrap_err();
    assert!(text.to_string().contains("adapters"), "{text}");
    // A value that f16 can't hold stops the write; no folder is left.
    let huge = decoder.clone().train_all();
    let scaled = huge.trainable_values().into_iter().map(|v| v.mul_scalar(1e8)).collect();
    let huge = huge.set_trainable(scaled);
    let text = save_model(&huge, &golden("qwen3-gqa"), &folder.path().join("f16"), DType::F16).unwrap_err();
    assert!(text.to_string().contains("beyond the range"), "{text}");
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left.len(), 2, "{left:?}");
}

#[test]
fn an_adapter_of_another_dtype_is_widened() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("adapter");
    let mut decoder = load(&golden("qwen3-gqa"));
    decoder.attach_lora(&[spec(&["q_proj"])], 1).unwrap();
    saved(&shaken(decoder), &dir);
    let path = dir.join("adapter_model.safetensors");
    let file = Checkpoint::open_file(&path, Error::adapter).unwrap();
    let halves: Vec<(String, Vec<usize>, Vec<u8>)> = file
        .entries
        .iter()
        .map(|(name, entry)| {
            let values = file.values(name, entry).unwrap();
            (name.clone(), entry.shape.clone(), encode(&values, Dtype::BF16).unwrap())
        })
        .collect();
    let outgoing = halves.into_iter().map(|(name, shape, bytes)| Outgoing {
        name,
        dtype: Dtype::BF16,
        shape,
        bytes: Box::new(move || Ok(bytes.clone())),
    });
    write_tensors(&path, outgoing.collect()).unwrap();
    let mut again = load(&golden("qwen3-gqa"));
    load_adapter(&mut again, 0, &dir).unwrap();
    assert!(again.trainable_values().iter().all(|value| value.dtype() == DType::F32));
}

#[test]
fn inits_that_change_the_base_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let write = |key: &str, value: Value| {
        let mut config = json!({"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"]});
        config[key] = value;
        std::fs::write(folder.path().join("adapter_config.json"), config.to_string()).unwrap();
        AdapterConfig::load(folder.path())
    };
    assert!(write("init_lora_weights", json!("pissa")).unwrap_err().to_string().contains("pissa"));
    assert!(write("bias", json!("all")).unwrap_err().to_string().contains("`bias` `all`"));
    let tokens = write("trainable_token_indices", json!([3])).unwrap_err();
    assert!(tokens.to_string().contains("trainable_token_indices"));
    assert!(write("r", json!("four")).unwrap_err().to_string().contains("`r` is \"four\""));
    let config = write("layers_to_transform", json!(1)).unwrap();
    assert_eq!((config.spec.layers_to_transform, config.spec.alpha), (Some(vec![1]), 8.0));
    assert_eq!(
        write("target_modules", json!("all-linear")).unwrap().spec.target_modules,
        TargetModules::AllLinear
    );
}
