//! Which servers take an adapter as it is, which refuse it, and which take it and compute something else.
//!
//! The rules are those of PEFT 0.21.2, vLLM 0.33 (`lora/peft_helper.py`, `lora_model.py`), SGLang 0.5.23 and llama.cpp's
//! `convert_lora_to_gguf.py`, read from their sources and issue trackers in November 2026; those of the first two are held
//! against their own loaders (`tools/parity/lint_check.py`). Where a server is not known to refuse or misread something,
//! nothing is said.

use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;

use serde_json::{Map, Value};

use super::adapter_config::AdapterConfig;
use super::peft::{FROZEN_HEAD, PREFIX, WEIGHTS, check_tensors};
use crate::error::{Error, Result};
use crate::model::{Checkpoint, HfConfig, read_json_object, resolve};

/// A program that loads PEFT adapters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Server {
    /// PEFT itself.
    Peft,
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
    /// llama.cpp, by its converter.
    LlamaCpp,
}

/// All of them, with the names that the command line knows.
pub const SERVERS: [(&str, Server); 4] = [
    ("peft", Server::Peft),
    ("vllm", Server::Vllm),
    ("sglang", Server::Sglang),
    ("llama.cpp", Server::LlamaCpp),
];

/// What a server does with an adapter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// Computes what was trained.
    Takes,
    /// Loads it and computes something else, without a word.
    Misreads,
    /// Doesn't load it.
    Refuses,
}

/// One thing that a server doesn't take as it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Who.
    pub server: Server,
    /// [`Verdict::Misreads`] or [`Verdict::Refuses`].
    pub verdict: Verdict,
    /// What it is about.
    pub what: String,
    /// How to mend it; empty where the adapter has to be trained otherwise.
    pub mend: String,
}

/// What [`lint`] found.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Lint {
    /// In the order of the rules.
    pub findings: Vec<Finding>,
    /// What has to be said to a server for it to take the adapter, or couldn't be looked at.
    pub notes: Vec<String>,
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = SERVERS.iter().find(|(_, server)| server == self).map(|(name, _)| name);
        f.write_str(name.expect("every server has a name"))
    }
}

impl Lint {
    /// The worst that a server does with the adapter.
    pub fn verdict(&self, server: Server) -> Verdict {
        let of_server = self.findings.iter().filter(|finding| finding.server == server);
        of_server.map(|finding| finding.verdict).max().unwrap_or(Verdict::Takes)
    }

    fn add(&mut self, verdicts: &[(Server, Verdict)], what: impl Into<String>, mend: impl Into<String>) {
        let (what, mend) = (what.into(), mend.into());
        for &(server, verdict) in verdicts {
            self.findings.push(Finding { server, verdict, what: what.clone(), mend: mend.clone() });
        }
    }

    /// Nobody can load it.
    fn broken(&mut self, what: impl Into<String>, mend: impl Into<String>) {
        self.add(&SERVERS.map(|(_, server)| (server, Verdict::Refuses)), what, mend);
    }
}

use Server::{LlamaCpp, Peft, Sglang, Vllm};
use Verdict::{Misreads, Refuses};

const FOLD: &str = "`embertune lint --fold-scaling OUT` writes one that all servers compute alike";
const MERGE: &str = "merge it (`embertune merge`) and serve the merged model";
/// Of what is not computed here.
const MERGE_IN_PEFT: &str = "merge it in PEFT (`merge_and_unload`) and serve the merged model";
const OTHER_BASE: &str = "name the model that the adapter was trained on";
/// What vLLM takes of `modules_to_save`.
const CLASSIFIERS: [&str; 2] = ["classifier", "score"];
/// vLLM's choices of `--max-lora-rank`; the first above 8 is its default.
const VLLM_RANKS: [usize; 9] = [1, 8, 16, 32, 64, 128, 256, 320, 512];
const VLLM_DEFAULT_RANK: usize = 16;

