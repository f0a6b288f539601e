//! What becomes of an adapter: warm start, and the way through `lint`, `merge` and `generate`. The same way on a model of
//! 135M with transformers and PEFT at its end: `tools/parity/chain.py`.
#![cfg(feature = "flex")]

mod common;

use std::path::Path;

use burn::tensor::{DType, Device};
use common::goldens::{Stored, floats, tensors};
use common::run::{Ran, RunDir};
use embertune::data::{Batch, Stream};
use embertune::export::{load_adapter, merge_as};
use embertune::model::Decoder;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, serialize};

/// Rows that are all the same and fill more than half of a packed row: every step sees the same data.
fn rows_that_repeat(dir: &RunDir) -> String {
    let turn = |role: &str, content: String| serde_json::json!({ "role": role, "content": content });
    let messages = [turn("user", "q ".repeat(12)), turn("assistant", "a0 ok ".repeat(10))];
    let row = serde_json::json!({ "messages": messages }).to_string() + "\n";
    dir.write("same.jsonl", &row.repeat(8)).display().to_string()
}

/// Losses of the steps of a run on those rows, each as its bits.
fn losses(dir: &RunDir, out: &str, steps: &str, more: &[&str]) -> Vec<f64> {
    let data = rows_that_repeat(dir);
    let args = ["--data.name", &data, "--data.shuffle", "false", "--output-dir", out, "--max-steps", steps];
    let ran = dir.sft(&[&args[..], more].concat()).succeeds();
    assert!(ran.all().contains("8 of 8 rows") && ran.all().contains("8 packed rows"), "{}", ran.all());
    dir.losses(out).into_iter().map(|(_, loss)| loss).collect()
}

#[test]
fn a_warm_start_continues_the_curve_of_a_run_that_went_on() {
    let dir = RunDir::new();
    // Without momentum an optimizer has nothing to forget: the curve goes on bit for bit.
    let sgd = ["--optim.type", "sgd", "--optim.momentum", "0", "--no-optim.nesterov", "--optim.lr", "0.5"];
    let whole = losses(&dir, "whole", "6", &sgd);
    let first = losses(&dir, "first", "3", &sgd);
    let warm = [&sgd[..], &["--model.lora.init-adapter-path", "first"]].concat();
    let second = losses(&dir, "second", "3", &warm);
    assert_eq!([first, second].concat(), whole);
    assert!(whole.windows(2).all(|w| w[1] < w[0]), "it learns, so that the curve says something: {whole:?}");
    let last = |out: &str, step: usize| {
        dir.bytes(&format!("{out}/weights/step_{step}/lora_adapters/adapter_model.safetensors"))
    };
    assert_eq!(last("second", 3), last("whole", 6), "and ends in the same adapter");

    // AdamW begins with empty moments: the same point, and the same way down within what its first steps take.
    let whole = losses(&dir, "adamw", "6", &[]);
    let first = losses(&dir, "adamw_first", "3", &[]);
    let second = losses(&dir, "adamw_second", "3", &["--model.lora.init-adapter-path", "adamw_first"]);
    assert_eq!(first, whole[..3]);
    assert_eq!(second[0], whole[3], "the first loss is before its first update");
    let fall = whole[0] - whole[5];
    assert!(fall > 0.0);
    for (got, want) in second.iter().zip(&whole[3..]) {
        assert!((got - want).abs() <= 0.2 * fall, "{second:?} against {:?}", &whole[3..]);
    }
}

