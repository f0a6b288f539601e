//! The model and its adapters against transformers and PEFT, on the CPU: logits, losses, every
//! gradient, adapter files and merged weights.
#![cfg(feature = "flex")]

mod common;

use std::collections::BTreeSet;
use std::path::Path;

use burn::tensor::{DType, Device};
use common::goldens::{Case, Tolerance, check_config, json, root, tensors};
use embertune::export::{AdapterConfig, AdapterMeta, MergeReport, merge, merge_as, save_adapter};
use embertune::model::Decoder;
use serde_json::Value;

/// f32 on CPU against f32 on CPU: the tolerances as they stand.
const FACTOR: f64 = 1.0;

#[test]
fn model_values_are_those_of_transformers() {
    for case in Case::all("model") {
        case.check_values(&Device::flex(), FACTOR);
    }
}

#[test]
fn both_config_styles_mean_the_same() {
    for case in Case::all("model") {
        check_config(&case);
    }
}

#[test]
fn packed_documents_are_as_if_alone() {
    for case in Case::all("packed") {
        case.check_values(&Device::flex(), FACTOR);
    }
}

#[test]
fn adapter_values_and_gradients_are_those_of_peft() {
    for case in Case::all("lora") {
        let decoder = case.decoder(&Device::flex());
        check_modules(&case, &decoder);
        case.check_values(&Device::flex(), FACTOR);
    }
}

/// Which layers are adapted, with which rank and scale, and how many parameters that makes.
fn check_modules(case: &Case, decoder: &Decoder) {
    let got: Vec<(&str, u64, f64)> = decoder.runs()[0]
        .modules
        .iter()
        .map(|m| (m.name.as_str(), m.rank as u64, f64::from(m.scale)))
        .collect();
    let modules = case.json["modules"].as_object().unwrap();
    let want: BTreeSet<&String> = modules.keys().collect();
    let names: BTreeSet<String> = got.iter().map(|(name, ..)| name.to_string()).collect();
    assert_eq!(names.iter().collect::<BTreeSet<_>>(), want, "{}", case.name);
    for (name, rank, scale) in got {
        let want = &modules[name];
        assert_eq!(rank, want["r"].as_u64().unwrap(), "{} rank of {name}", case.name);
        let off = (scale - want["scaling"].as_f64().unwrap()).abs();
        assert!(off < 1e-6 * scale, "{} scale of {name}: {scale}", case.name);
    }
    let trainable = decoder.parameter_counts().trainable as u64;
    assert_eq!(trainable, case.json["trainable_parameters"].as_u64().unwrap(), "{}", case.name);
}

#[test]
fn an_adapter_is_written_as_peft_writes_it() {
    for case in Case::all("lora") {
        let decoder = case.decoder(&Device::flex());
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("adapter");
        let base = AdapterConfig::load(&case.dir).unwrap().base_model_name_or_path;
        save_adapter(&decoder, 0, &dir, &AdapterMeta { base_model_name_or_path: base }).unwrap();

        let file = "adapter_model.safetensors";
        let (got, want) = (tensors(&dir.join(file)), tensors(&case.dir.join(file)));
        assert_eq!(got, want, "{}: names, shapes, dtypes and values", case.name);
        let header = |dir: &Path| {
            let bytes = std::fs::read(dir.join(file)).unwrap();
            safetensors::SafeTensors::read_metadata(&bytes).unwrap().1.metadata().clone()
        };
        assert_eq!(header(&dir), header(&case.dir), "{}: metadata", case.name);

        let config = "adapter_config.json";
        let (got, want) = (json(&dir.join(config)), json(&case.dir.join(config)));
        let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(keys(&got), keys(&want), "{}: keys in order", case.name);
        assert_eq!(by_meaning(got), by_meaning(want), "{}", case.name);
    }
}

/// PEFT's lists of names are sets, and a number is a number with or without a point.
fn by_meaning(value: Value) -> Value {
    match value {
        Value::Array(list) => {
            let mut list: Vec<Value> = list.into_iter().map(by_meaning).collect();
            list.sort_by_key(Value::to_string);
            list.into()
        }
        Value::Object(map) => map.into_iter().map(|(key, value)| (key, by_meaning(value))).collect(),
        Value::Number(number) => number.as_f64().into(),
        other => other,
    }
}

#[test]
fn merged_weights_are_those_of_peft() {
    for case in Case::all("lora") {
        let folder = tempfile::tempdir().unwrap();
        let (wide, native) = (folder.path().join("f32"), folder.path().join("native"));
        let report = merge_as(&case.base(), &case.dir, &wide, Some(DType::F32)).unwrap();
        check_report(&case, &report);
        merge(&case.base(), &case.dir, &native).unwrap();
        let (got, stored) = (all_tensors(&wide), all_tensors(&native));
        for (name, want) in tensors(&case.dir.join("merged.safetensors")) {
            let what = format!("{} {name}", case.name);
            match name.strip_suffix(".bf16_merge") {
                None => Tolerance::of("merged", FACTOR).check(&what, &got[&name].values, &want.values),
                // PEFT rounds s·B·A to bf16 before it adds, here only the sum is rounded: each of
                // the two roundings is at most half a step of bf16, 2^-9 of its value.
                Some(name) => {
                    let stored = &stored[name];
                    assert_eq!((stored.dtype, &stored.shape), (want.dtype, &want.shape), "{what}");
                    for (got, want) in stored.values.iter().zip(&want.values) {
                        assert!((got - want).abs() <= 1e-3 + 8e-3 * want.abs(), "{what}: {got} {want}");
                    }
                }
            }
        }
    }
}