/// An adapter folder as it lies there.
struct Seen {
    config: Map<String, Value>,
    /// Shapes by name.
    tensors: BTreeMap<String, Vec<usize>>,
    /// The base model's configuration, if it was named.
    base: Option<HfConfig>,
}

/// Looks at an adapter; with `base`, also whether the two fit.
///
/// # Errors
/// A base model that can't be read. What is wrong with the adapter, its files included, are findings.
pub fn lint(adapter: &Path, base: Option<&Path>) -> Result<Lint> {
    let mut lint = Lint::default();
    let base_config = base.map(HfConfig::load).transpose()?;
    let config = match read_json_object(&adapter.join("adapter_config.json"), Error::adapter) {
        Ok(config) => config,
        Err(error) => {
            lint.broken(error.to_string(), "name the adapter's folder, or download it again");
            return Ok(lint);
        }
    };
    let file = match Checkpoint::open_file(&adapter.join(WEIGHTS), Error::adapter) {
        Ok(file) => file,
        Err(error) => {
            lint.broken(error.to_string(), error.hint().unwrap_or("download the adapter again".into()));
            return Ok(lint);
        }
    };
    let tensors = file.entries.iter().map(|(name, entry)| (name.clone(), entry.shape.clone())).collect();
    let seen = Seen { config, tensors, base: base_config };
    for rule in [kind, scaling, whole_modules, kinds_of_tensors, initial_values, targets, ranks, names] {
        rule(&seen, &mut lint);
    }
    match base {
        Some(base) => fits(&seen, adapter, base, &mut lint),
        None => lint.notes.push("`--base MODEL` also looks whether the adapter fits the model".into()),
    }
    Ok(lint)
}

impl Seen {
    /// The value of a key that is there and on.
    fn on(&self, key: &str) -> Option<&Value> {
        let off = |value: &Value| match value {
            Value::Null | Value::Bool(false) => true,
            Value::Object(map) => map.is_empty(),
            Value::Array(list) => list.is_empty(),
            _ => false,
        };
        self.config.get(key).filter(|value| !off(value))
    }

    fn any_tensor(&self, part: &str) -> bool {
        self.tensors.keys().any(|name| name.contains(part))
    }
}

fn kind(seen: &Seen, lint: &mut Lint) {
    match seen.config.get("peft_type").and_then(Value::as_str) {
        Some("LORA") => {}
        Some(other) => {
            let what = format!("`peft_type` is `{other}`, not `LORA`");
            return lint.add(&[(Vllm, Refuses), (Sglang, Refuses), (LlamaCpp, Refuses)], what, MERGE_IN_PEFT);
        }
        None => lint.add(
            &[(Peft, Refuses), (Sglang, Refuses)],
            "`peft_type` is missing",
            "add `\"peft_type\": \"LORA\"` to `adapter_config.json`",
        ),
    }
    // llama.cpp's converter has the rank from the tensors.
    for (key, servers) in [("r", &[Vllm, Sglang][..]), ("lora_alpha", &[Vllm, Sglang, LlamaCpp])] {
        if !seen.config.contains_key(key) {
            let verdicts: Vec<_> = servers.iter().map(|&server| (server, Refuses)).collect();
            let mend = "add it to `adapter_config.json` (PEFT takes it for 8 where it is missing)";
            lint.add(&verdicts, format!("`{key}` is missing"), mend);
        }
    }
}

/// Everyone multiplies by α/r; not everyone knows exceptions.
fn scaling(seen: &Seen, lint: &mut Lint) {
    if seen.on("use_rslora").is_some() {
        let what = "`use_rslora`: scaled by α/r in the place of α/√r";
        lint.add(&[(Sglang, Misreads), (LlamaCpp, Misreads)], what, FOLD);
    }
    if seen.on("alpha_pattern").is_some() {
        let what = "`alpha_pattern`: all modules are scaled by `lora_alpha`";
        lint.add(&[(Sglang, Misreads), (LlamaCpp, Misreads)], what, FOLD);
    }
    if seen.on("rank_pattern").is_some() {
        lint.add(&[(Sglang, Misreads)], "`rank_pattern`: all modules are scaled by the one `r`", FOLD);
    }
}