#[test]
fn a_run_of_another_shape_is_refused_with_what_to_do() {
    let dir = RunDir::new();
    dir.sft(&["--output-dir", "first"]).succeeds();
    let warm = ["--output-dir", "second", "--model.lora.init-adapter-path", "first"];
    for (more, words) in [
        (["--model.lora.rank", "8"], "this run has rank 8"),
        (["--model.lora.alpha", "4"], "alpha 4"),
        (["--model.lora.target-modules", "[\"q_proj\"]"], "alpha 8 and q_proj\n"),
        (["--model.lora.use-rslora", "true"], "`use_rslora` is false there, true here"),
    ] {
        let all = ["the adapter has r 4, alpha 8 and targets q_proj, v_proj", words];
        for command in ["check", "sft"] {
            let ran = dir.run(&[&[command, "@", "run.toml"], &warm[..], &more].concat()).fails(1);
            assert!(!ran.all().contains("loading weights"), "{}", ran.all());
            ran.says(&all).says(&["set `model.lora` to the adapter's values: `model.lora."]);
        }
        assert!(!dir.path("second").exists(), "{}", dir.listing());
    }
}

#[test]
fn an_adapter_of_another_base_is_refused_before_weights_are_read() {
    let dir = RunDir::new();
    dir.sft(&["--output-dir", "first"]).succeeds();
    let adapter = dir.path("first/weights/step_2/lora_adapters");
    let refused = |words: &[&str]| {
        for command in ["check", "sft"] {
            let warm =
                ["--output-dir", "second", "--model.lora.init-adapter-path", adapter.to_str().unwrap()];
            let ran = dir.run(&[&[command, "@", "run.toml"], &warm[..]].concat()).fails(1);
            assert!(!ran.all().contains("loading weights"), "{}", ran.all());
            ran.says(words);
        }
    };
    // Targets that this model doesn't have.
    let config = adapter.join("adapter_config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, text.replace("\"q_proj\"", "\"c_attn\"")).unwrap();
    refused(&["adapter_config.json", "`c_attn` matches no module of the model", "the model has "]);
    // Tensors of another width, and none in the place of some.
    std::fs::write(&config, text).unwrap();
    let values = 0f32.to_le_bytes().repeat(4 * 999);
    let view = TensorView::new(Dtype::F32, vec![4, 999], &values).unwrap();
    let name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight";
    std::fs::write(adapter.join("adapter_model.safetensors"), serialize([(name, view)], None).unwrap())
        .unwrap();
    refused(&[
        "adapter_model.safetensors",
        "q_proj.lora_A.weight` has shape [4, 999], wanted [4, ",
        "is missing",
    ]);
}

fn logits(model: &Decoder) -> Vec<f32> {
    let ids: Vec<u32> = (0..24).map(|n| n * n * 5 % 50).collect();
    let batch = Batch {
        position_ids: (0..24).collect(),
        targets: vec![0; 24],
        loss_mask: vec![false; 24],
        cu_seqlens: vec![0, 24],
        run_tokens: vec![24],
        streams: vec![Stream::default()],
        input_ids: ids,
    };
    floats(model.logits(&model.inputs(&batch, None).unwrap()).inner())
}

fn load(folder: &Path) -> Decoder {
    Decoder::load(folder, DType::F32, &Device::flex(), &mut |_, _| {}).unwrap()
}