fn check_report(case: &Case, report: &MergeReport) {
    let modules = case.json["modules"].as_object().unwrap().len();
    assert_eq!(report.changed, modules, "{}", case.name);
    assert_eq!(report.largest_rounding, 0.0, "{}: nothing is rounded in f32", case.name);
    // PEFT's default init has B = 0.
    let changes = case.json["adapter_changes_logits_by_max_abs"].as_f64().is_none_or(|change| change > 0.0);
    assert_eq!(report.largest_change.0 > 0.0, changes, "{}: {:?}", case.name, report.largest_change);
}

fn all_tensors(dir: &Path) -> std::collections::BTreeMap<String, common::goldens::Stored> {
    let files = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    files
        .filter(|path| path.extension().is_some_and(|e| e == "safetensors"))
        .flat_map(|p| tensors(&p))
        .collect()
}

#[test]
fn a_merged_model_is_the_base_with_its_adapter() {
    let device = Device::flex();
    for case in Case::all("lora") {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path().join("merged");
        let report = merge_as(&case.base(), &case.dir, &out, Some(DType::F32)).unwrap();
        let merged = Decoder::load(&out, DType::F32, &device, &mut |_, _| {}).unwrap();
        let tied = Decoder::load(&case.base(), DType::F32, &device, &mut |_, _| {}).unwrap();
        let still = tied.config().tie_word_embeddings && !report.untied;
        assert_eq!(merged.config().tie_word_embeddings, still, "{}", case.name);
        let (batch, _) = case.batch();
        let logits = |decoder: &Decoder| {
            common::goldens::floats(decoder.logits(&decoder.inputs(&batch, None).unwrap()).inner())
        };
        let (got, want) = (logits(&merged), logits(&case.decoder(&device)));
        Tolerance::of("logits", FACTOR).check(&case.name, &got, &want);
    }
}

#[test]
fn bad_models_are_refused_with_what_is_wrong() {
    let case = |name: &str| name != "vocab_larger_than_embedding";
    let load = |dir: &Path| {
        let loaded = Decoder::load_with_report(dir, DType::F32, &Device::flex(), &mut |_, _| {});
        loaded.map(|(_, report)| report.warnings)
    };
    check_bad("model", |case_json| {
        let dir = root().join("bad").join(case_json["files"]["model"].as_str().unwrap());
        match case(case_json["name"].as_str().unwrap()) {
            true => load(&dir),
            false => {
                let size = case_json["tokenizer_size"].as_u64().unwrap() as usize;
                embertune::model::HfConfig::load(&dir)?.check_vocab(&dir, size).map(|()| vec![])
            }
        }
    });
    assert_eq!(load(&root().join("bad/_ok/model")).unwrap(), Vec::<String>::new());
}

#[test]
fn bad_adapters_are_refused_with_what_is_wrong() {
    let base = root().join("bad/_ok/model");
    let merged = |adapter: &Path| {
        let folder = tempfile::tempdir().unwrap();
        merge(&base, adapter, &folder.path().join("out")).map(|report| report.warnings)
    };
    check_bad("adapter", |case| merged(&root().join("bad").join(case["files"]["adapter"].as_str().unwrap())));
    merged(&root().join("bad/_ok/adapter")).unwrap();
}

#[test]
fn bad_adapters_are_not_loaded_into_a_model() {
    let mut decoder =
        Decoder::load(&root().join("bad/_ok/model"), DType::F32, &Device::flex(), &mut |_, _| {}).unwrap();
    check_bad("adapter", |case| {
        if case["name"] == "base_mismatch_name" {
            return Ok(vec!["Qwen/Qwen3-8B".into()]); // a loaded model doesn't know its folder: see merge
        }
        let dir = root().join("bad").join(case["files"]["adapter"].as_str().unwrap());
        let report = embertune::export::load_adapter(&mut decoder.clone(), 0, &dir)?;
        Ok(report.warnings)
    });
    assert!(decoder.runs().is_empty());
    embertune::export::load_adapter(&mut decoder, 0, &root().join("bad/_ok/adapter")).unwrap();
}

/// Runs each bad case of an area: an error or a warning that mentions what it must.
fn check_bad(area: &str, run: impl Fn(&Value) -> embertune::Result<Vec<String>>) {
    let all = json(&root().join("bad/cases.json"));
    let all = all.as_array().or(all["cases"].as_array()).unwrap();
    let mut count = 0;
    for case in all.iter().filter(|case| case["area"] == area) {
        let name = case["name"].as_str().unwrap();
        let kind = case["expected_kind"].as_str().unwrap();
        let text = match run(case) {
            Err(error) => format!("{error}\n{}", error.hint().unwrap_or_default()),
            Ok(warnings) => {
                assert!(kind.contains("warning"), "{name}: loaded without an error");
                warnings.join("\n")
            }
        };
        let mentions = |wanted: &Value| {
            wanted.as_array().is_some_and(|wanted| wanted.iter().all(|one| mentions_one(&text, one)))
        };
        let fine = mentions(&case["message_must_mention"]) || mentions(&case["alternative_mention"]);
        assert!(fine, "{name} must mention {} but says:\n{text}", case["message_must_mention"]);
        count += 1;
    }
    assert!(count > 0, "no bad case of `{area}`");
}

fn mentions_one(text: &str, wanted: &Value) -> bool {
    match wanted {
        Value::Array(one_of) => one_of.iter().any(|wanted| mentions_one(text, wanted)),
        wanted => text.to_lowercase().contains(&wanted.as_str().unwrap().to_lowercase()),
    }
}