/// Modules that are stored whole.
fn whole_modules(seen: &Seen, lint: &mut Lint) {
    let Some(Value::Array(saved)) = seen.on("modules_to_save") else { return };
    let names: Vec<&str> = saved.iter().filter_map(Value::as_str).collect();
    let what = format!("`modules_to_save` {names:?}");
    lint.add(&[(LlamaCpp, Refuses), (Sglang, Misreads)], what.clone(), MERGE);
    if names.iter().any(|name| !CLASSIFIERS.contains(name)) {
        lint.add(&[(Vllm, Refuses)], what, MERGE);
    }
}

/// What is more than A and B of linear layers.
fn kinds_of_tensors(seen: &Seen, lint: &mut Lint) {
    if seen.on("use_dora").is_some() || seen.any_tensor("lora_magnitude_vector") {
        lint.add(&[(Vllm, Refuses), (Sglang, Refuses), (LlamaCpp, Refuses)], "DoRA", MERGE_IN_PEFT);
    }
    let bias = seen.config.get("bias").and_then(Value::as_str).filter(|bias| *bias != "none");
    if bias.is_some() || seen.on("lora_bias").is_some() {
        lint.add(&[(Vllm, Refuses), (LlamaCpp, Refuses)], "trained biases", MERGE_IN_PEFT);
    }
    if seen.on("trainable_token_indices").is_some() || seen.any_tensor("trainable_tokens_delta") {
        lint.add(
            &[(Vllm, Refuses), (LlamaCpp, Refuses)],
            "trained tokens (`trainable_token_indices`)",
            MERGE_IN_PEFT,
        );
        let added = seen.base.as_ref().is_some_and(|base| beyond(seen, base.vocab_size));
        if added {
            lint.add(
                &[(Sglang, Refuses)],
                "trained tokens beyond the base model's vocabulary",
                MERGE_IN_PEFT,
            );
        }
    }
    for key in ["alora_invocation_tokens", "use_qalora", "use_bdlora", "layer_replication"] {
        if seen.on(key).is_some() {
            lint.add(&[(Vllm, Refuses)], format!("`{key}`"), "");
        }
    }
    let (embedding, head) = (seen.any_tensor("lora_embedding_A"), seen.any_tensor("lm_head.lora_A"));
    if embedding || head {
        let what = if head { "LoRA on `lm_head`" } else { "LoRA on the embedding" };
        let merge = if embedding { MERGE_IN_PEFT } else { MERGE };
        lint.add(&[(Sglang, Misreads)], format!("{what} is served in part"), merge);
        match seen.base.as_ref().map(|base| (base.model_type.as_str(), base.tie_word_embeddings)) {
            Some((kind, tied)) => {
                if kind == "qwen2" {
                    lint.add(&[(Vllm, Refuses)], format!("{what} of a Qwen2 model"), merge);
                }
                if head && tied {
                    lint.add(&[(LlamaCpp, Refuses)], format!("{what}, which is the embedding (tied)"), merge);
                }
            }
            None => {
                lint.notes.push(format!("{what}: vLLM and llama.cpp take it for some models; name `--base`"))
            }
        }
    }
}

fn beyond(seen: &Seen, vocab_size: usize) -> bool {
    let too_large = |id: &Value| id.as_u64().is_some_and(|id| id >= vocab_size as u64);
    match seen.config.get("trainable_token_indices") {
        Some(Value::Array(ids)) => ids.iter().any(too_large),
        Some(Value::Object(map)) => map.values().filter_map(Value::as_array).flatten().any(too_large),
        _ => false,
    }
}

/// Initial values that change the base's weights, unless the adapter was converted. vLLM lists those that don't.
fn initial_values(seen: &Seen, lint: &mut Lint) {
    let Some(Value::String(init)) = seen.config.get("init_lora_weights") else { return };
    if !["gaussian", "eva", "orthogonal", "mica", "lora_ga"].contains(&&*init.to_lowercase()) {
        lint.add(
            &[(Vllm, Refuses)],
            format!("`init_lora_weights` `{init}` belongs to changed base weights"),
            "convert it in PEFT: `save_pretrained(…, path_initial_model_for_weight_conversion=…)`",
        );
    }
}

