//! `lint` against the rules that servers have, on adapters made by PEFT (`tools/parity/lint_adapters.py`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

mod common;

use common::run::RunDir;
use embertune::export::{Lint, SERVERS, Verdict, fold_scaling, lint};
use safetensors::SafeTensors;

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/adapters").join(name)
}

/// What peft, vllm, sglang and llama.cpp do with each: T takes, M misreads, R refuses.
///
/// | rule | adapters |
/// |---|---|
/// | plain LoRA on linear layers, any choice of them, any dtype | plain, qv_only, all_linear, layers_to_transform, exclude_modules, bf16 |
/// | `use_rslora` | rslora, patterns_rslora |
/// | `rank_pattern`, `alpha_pattern` | rank_pattern, alpha_pattern, patterns_rslora |
/// | vLLM's ranks, the largest of a pattern too | rank_32, rank_pattern_32 (a note), rank_600, rank_pattern_600 |
/// | `modules_to_save`; those that vLLM knows | modules_to_save; modules_to_save_score |
/// | DoRA | dora |
/// | `lora_bias`, `bias` | lora_bias, bias_lora_only, bias_all |
/// | initial values that change the base | pissa, pissa_niter, olora, corda, loftq |
/// | those that don't | gaussian, eva, orthogonal, mica, lora_ga |
/// | LoRA on the embedding, on the head, tied and not, Qwen2 | embedding, embedding_qwen2, lm_head_tied, lm_head_untied |
/// | trainable tokens, beyond the vocabulary too | tokens, tokens_added |
/// | aLoRA, QALoRA, BD-LoRA, layer replication | alora, qalora, bdlora, layer_replication |
/// | `target_modules` as an expression, as a word | regex, all_linear_word |
/// | the adapter's name in the tensors' | named_default |
/// | other prefixes; none | wrong_prefix, wrong_case; no_prefix |
/// | the smallest configuration, and each key that it has to have | smallest, no_rank, no_alpha, no_type, ia3 |
/// | tensors that are missing, of another rank, of modules that the base hasn't got | half_missing, no_tensors, other_rank, other_layers, other_targets |
/// | files that are cut or missing | truncated, config_cut, no_weights |
///
/// PEFT's and vLLM's own loaders say the same, but for what only a larger model or more files could tell: `tools/parity/lint_check.py`.
const VERDICTS: [(&str, &str, &str); 59] = [
    ("plain", "base", "TTTT"),
    ("qv_only", "base", "TTTT"),
    ("all_linear", "base", "TTTT"),
    ("layers_to_transform", "base", "TTTT"),
    ("exclude_modules", "base", "TTTT"),
    ("bf16", "base", "TTTT"),
    ("rslora", "base", "TTMM"),
    ("patterns_rslora", "base", "TTMM"),
    ("rank_pattern", "base", "TTMT"),
    ("alpha_pattern", "base", "TTMM"),
    ("rank_32", "base", "TTTT"),
    ("rank_pattern_32", "base", "TTMT"),
    ("rank_600", "base", "TRTT"),
    ("rank_pattern_600", "base", "TRMT"),
    ("modules_to_save", "base_untied", "TRMR"),
    ("modules_to_save_score", "base", "TTMR"),
    ("dora", "base", "TRRR"),
    ("lora_bias", "base_qwen2", "TRTR"),
    ("bias_lora_only", "base_qwen2", "TRTR"),
    ("bias_all", "base_qwen2", "TRTR"),
    ("pissa", "base", "TRTT"),
    ("pissa_niter", "base", "TRTT"),
    ("olora", "base", "TRTT"),
    ("corda", "base", "TRTT"),
    ("loftq", "base", "TRTT"),
    ("gaussian", "base", "TTTT"),
    ("eva", "base", "TTTT"),
    ("orthogonal", "base", "TTTT"),
    ("mica", "base", "TTTT"),
    ("lora_ga", "base", "TTTT"),
    ("embedding", "base_untied", "TTMT"),
    ("embedding_qwen2", "base_qwen2", "TRMT"),
    ("lm_head_tied", "base", "TTMR"),
    ("lm_head_untied", "base_untied", "TTMT"),
    ("tokens", "base", "TRTR"),
    ("tokens_added", "base", "TRRR"),
    ("alora", "base", "TRTT"),
    ("qalora", "base", "TRTT"),
    ("bdlora", "base", "TRTT"),
    ("layer_replication", "base", "TRTT"),
    ("regex", "base", "TTRT"),
    ("all_linear_word", "base", "TTTT"),
    ("named_default", "base", "TRTR"),
    ("wrong_prefix", "base", "MMTR"),
    ("wrong_case", "base", "MMTR"),
    ("no_prefix", "base", "MTTT"),
    ("smallest", "base", "TRRR"),
    ("no_rank", "base", "TRRT"),
    ("no_alpha", "base", "TRRR"),
    ("no_type", "base", "RTRT"),
    ("ia3", "base", "TRRR"),
    ("half_missing", "base", "MTTT"),
    ("no_tensors", "base", "MMMM"),
    ("other_rank", "base", "RMRM"),
    ("other_layers", "base", "MMRR"),
    ("other_targets", "base", "RRRR"),
    ("truncated", "base", "RRRR"),
    ("config_cut", "base", "RRRR"),
    ("no_weights", "base", "RRRR"),
];

