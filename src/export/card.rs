//! The model card: the `README.md` of an adapter or a model, with the head that the hub reads. It says what the files
//! themselves don't: base, data, settings, results. A card that is there already is its owner's.
//!
//! It says nothing of the machine or the time: a run that is repeated, or stopped and resumed, writes the same card.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use yaml_rust2::{Yaml, YamlLoader};

use super::adapter_config::plain;
use super::file::write_text;
use super::merge::MergeReport;
use crate::assets;
use crate::config::{DataConfig, OptimKind, SchedulerConfig, SftConfig, SftDataConfig, TargetModules};
use crate::error::Result;
use crate::hub;
use crate::model::LoraSpec;

/// The card's file.
pub(super) const CARD: &str = "README.md";

/// What a card says.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Card {
    /// The base model's name, as its user knows it.
    base: Option<String>,
    /// Its name on the hub, where it has one.
    base_id: Option<String>,
    /// `license` and what belongs to it, of the base's own card.
    license: Vec<(&'static str, String)>,
    /// Names of datasets on the hub.
    datasets: Vec<String>,
    /// What was trained how: name and value.
    settings: Vec<(&'static str, String)>,
    /// What came of it: name and value.
    results: Vec<(String, String)>,
    /// Sections of another card that belong here.
    more: String,
}

/// How far a run is.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Results {
    /// Finished steps.
    pub step: usize,
    /// Trained tokens so far.
    pub trained_tokens: usize,
    /// The last training loss, and after how many steps it was told.
    pub loss: Option<(usize, f64)>,
    /// The last held-out loss, and after how many steps.
    pub val_loss: Option<(usize, f64)>,
}

impl Card {
    /// Of something made from the base model `name`, which lies in `folder` if it is on this machine.
    pub fn of_base(name: &str, folder: Option<&Path>) -> Self {
        let id = hub::repo_id(name, folder.unwrap_or(Path::new(name)));
        // A path says nothing to others, and too much of this machine.
        let short = name.trim_end_matches('/').rsplit(['/', '\\']).next().unwrap_or(name);
        let short = if assets::is_embedded(name) { name } else { short };
        let base = id.clone().unwrap_or_else(|| short.into());
        let license = folder.map(license).unwrap_or_default();
        Self { base: Some(base), base_id: id, license, ..Self::default() }
    }

    /// Of what a run has trained so far.
    pub fn of_run(config: &SftConfig, folder: &Path, results: Results) -> Self {
        let mut card = Self::of_base(&config.model.name, Some(folder));
        card.settings = settings(config);
        if let DataConfig::Sft(data) = &config.data {
            card.datasets.extend(hub::dataset_id(&data.name));
        }
        let Results { step, trained_tokens, loss, val_loss } = results;
        card.results =
            vec![("Steps".into(), step.to_string()), ("Trained tokens".into(), trained_tokens.to_string())];
        for (name, loss) in [("Training loss", loss), ("Held-out loss", val_loss)] {
            if let Some((at, loss)) = loss {
                card.results.push((format!("{name} (step {at})"), format!("{loss:.4}")));
            }
        }
        card
    }

    /// Writes the card of an adapter, unless there is one.
    pub(super) fn write_adapter(&self, dir: &Path, spec: &LoraSpec) -> Result<()> {
        let targets = match &spec.target_modules {
            TargetModules::List(names) => {
                names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
            }
            TargetModules::Regex(regex) => format!("modules that match `{regex}`"),
            TargetModules::AllLinear => "all linear layers".into(),
        };
        let (rank, alpha) = (spec.rank, plain(spec.alpha));
        let base = self.base.as_deref().unwrap_or("the base model");
        let what = format!(
            "A LoRA adapter for {base}: rank {rank}, alpha {alpha}{}, on {targets}.",
            if spec.use_rslora { " (rank-stabilised)" } else { "" }
        );
        let load = format!(
            "from peft import PeftModel\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n\
             base = \"{base}\"\nmodel = AutoModelForCausalLM.from_pretrained(base, dtype=\"auto\")\n\
             model = PeftModel.from_pretrained(model, \"THIS FOLDER OR REPOSITORY\")\n\
             tokenizer = AutoTokenizer.from_pretrained(base)"
        );
        self.write(dir, "peft", &["lora"], &format!("LoRA adapter for {base}"), &what, &load)
    }