fn targets(seen: &Seen, lint: &mut Lint) {
    if let Some(Value::String(regex)) = seen.config.get("target_modules")
        && !["all-linear", "all"].contains(&regex.as_str())
    {
        lint.add(&[(Sglang, Refuses)], format!("`target_modules` is a regular expression, `{regex}`"), FOLD);
    }
}

fn ranks(seen: &Seen, lint: &mut Lint) {
    let pattern = seen.config.get("rank_pattern").and_then(Value::as_object);
    let patterns = pattern.into_iter().flat_map(|map| map.values().filter_map(Value::as_u64));
    let largest = seen.config.get("r").and_then(Value::as_u64).into_iter().chain(patterns).max();
    let Some(largest) = largest.map(|rank| rank as usize) else { return };
    match VLLM_RANKS.into_iter().find(|&limit| limit >= largest) {
        None => lint.add(&[(Vllm, Refuses)], format!("rank {largest}, above vLLM's largest, 512"), MERGE),
        Some(limit) if limit > VLLM_DEFAULT_RANK => {
            lint.notes.push(format!("rank {largest}: start vLLM with `--max-lora-rank {limit}`"));
        }
        Some(_) => {}
    }
}

/// Names that say nothing to some, or to anyone.
fn names(seen: &Seen, lint: &mut Lint) {
    let named = |name: &&String| name.contains(".lora_A.default.") || name.contains(".lora_B.default.");
    if let Some(name) = seen.tensors.keys().find(named) {
        let mend = "save it by PEFT's `save_pretrained`, which leaves the adapter's name out";
        lint.add(&[(Vllm, Refuses), (LlamaCpp, Refuses)], format!("`{name}` holds the adapter's name"), mend);
    }
    // vLLM and llama.cpp take the module's own name too; SGLang looks for `layers.N.` and the target in it.
    let foreign: Vec<&String> = seen.tensors.keys().filter(|name| !name.starts_with(PREFIX)).collect();
    if let Some(name) = foreign.first() {
        let (n, all) = (foreign.len(), seen.tensors.len());
        let bare = ["model.layers.", "model.embed_tokens.", "lm_head."];
        let is_bare = |name: &&String| bare.iter().any(|start| name.starts_with(start));
        let strange = foreign.iter().any(|name| !is_bare(name));
        let verdicts = [(Peft, Misreads), (Vllm, Misreads), (LlamaCpp, Refuses)];
        lint.add(
            if strange { &verdicts } else { &verdicts[..1] },
            format!("{n} of {all} tensors don't begin with `{PREFIX}` (`{name}`): without effect"),
            format!("name them `{PREFIX}MODULE.lora_A.weight` and so on"),
        );
    }
    let alone = |name: &&String| {
        name.contains(".q_proj.lora_A.") && !seen.tensors.contains_key(&name.replace(".q_proj.", ".v_proj."))
    };
    if let Some(name) = seen.tensors.keys().find(alone) {
        lint.notes.push(format!("SGLang 0.5 stacks q, k and v, and fails on `{name}` without its `v_proj`"));
    }
    if seen.tensors.is_empty() {
        let verdicts = SERVERS.map(|(_, server)| (server, Misreads));
        lint.add(
            &verdicts,
            format!("`{WEIGHTS}` holds no tensors: without effect"),
            "save the adapter again",
        );
    }
}

