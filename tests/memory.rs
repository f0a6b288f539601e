//! The estimate of memory on the CPU against what a process takes, and the micro-batch that fits by it.
#![cfg(all(feature = "flex", target_os = "linux", target_env = "gnu"))]

mod common;

use common::run::RunDir;
use serde_json::{Value, json};

/// Hidden size, layers, query and key heads of 32, MLP size, vocabulary: small, yet far more than the program itself.
const E: usize = 256;
const LAYERS: usize = 8;
const H: usize = 8;
const G: usize = 4;
const F: usize = 1024;
const V: usize = 24_000;
const D: usize = 32;

/// Made-up tokens, three steps.
const RUN: &str = r#"
max_steps = 3
device = "flex"
[model]
name = "model"
[data]
type = "fake"
input_ids = "random"
"#;

fn shapes() -> Vec<(String, Vec<usize>)> {
    let mut all =
        vec![("model.embed_tokens.weight".to_string(), vec![V, E]), ("model.norm.weight".into(), vec![E])];
    for i in 0..LAYERS {
        let mut add =
            |name: &str, shape: &[usize]| all.push((format!("model.layers.{i}.{name}.weight"), shape.into()));
        add("self_attn.q_proj", &[H * D, E]);
        add("self_attn.k_proj", &[G * D, E]);
        add("self_attn.v_proj", &[G * D, E]);
        add("self_attn.o_proj", &[E, H * D]);
        add("self_attn.q_norm", &[D]);
        add("self_attn.k_norm", &[D]);
        add("mlp.gate_proj", &[F, E]);
        add("mlp.up_proj", &[F, E]);
        add("mlp.down_proj", &[E, F]);
        add("input_layernorm", &[E]);
        add("post_attention_layernorm", &[E]);
    }
    all
}

fn dir_with_model() -> RunDir {
    let dir = RunDir::new();
    dir.write("memory.toml", RUN);
    std::fs::create_dir(dir.path("model")).unwrap();
    let config = json!({
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": E, "num_hidden_layers": LAYERS,
        "num_attention_heads": H, "num_key_value_heads": G, "head_dim": D, "intermediate_size": F, "vocab_size": V,
        "tie_word_embeddings": true, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 40960,
        "attention_bias": false, "hidden_act": "silu",
    });
    dir.write("model/config.json", &config.to_string());
    let (mut header, mut values, mut seed) = (serde_json::Map::new(), Vec::new(), 1u32);
    for (name, shape) in shapes() {
        let first = values.len();
        for _ in 0..shape.iter().product::<usize>() {
            seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            // Up to ±0.03.
            let value = ((seed >> 8) as f32 / (1 << 23) as f32 - 1.0) * 0.03;
            values.extend(half::bf16::from_f32(value).to_le_bytes());
        }
        header
            .insert(name, json!({ "dtype": "BF16", "shape": shape, "data_offsets": [first, values.len()] }));
    }
    let header = Value::from(header).to_string();
    let mut file = (header.len() as u64).to_le_bytes().to_vec();
    file.extend(header.as_bytes());
    file.extend(values);
    std::fs::write(dir.path("model/model.safetensors"), file).unwrap();
    dir
}

#[test]
fn the_estimate_is_within_ten_percent_of_the_peak() {
    let dir = dir_with_model();
    let (at_once, one_by_one) = (["--data.micro-batch-size", "3"], ["--data.micro-batch-size", "1"]);
    let runs = [
        [&at_once[..], &["--model.lora"]].concat(),
        [&at_once[..], &["--model.lora", "--model.ac"]].concat(),
        at_once.to_vec(),
        // With sums of gradients.
        [&one_by_one[..], &["--model.lora", "--model.lora.rank", "512"]].concat(),
        one_by_one.to_vec(),
    ];
    for own in runs {
        let step = ["--data.seq-len", "512", "--data.batch-size", "3"];
        let bench = ["bench", "@", "memory.toml", "--steps", "1", "--warmup", "2", "--json", "bench.json"];
        dir.run(&[&bench[..], &step, &own].concat()).succeeds().says(&["estimated by `check`"]);
        let found: Value = serde_json::from_str(&dir.text("bench.json")).unwrap();
        let bytes = |key: &str| found[key].as_f64().unwrap();
        let (estimate, peak) = (bytes("estimated_bytes"), bytes("peak_process_bytes"));
        let error = estimate / peak - 1.0;
        println!(
            "{own:?}: {:.0} MB, estimated {:.0} MB, {:+.1} %",
            peak / 1e6,
            estimate / 1e6,
            100.0 * error
        );
        assert!(error.abs() < 0.10, "{own:?}: {peak} bytes at most, estimated {estimate}: {error:+.3}");
    }
}

#[test]
fn check_finds_the_largest_micro_batch_that_fits() {
    let dir = dir_with_model();
    let check = |rows: usize, more: &[&str]| {
        let rows = rows.to_string();
        let step = ["--data.seq-len", "256", "--data.batch-size", &rows, "--data.micro-batch-size", &rows];
        let check = ["check", "@", "memory.toml", "--model.lora", "--memory", "1GiB"];
        dir.run(&[&check[..], &step, more].concat()).succeeds()
    };
    let too_much = "training is estimated to take";
    let found =
        check(1, &["--fit"]).says(&["Largest micro-batch in 1.00 GiB", "set `data.micro_batch_size = 1`"]);
    let line = found.stdout.lines().find(|line| line.starts_with("Largest")).unwrap();
    let rows: usize = line.split(": ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!(rows > 4, "{line}");
    assert!(!check(rows, &[]).all().contains(too_much));
    check(rows + 1, &[]).says(&[too_much, "`data.micro_batch_size = ", "memory may not do"]);
    // Asked what fits, too little memory is an answer.
    assert!(!check(64 * rows, &["--fit"]).all().contains(too_much));
    let none =
        dir.run(&["check", "@", "memory.toml", "--fit", "--memory", "50MiB", "--model.lora"]).succeeds();
    none.says(&["none, one row of 128 tokens", "[model.ac]"]);
    dir.run(&["check", "--memory", "much"]).fails(2).says(&["`--memory` wants a size, not `much`", "80GiB"]);
}