#[test]
fn an_adapter_goes_through_lint_merge_and_generate() {
    let dir = RunDir::new();
    dir.sft(&["--max-steps", "10"]).succeeds();
    let base = common::goldens::root().join("bad/_ok/model").canonicalize().unwrap();
    let base_text = base.to_str().unwrap();
    let ran =
        dir.run(&["lint", "out", "--base", base_text, "--for", "peft,vllm,sglang,llama.cpp"]).succeeds();
    assert_eq!(ran.stdout.matches("takes it as it is").count(), 4, "{}", ran.all());
    let adapter = "out/weights/step_10/lora_adapters";
    for (out, dtype) in [("f32", "float32"), ("bf16", "bfloat16")] {
        let args = ["merge", "--base", base_text, "--adapter", "out", "--out", out, "--dtype", dtype];
        dir.run(&args).succeeds().says(&["4 weights changed, by ", "rounding to the base's type costs"]);
    }
    let mut adapted = load(&base);
    let before = logits(&adapted);
    load_adapter(&mut adapted, 0, &dir.path(adapter)).unwrap();
    let (wanted, merged, rounded) =
        (logits(&adapted), logits(&load(&dir.path("f32"))), logits(&load(&dir.path("bf16"))));
    let apart = |a: &[f32], b: &[f32]| a.iter().zip(b).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
    assert!(apart(&before, &wanted) > 1e-2, "the adapter does something: {}", apart(&before, &wanted));
    assert!(apart(&wanted, &merged) < 1e-5, "f32 sums in another order: {}", apart(&wanted, &merged));
    let cost = apart(&wanted, &rounded);
    assert!(cost > 0.0 && cost < 0.1 * apart(&before, &wanted), "what bf16 costs: {cost}");
    // What the merge says of itself is so: the largest change, and what rounding costs.
    let report = merge_as(&base, &dir.path(adapter), &dir.path("again"), Some(DType::BF16)).unwrap();
    let stored = |folder: &Path| tensors(&folder.join("model.safetensors"));
    let (old, exact, short) = (stored(&base), stored(&dir.path("f32")), stored(&dir.path("again")));
    let largest = |name: &str, other: &Stored| apart(&exact[name].values, &other.values);
    let adapted = |name: &&String| name.contains("q_proj.weight") || name.contains("v_proj.weight");
    let change = old.keys().filter(adapted).map(|name| largest(name, &old[name])).fold(0.0, f32::max);
    let cost = old.keys().filter(adapted).map(|name| largest(name, &short[name])).fold(0.0, f32::max);
    assert!((report.largest_change.0 - change).abs() <= 1e-6, "{report:?}, {change}");
    assert_eq!((report.changed, report.largest_rounding), (4, cost));
    // And the command says the same through either.
    let answer = |args: &[&str]| {
        let args = [&["generate", "--device", "flex", "--max-new-tokens", "16"], args, &["q1"]].concat();
        dir.run(&args).succeeds().stdout
    };
    let said = answer(&["--model", base_text, "--adapter", "out"]);
    assert_eq!(said, answer(&["--model", "f32"]));
    assert_ne!(said.trim(), "");
}

/// A model of many shards, each a layer of 14 MB, and an adapter on every `q_proj`.
#[cfg(target_os = "linux")]
fn many_shards(dir: &RunDir, layers: usize) -> usize {
    use safetensors::tensor::{Dtype, TensorView, serialize_to_file};
    let (hidden, mlp, vocab) = (512, 1536, 64);
    std::fs::create_dir_all(dir.path("base")).unwrap();
    std::fs::create_dir_all(dir.path("adapter")).unwrap();
    let config = serde_json::json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": hidden, "intermediate_size": mlp,
        "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": vocab,
        "max_position_embeddings": 128, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": true,
        "hidden_act": "silu", "attention_bias": false, "torch_dtype": "float32",
    });
    dir.write("base/config.json", &config.to_string());
    let zeros = vec![0u8; 4 * hidden * mlp];
    let mut homes = serde_json::Map::new();
    let mut total = 0;
    let mut shard = |n: usize, tensors: Vec<(String, Vec<usize>)>| {
        let name = format!("model-{:05}-of-{:05}.safetensors", n + 1, layers + 1);
        let views = tensors.iter().map(|(tensor, shape)| {
            homes.insert(tensor.clone(), name.clone().into());
            let bytes = 4 * shape.iter().product::<usize>();
            total += bytes;
            (tensor.clone(), TensorView::new(Dtype::F32, shape.clone(), &zeros[..bytes]).unwrap())
        });
        serialize_to_file(views.collect::<Vec<_>>(), None, &dir.path(&format!("base/{name}"))).unwrap();
    };
    for n in 0..layers {
        let named = |part: &str, shape: Vec<usize>| (format!("model.layers.{n}.{part}.weight"), shape);
        let mut tensors: Vec<_> =
            ["q", "k", "v", "o"].map(|p| named(&format!("self_attn.{p}_proj"), vec![hidden, hidden])).into();
        tensors.extend(["gate", "up"].map(|p| named(&format!("mlp.{p}_proj"), vec![mlp, hidden])));
        tensors.push(named("mlp.down_proj", vec![hidden, mlp]));
        tensors.extend(["q", "k"].map(|p| named(&format!("self_attn.{p}_norm"), vec![64])));
        tensors.extend(["input", "post_attention"].map(|p| named(&format!("{p}_layernorm"), vec![hidden])));
        shard(n, tensors);
    }
    let ends = [("model.embed_tokens.weight", vec![vocab, hidden]), ("model.norm.weight", vec![hidden])];
    shard(layers, ends.map(|(name, shape)| (name.to_string(), shape)).into());
    let index = serde_json::json!({ "metadata": { "total_size": total }, "weight_map": homes });
    dir.write("base/model.safetensors.index.json", &index.to_string());

    let config =
        serde_json::json!({ "peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"] });
    dir.write("adapter/adapter_config.json", &config.to_string());
    let ones: Vec<u8> = std::iter::repeat_n(0.5f32.to_le_bytes(), 2 * hidden).flatten().collect();
    let tensors = (0..layers).flat_map(|n| {
        let name = format!("base_model.model.model.layers.{n}.self_attn.q_proj.lora_");
        let view = |shape: Vec<usize>| TensorView::new(Dtype::F32, shape, &ones).unwrap();
        [(name.clone() + "A.weight", view(vec![2, hidden])), (name + "B.weight", view(vec![hidden, 2]))]
    });
    let path = dir.path("adapter/adapter_model.safetensors");
    serialize_to_file(tensors.collect::<Vec<_>>(), None, &path).unwrap();
    total
}