/// Whether each target of the base has its A and B, in its shape, and nothing else is there.
fn fits(seen: &Seen, adapter: &Path, base: &Path, lint: &mut Lint) {
    let Some(base_config) = &seen.base else { return };
    // What isn't plain LoRA on linear layers is not computed here; what is to be said of it is said.
    if seen.any_tensor("lora_embedding_") {
        return;
    }
    let Ok(mut config) = AdapterConfig::load(adapter) else { return };
    // PEFT's names for the head of a classifier, which stands on the same layers.
    config.spec.modules_to_save.retain(|name| !CLASSIFIERS.contains(&name.as_str()));
    let (shapes, modules) = super::merge::shapes_and_modules(base_config);
    let resolved = match resolve(&config.spec, &modules) {
        Ok(resolved) => resolved,
        Err(problems) => {
            let text: Vec<String> = problems.iter().map(|p| p.message.clone()).collect();
            let what =
                format!("the base model {} doesn't have the targets: {}", base.display(), text.join("; "));
            // A name that no module has is refused by all; one that only stands elsewhere is passed over by vLLM.
            let last = |name: &str| name.rsplit('.').next().unwrap_or_default().to_string();
            let known: Vec<String> = modules.all_linear().iter().map(|module| last(module)).collect();
            let module =
                |name: &str| name.split_once(".lora_").map_or(String::new(), |(module, _)| last(module));
            let strange = seen.tensors.keys().any(|name| !known.contains(&module(name)));
            let vllm = if strange { Refuses } else { Misreads };
            let verdicts = [(Peft, Refuses), (Vllm, vllm), (Sglang, Refuses), (LlamaCpp, Refuses)];
            return lint.add(&verdicts, what, OTHER_BASE);
        }
    };
    let wanted: Vec<_> = resolved.modules.iter().flat_map(|m| super::merge::wanted(m, &shapes)).collect();
    let is_adapter = |name: &&String| name.starts_with(PREFIX) && name.contains(".lora_");
    let own = seen.tensors.iter().filter(|(name, _)| is_adapter(name));
    // The adapter's own name in them is a finding of its own.
    let plain = |name: &str| name.replace(".default.weight", ".weight");
    let found: BTreeMap<String, Vec<usize>> = own.map(|(name, shape)| (plain(name), shape.clone())).collect();
    let missing = wanted.iter().filter(|(name, _)| !found.contains_key(name)).count();
    if missing > 0 {
        let all = wanted.len();
        let what = format!("{missing} of {all} tensors are missing: their modules stay as they were");
        lint.add(&[(Peft, Misreads)], what, "save the adapter again, from the model that was trained");
    }
    let there: Vec<_> = wanted.into_iter().filter(|(name, _)| found.contains_key(name)).collect();
    if let Some(what) = other_rank(&there, &found) {
        // PEFT and SGLang compare shapes; the others scale by α over one of the two ranks, and nobody knows which is meant.
        let verdicts = [(Peft, Refuses), (Vllm, Misreads), (Sglang, Refuses), (LlamaCpp, Misreads)];
        return lint.add(
            &verdicts,
            what,
            "set `r` (or `rank_pattern`) in `adapter_config.json` to the tensors' rank",
        );
    }
    match check_tensors(&adapter.join(WEIGHTS), &there, &found) {
        Err(error) => lint.broken(error.to_string(), error.hint().unwrap_or_default()),
        Ok(unused) => {
            if let Some(name) = unused.iter().find(|name| *name != FROZEN_HEAD) {
                let what = format!("`{name}` has no place in the base model: without effect");
                let verdicts = [(Peft, Misreads), (Vllm, Misreads), (Sglang, Refuses), (LlamaCpp, Refuses)];
                lint.add(&verdicts, what, OTHER_BASE);
            }
        }
    }
}

/// The first tensor that fits the base but for its rank.
fn other_rank(wanted: &[(String, Vec<usize>)], found: &BTreeMap<String, Vec<usize>>) -> Option<String> {
    wanted.iter().find_map(|(name, want)| {
        let got = &found[name];
        let width = usize::from(name.contains(".lora_A."));
        let fits = got.len() == 2 && got[width] == want[width] && got != want;
        fits.then(|| {
            format!("`{name}` is of rank {}, `adapter_config.json` says {}", got[1 - width], want[1 - width])
        })
    })
}