    /// Writes the card of a whole model, unless there is one; `what` says how it came about.
    pub(super) fn write_model(&self, dir: &Path, what: &str) -> Result<()> {
        let load = "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n\
                    name = \"THIS FOLDER OR REPOSITORY\"\n\
                    model = AutoModelForCausalLM.from_pretrained(name, dtype=\"auto\")\n\
                    tokenizer = AutoTokenizer.from_pretrained(name)";
        let base = self.base.as_deref().unwrap_or("a base model");
        self.write(dir, "transformers", &[], &format!("{base}, fine-tuned"), what, load)
    }

    fn write(
        &self,
        dir: &Path,
        library: &str,
        tags: &[&str],
        title: &str,
        what: &str,
        load: &str,
    ) -> Result<()> {
        let path = dir.join(CARD);
        if path.exists() {
            return Ok(());
        }
        let version = env!("CARGO_PKG_VERSION");
        let mut text = self.head(library, tags);
        text += &format!(
            "\n# {title}\n\n{what} Made by embertune {version}.\n\n## Use\n\n```python\n{load}\n```\n"
        );
        for (title, rows) in [("Training", self.training()), ("Results", self.results.clone())] {
            if !rows.is_empty() {
                text += &format!("\n## {title}\n\n| | |\n|---|---|\n");
                rows.iter().for_each(|(name, value)| {
                    text += &format!("| {name} | {} |\n", value.replace('|', "\\|"))
                });
            }
        }
        text += &self.more;
        write_text(&path, &text)
    }

    fn training(&self) -> Vec<(String, String)> {
        self.settings.iter().map(|(name, value)| ((*name).to_string(), value.clone())).collect()
    }

    /// What the hub reads (huggingface.co/docs/hub/model-cards).
    fn head(&self, library: &str, tags: &[&str]) -> String {
        let mut text = String::from("---\n");
        if let Some(id) = &self.base_id {
            let _ = writeln!(text, "base_model: {}", yaml(id));
            if library != "peft" {
                text += "base_model_relation: finetune\n";
            }
        }
        let _ = writeln!(text, "library_name: {library}\npipeline_tag: text-generation");
        for (key, value) in &self.license {
            let _ = writeln!(text, "{key}: {}", yaml(value));
        }
        list(&mut text, "datasets", &self.datasets);
        let of_base =
            self.base_id.as_ref().filter(|_| library == "peft").map(|id| format!("base_model:adapter:{id}"));
        let own = tags.iter().copied().chain(["sft", "transformers", "embertune"]).map(String::from);
        list(&mut text, "tags", &of_base.into_iter().chain(own).collect::<Vec<_>>());
        text + "---\n"
    }
}

/// The card of a merged model: of the base, of what the merge did, and what the adapter's own card says of its training.
pub(super) fn of_merge(name: &str, base: &Path, adapter: &Path) -> Card {
    let mut card = Card::of_base(name, Some(base));
    let Ok(text) = fs::read_to_string(adapter.join(CARD)) else { return card };
    if let Some(head) =
        hub::card_head(&text).and_then(|head| YamlLoader::load_from_str(head).ok()?.into_iter().next())
    {
        let names = head["datasets"].as_vec().into_iter().flatten();
        card.datasets = names.filter_map(|name| name.as_str().map(String::from)).collect();
    }
    card.more = text.find("\n## Training\n").map_or(String::new(), |at| text[at..].into());
    card
}

/// What a merge did, in a sentence.
pub(super) fn merged(report: &MergeReport) -> String {
    format!(
        "A LoRA adapter merged into its base model: {} weights changed, by {:.3e} at most; rounding to the \
         stored type costs {:.3e} at most.",
        report.changed, report.largest_change.0, report.largest_rounding
    )
}

fn list(text: &mut String, key: &str, values: &[String]) {
    if !values.is_empty() {
        let _ = writeln!(text, "{key}:");
        values.iter().for_each(|value| {
            let _ = writeln!(text, "- {}", yaml(value));
        });
    }
}