/// The most memory that a process has come to hold, in bytes: files that it maps are counted.
#[cfg(target_os = "linux")]
fn peak(mut child: std::process::Child) -> (u64, Ran) {
    let mut peak = 0;
    while child.try_wait().unwrap().is_none() {
        let status = std::fs::read_to_string(format!("/proc/{}/status", child.id())).unwrap_or_default();
        let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim().strip_suffix(" kB")?.parse::<u64>().ok());
        peak = peak.max(1024 * kib.unwrap_or(0));
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    (peak, Ran::of(child.wait_with_output().unwrap()))
}

#[cfg(target_os = "linux")]
#[test]
fn merging_a_model_of_many_shards_takes_the_memory_of_one() {
    use std::process::Stdio;
    let dir = RunDir::new();
    let total = many_shards(&dir, 16) as u64;
    let merge = |args: &[&str]| {
        let mut command = dir.command(&[&["merge", "--base", "base", "--adapter", "adapter"], args].concat());
        peak(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap())
    };
    // What the program itself takes: it reads the adapter and stops.
    std::fs::create_dir_all(dir.path("taken/x")).unwrap();
    let (bare, ran) = merge(&["--out", "taken"]);
    ran.fails(1);
    for dtype in ["float32", "bfloat16"] {
        let (most, ran) = merge(&["--out", dtype, "--dtype", dtype]);
        ran.succeeds().says(&["16 weights changed, by 1.000e0 at most"]);
        let (most, shard) = (most - bare.min(most), total / 16);
        assert!(most < 4 * shard, "{most} bytes for shards of {shard}, {total} in all");
        let shards = std::fs::read_dir(dir.path(dtype)).unwrap().flatten();
        let shards = shards.filter(|e| e.file_name().to_string_lossy().ends_with(".safetensors"));
        assert_eq!(shards.count(), 17, "shard by shard");
        let index = dir.text(&format!("{dtype}/model.safetensors.index.json"));
        let index: serde_json::Value = serde_json::from_str(&index).unwrap();
        let part = if dtype == "float32" { 1 } else { 2 };
        assert_eq!(index["metadata"]["total_size"], total / part);
    }
}