fn letters(lint: &Lint) -> String {
    let letter = |verdict| match verdict {
        Verdict::Takes => 'T',
        Verdict::Misreads => 'M',
        Verdict::Refuses => 'R',
    };
    SERVERS.iter().map(|(_, server)| letter(lint.verdict(*server))).collect()
}

#[test]
fn verdicts_are_those_of_the_servers_rules() {
    let mut wrong = Vec::new();
    for (name, base, wanted) in VERDICTS {
        let found = lint(&folder(name), Some(&folder(base))).unwrap();
        if letters(&found) != wanted {
            wrong.push(format!("{name}: {}, wanted {wanted}\n{found:#?}", letters(&found)));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let there = std::fs::read_dir(folder(""))
        .unwrap()
        .filter_map(|entry| entry.unwrap().file_name().into_string().ok());
    assert_eq!(
        there.filter(|name| !name.starts_with("base")).count(),
        VERDICTS.len(),
        "adapters without a verdict"
    );
}

#[test]
fn what_a_server_has_to_be_told_is_noted() {
    let found = lint(&folder("rank_32"), None).unwrap();
    assert!(found.notes.iter().any(|note| note.contains("--max-lora-rank 32")), "{found:?}");
    // Its `q_proj` comes without a `v_proj`.
    assert!(found.notes.iter().any(|note| note.contains("SGLang 0.5 stacks q, k and v")), "{found:?}");
    let found = lint(&folder("rank_pattern_32"), None).unwrap();
    assert!(found.notes.iter().any(|note| note.contains("--max-lora-rank 32")), "{found:?}");
    assert!(!found.notes.iter().any(|note| note.contains("stacks")), "{found:?}");
    assert!(lint(&folder("plain"), Some(&folder("base"))).unwrap().notes.is_empty());
    // A base of another width.
    let other = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(folder("base").join("config.json")).unwrap();
    let wider = config.replace("\"hidden_size\": 8", "\"hidden_size\": 16");
    assert_ne!(config, wider);
    std::fs::write(other.path().join("config.json"), wider).unwrap();
    let found = lint(&folder("plain"), Some(other.path())).unwrap();
    assert_eq!(letters(&found), "RRRR", "{found:?}");
}

#[test]
fn the_command_wants_an_adapter_and_a_model_as_its_base() {
    let dir = RunDir::new();
    let [plain, base, broken] =
        ["plain", "base", "no_weights"].map(|name| folder(name).display().to_string());
    let lint = |args: &[&str]| dir.run(&[&["lint"], args].concat());
    dir.write("plan", "a file");
    for (named, what) in [("nope", "no such folder"), ("plan", "a file"), (&base, "this is a model")] {
        let ran = lint(&[named]).fails(1).says(&[
            named,
            what,
            "`adapter_config.json`",
            "the folder of a PEFT adapter",
        ]);
        assert!(ran.stdout.is_empty(), "{}", ran.all());
    }
    lint(&[&plain, "--base", "nope"]).fails(1).says(&["`--base`: nope not found"]);
    lint(&[&plain, "--base", &plain])
        .fails(1)
        .says(&["`--base`: this is an adapter, wanted a model", "hint: "]);
    // What servers refuse of a real one is a report.
    lint(&[&broken]).succeeds().says(&["refuses it"]);
    lint(&[&plain, "--base", &base]).succeeds().says(&["takes it as it is"]);
}

/// Each module's s·B·A, row-major, by its name.
fn products(adapter: &Path, scale: impl Fn(&str, usize) -> f32) -> BTreeMap<String, Vec<f32>> {
    let bytes = std::fs::read(adapter.join("adapter_model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let floats = |name: &str| -> (Vec<usize>, Vec<f32>) {
        let tensor = file.tensor(name).unwrap();
        let values = tensor.data().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect();
        (tensor.shape().to_vec(), values)
    };
    let modules =
        file.names().into_iter().filter_map(|name| name.strip_suffix(".lora_A.weight").map(String::from));
    let product = |module: String| {
        let ((a_shape, a), (b_shape, b)) =
            (floats(&format!("{module}.lora_A.weight")), floats(&format!("{module}.lora_B.weight")));
        let (rank, width, scale) = (a_shape[0], a_shape[1], scale(&module, a_shape[0]));
        let cell =
            |i: usize, j: usize| (0..rank).map(|k| b[i * rank + k] * a[k * width + j]).sum::<f32>() * scale;
        let values = (0..b_shape[0] * width).map(|n| cell(n / width, n % width)).collect();
        (module, values)
    };
    modules.map(product).collect()
}

#[test]
fn folded_adapters_are_taken_by_all_and_do_the_same() {
    let out = tempfile::tempdir().unwrap();
    let alpha = |module: &str| match module.rsplit('.').next() {
        Some("down_proj") => 3.0,
        _ => 4.0,
    };
    type Scale = fn(f32, usize) -> f32;
    let by_rank: Scale = |alpha, rank| alpha / rank as f32;
    let by_root: Scale = |alpha, rank| alpha / (rank as f32).sqrt();
    for (name, scale, rank) in
        [("patterns_rslora", by_root, 4), ("rank_pattern", by_rank, 4), ("regex", by_rank, 2)]
    {
        let folded = out.path().join(name);
        assert_eq!(fold_scaling(&folder(name), &folded).unwrap(), rank);
        let found = lint(&folded, Some(&folder("base"))).unwrap();
        assert_eq!(letters(&found), "TTTT", "{name}: {found:?}");
        let alpha = |module: &str| if name == "patterns_rslora" { alpha(module) } else { 4.0 };
        let before = products(&folder(name), |module, rank| scale(alpha(module), rank));
        let after = products(&folded, |_, _| 1.0);
        assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
        for (module, values) in &before {
            let largest = values.iter().fold(0.0f32, |m, x| m.max(x.abs()));
            let off = values.iter().zip(&after[module]).fold(0.0f32, |m, (x, y)| m.max((x - y).abs()));
            assert!(largest > 0.0 && off <= 1e-6 * largest, "{name} {module}: {off} of {largest}");
        }
    }
    let error = fold_scaling(&folder("dora"), &out.path().join("dora")).unwrap_err();
    assert!(error.to_string().contains("use_dora"), "{error}");
    let error = fold_scaling(&folder("plain"), &out.path().join("regex")).unwrap_err();
    assert!(error.to_string().contains("regex"), "what is there stays: {error}");
}