/// A string as a value of YAML; a quoted one is JSON's, which YAML reads too.
fn yaml(value: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_./:".contains(c);
    let safe = value.starts_with(|c: char| c.is_ascii_alphabetic()) && value.chars().all(plain);
    let word = ["true", "false", "null", "yes", "no", "on", "off"].contains(&value.to_lowercase().as_str());
    if safe && !word && !value.ends_with(':') { value.into() } else { serde_json::json!(value).to_string() }
}

/// The licence that the base's card names.
fn license(base: &Path) -> Vec<(&'static str, String)> {
    let Ok(text) = fs::read_to_string(base.join(CARD)) else { return Vec::new() };
    let Some(head) =
        hub::card_head(&text).and_then(|head| YamlLoader::load_from_str(head).ok()?.into_iter().next())
    else {
        return Vec::new();
    };
    let said = |key: &str| match &head[key] {
        Yaml::String(value) => Some(value.clone()),
        _ => None,
    };
    let keys = ["license", "license_name", "license_link"];
    keys.into_iter().filter_map(|key| Some((key, said(key)?))).collect()
}

/// The keys that what was learnt depends on, in words.
fn settings(config: &SftConfig) -> Vec<(&'static str, String)> {
    let mut rows = Vec::new();
    rows.push((
        "Data",
        match &config.data {
            DataConfig::Sft(data) => data_name(data),
            DataConfig::Fake(_) => "made-up tokens".into(),
        },
    ));
    rows.push((
        "Trained",
        match &config.model.lora {
            None => "all weights".into(),
            Some(lora) => {
                let saved = lora.modules_to_save.join("`, `");
                let saved = if saved.is_empty() { saved } else { format!(", `{saved}` in full") };
                let dropout =
                    if lora.dropout > 0.0 { format!(", dropout {}", lora.dropout) } else { String::new() };
                format!("LoRA, rank {}, alpha {}{dropout}{saved}", lora.rank, lora.alpha)
            }
        },
    ));
    let (batch, seq_len) = (config.data.batch_size(), config.data.seq_len());
    rows.push(("Tokens a step", format!("{batch} rows of {seq_len}")));
    let optim = &config.optim;
    let kind = match optim.kind {
        OptimKind::AdamW { betas1, betas2, eps, .. } => {
            format!("AdamW (betas {betas1}, {betas2}, eps {eps:e})")
        }
        OptimKind::Sgd { momentum, .. } => format!("SGD (momentum {momentum})"),
        OptimKind::Muon { mu, .. } => format!("Muon (momentum {mu})"),
        OptimKind::SignSgd => "sign SGD".into(),
    };
    rows.push(("Optimizer", format!("{kind}, weight decay {}", optim.weight_decay)));
    rows.push((
        "Learning rate",
        format!(
            "{:e}, {}",
            optim.lr,
            match &config.scheduler {
                SchedulerConfig::Constant => "constant".into(),
                SchedulerConfig::Linear { warmup_steps, decay_steps, .. } => {
                    format!("linear ({warmup_steps} steps of warmup, {decay_steps} of decay)")
                }
                SchedulerConfig::Cosine { warmup_steps, .. } =>
                    format!("cosine ({warmup_steps} steps of warmup)"),
            }
        ),
    ));
    rows.push(("Gradient clipping", optim.max_norm.map_or("none".into(), |norm| norm.to_string())));
    rows.push(("Seeds", format!("{} (adapters, dropout), {} (data)", config.seed, seed_of_data(config))));
    rows
}

fn seed_of_data(config: &SftConfig) -> u64 {
    match &config.data {
        DataConfig::Sft(data) => data.seed,
        DataConfig::Fake(data) => data.seed,
    }
}

/// The hub's name, or the last part of a path.
fn data_name(data: &SftDataConfig) -> String {
    let name = match hub::dataset_id(&data.name) {
        Some(id) => id,
        None if assets::is_embedded(&data.name) => data.name.clone(),
        None => data.name.trim_end_matches('/').rsplit(['/', '\\']).next().unwrap_or_default().to_string(),
    };
    let parts = data.subsets.iter().chain(&data.splits).flatten().cloned().collect::<Vec<_>>();
    if parts.is_empty() { format!("`{name}`") } else { format!("`{name}` ({})", parts.join(", ")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config() -> SftConfig {
        let text = "max_steps = 3\nseed = 7\n[model]\nname = \"Qwen/Qwen3-0.6B\"\n[model.lora]\nrank = 8\n[data]\n\
                    name = \"owner/data@v1\"\nsplits = [\"train\"]\n";
        SftConfig::from_toml(text, "run.toml").unwrap()
    }

    fn card(name: &str, folder: &Path) -> String {
        let mut config = config();
        config.model.name = name.into();
        let results =
            Results { step: 3, trained_tokens: 99, loss: Some((3, 1.25)), val_loss: Some((2, 1.5)) };
        let out = tempfile::tempdir().unwrap();
        let spec = LoraSpec::from_config(config.model.lora.as_ref().unwrap());
        Card::of_run(&config, folder, results).write_adapter(out.path(), &spec).unwrap();
        fs::read_to_string(out.path().join(CARD)).unwrap()
    }

    #[test]
    fn the_head_is_yaml_that_the_hub_reads() {
        let base = tempfile::tempdir().unwrap();
        let license =
            "---\nlicense: other\nlicense_name: \"no: yes\"\nlicense_link: https://x.org/a b\n---\n# Base\n";
        fs::write(base.path().join(CARD), license).unwrap();
        let text = card("Qwen/Qwen3-0.6B", base.path());
        let head = YamlLoader::load_from_str(hub::card_head(&text).unwrap()).unwrap().remove(0);
        let get = |key: &str| head[key].as_str().unwrap_or_else(|| panic!("{key} in {text}"));
        assert_eq!(get("base_model"), "Qwen/Qwen3-0.6B");
        assert_eq!((get("library_name"), get("pipeline_tag")), ("peft", "text-generation"));
        assert_eq!((get("license"), get("license_name")), ("other", "no: yes"));
        assert_eq!(get("license_link"), "https://x.org/a b");
        assert_eq!(head["datasets"][0].as_str(), Some("owner/data"));
        assert_eq!(head["tags"][0].as_str(), Some("base_model:adapter:Qwen/Qwen3-0.6B"));
        for words in
            ["rank 8, alpha 32", "| Held-out loss (step 2) | 1.5000 |", "| Training loss (step 3) | 1.2500 |"]
        {
            assert!(text.contains(words), "{words} in {text}");
        }
    }

    #[test]
    fn paths_of_this_machine_stay_out_and_a_base_without_a_licence_gives_none() {
        let base = tempfile::tempdir().unwrap();
        let text = card(base.path().to_str().unwrap(), base.path());
        assert!(!text.contains(base.path().parent().unwrap().to_str().unwrap()), "{text}");
        assert!(!text.contains("license") && !text.contains("base_model:"), "{text}");
        let name = base.path().file_name().unwrap().to_str().unwrap();
        assert!(text.contains(&format!("# LoRA adapter for {name}\n")), "{text}");
        // In the hub's cache a folder has the hub's name.
        let snapshot = base.path().join("models--owner--base-1.5/snapshots/abc");
        fs::create_dir_all(&snapshot).unwrap();
        assert!(card(snapshot.to_str().unwrap(), &snapshot).contains("\nbase_model: owner/base-1.5\n"));
    }

    #[test]
    fn a_card_that_is_there_stays() {
        let out = tempfile::tempdir().unwrap();
        fs::write(out.path().join(CARD), "mine").unwrap();
        Card::of_base("a/b", None).write_model(out.path(), "x").unwrap();
        assert_eq!(fs::read_to_string(out.path().join(CARD)).unwrap(), "mine");
    }

    #[test]
    fn strings_are_quoted_where_yaml_would_read_something_else() {
        for (value, wanted) in [("mit", "mit"), ("no", "\"no\""), ("1.0", "\"1.0\""), ("a: b", "\"a: b\"")] {
            assert_eq!(yaml(value), wanted);
        }
    }
}
