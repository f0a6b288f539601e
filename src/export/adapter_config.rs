//! `adapter_config.json`, key for key as PEFT 0.21.2 writes it, and read with PEFT's defaults.

use std::path::Path;

use serde_json::{Map, Value, json};

use crate::config::{InitLoraWeights, TargetModules};
use crate::error::{Error, Result};
use crate::hub;
use crate::model::{AdaptedModule, LoraSpec, Modules, Resolved, read_json_object, resolve};

/// The version whose files these are.
const PEFT_VERSION: &str = "0.21.2";

/// What PEFT offers and the decoder does not compute: the key's value must be one of its "off"s.
const OFF: [&str; 17] = [
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "use_qalora",
    "use_bdlora",
    "layer_replication",
    "trainable_token_indices",
    "target_parameters",
    "alora_invocation_tokens",
    "ensure_weight_tying",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
    "qalora_config",
    "megatron_config",
    "loftq_config",
];

/// What PEFT offers, is not used here, and is written as null.
const NULL: [&str; 14] = [
    "alora_invocation_tokens",
    "arrow_config",
    "auto_mapping",
    "corda_config",
    "eva_config",
    "kasa_config",
    "layer_replication",
    "lora_ga_config",
    "megatron_config",
    "monteclora_config",
    "target_parameters",
    "trainable_token_indices",
    "use_bdlora",
    "velora_config",
];

/// An adapter's configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct AdapterConfig {
    /// The base model's hub id or folder.
    pub base_model_name_or_path: Option<String>,
    /// What is adapted, and how.
    pub spec: LoraSpec,
}

impl AdapterConfig {
    /// Reads `dir/adapter_config.json`.
    ///
    /// # Errors
    /// Where the file is missing or isn't JSON, a key has the wrong type, or the adapter is of a
    /// kind that the decoder does not compute.
    pub fn load(dir: &Path) -> Result<Self> {
        let path = dir.join("adapter_config.json");
        let map = read_json_object(&path, Error::adapter)?;
        let keys = Keys { path: &path, map: &map };
        keys.refuse_other_kinds()?;
        let target_modules = match keys.names("target_modules")? {
            // PEFT's default for qwen3, qwen2 and llama.
            None => TargetModules::List(vec!["q_proj".into(), "v_proj".into()]),
            Some(Names::List(list)) => TargetModules::List(list),
            Some(Names::One(text)) if text.eq_ignore_ascii_case("all-linear") => TargetModules::AllLinear,
            Some(Names::One(regex)) => TargetModules::Regex(regex),
        };
        let exclude_modules = keys.names("exclude_modules")?.map(|names| match names {
            Names::List(list) => TargetModules::List(list),
            Names::One(regex) => TargetModules::Regex(regex),
        });
        let spec = LoraSpec {
            rank: keys.size("r")?.unwrap_or(8),
            alpha: keys.number("lora_alpha")?.unwrap_or(8.0),
            dropout: keys.number("lora_dropout")?.unwrap_or(0.0),
            target_modules,
            exclude_modules,
            modules_to_save: keys.list("modules_to_save")?,
            use_rslora: keys.map.get("use_rslora") == Some(&Value::Bool(true)),
            rank_pattern: keys.pattern("rank_pattern", |keys, key| keys.size(key))?,
            alpha_pattern: keys.pattern("alpha_pattern", |keys, key| keys.number(key))?,
            layers_to_transform: keys.layers()?,
            layers_pattern: keys.list("layers_pattern")?,
            init: keys.init()?,
        };
        Ok(AdapterConfig { base_model_name_or_path: keys.text("base_model_name_or_path")?, spec })
    }

    /// The file's text: sorted keys, two spaces, no final newline, as Python writes it.
    pub(super) fn to_text(&self, modules: &Modules) -> String {
        let mut map = self.own_keys(modules);
        for key in ["ensure_weight_tying", "fan_in_fan_out", "lora_bias", "use_dora", "use_qalora"] {
            map.insert(key.into(), json!(false));
        }
        for key in NULL {
            map.insert(key.into(), Value::Null);
        }
        map.insert("bias".into(), json!("none"));
        map.insert("inference_mode".into(), json!(true)); // whatever it was, PEFT writes true
        map.insert("loftq_config".into(), json!({}));
        map.insert("megatron_core".into(), json!("megatron.core"));
        map.insert("peft_type".into(), json!("LORA"));
        map.insert("peft_version".into(), json!(PEFT_VERSION));
        map.insert("qalora_group_size".into(), json!(16));
        map.insert("task_type".into(), json!("CAUSAL_LM"));
        map.sort_keys();
        serde_json::to_string_pretty(&map).expect("JSON values can be written")
    }

    /// The keys that tell this adapter from others.
    fn own_keys(&self, modules: &Modules) -> Map<String, Value> {
        let spec = &self.spec;
        let [ranks, alphas] = self.patterns(modules);
        let list = |names: &[String]| if names.is_empty() { Value::Null } else { json!(names) };
        let rule = |rule: &TargetModules| match rule {
            TargetModules::List(names) => json!(modules.condense(names.clone())),
            TargetModules::Regex(regex) => json!(regex),
            TargetModules::AllLinear => json!(modules.condense(modules.all_linear())),
        };
        let init = match spec.init {
            InitLoraWeights::Default => json!(true),
            InitLoraWeights::Gaussian => json!("gaussian"),
        };
        let pattern = match spec.layers_pattern.as_slice() {
            [one] => json!(one),
            many => list(many),
        };
        let base = self.base_model_name_or_path.as_deref().map(hub::split_revision);
        let (base, revision) = (base.map(|(name, _)| name), base.and_then(|(_, revision)| revision));
        let pairs = [
            ("base_model_name_or_path", json!(base)),
            ("revision", json!(revision)),
            ("r", json!(spec.rank)),
            ("lora_alpha", plain(spec.alpha)),
            ("lora_dropout", json!(spec.dropout)),
            ("target_modules", rule(&spec.target_modules)),
            ("exclude_modules", spec.exclude_modules.as_ref().map_or(Value::Null, rule)),
            ("modules_to_save", list(&spec.modules_to_save)),
            ("use_rslora", json!(spec.use_rslora)),
            ("rank_pattern", Value::Object(ranks)),
            ("alpha_pattern", Value::Object(alphas)),
            ("layers_to_transform", json!(spec.layers_to_transform)),
            ("layers_pattern", pattern),
            ("init_lora_weights", init),
        ];
        pairs.into_iter().map(|(key, value)| (key.to_string(), value)).collect()
    }

    /// Rank and alpha patterns in the order in which a file holds them: sorted. Where that order
    /// would change what a module gets, each module is named instead.
    fn patterns(&self, modules: &Modules) -> [Map<String, Value>; 2] {
        let spec = &self.spec;
        let mut sorted = spec.clone();
        sorted.rank_pattern.sort_by(|a, b| a.0.cmp(&b.0));
        sorted.alpha_pattern.sort_by(|a, b| a.0.cmp(&b.0));
        if let (Ok(want), Ok(got)) = (resolve(spec, modules), resolve(&sorted, modules))
            && want.modules != got.modules
        {
            sorted.rank_pattern = each(&want, |m| (m.rank != spec.rank).then_some(m.rank));
            sorted.alpha_pattern = each(&want, |m| (m.alpha != spec.alpha).then_some(m.alpha));
        }
        let ranks = sorted.rank_pattern.into_iter().map(|(key, rank)| (key, json!(rank)));
        let alphas = sorted.alpha_pattern.into_iter().map(|(key, alpha)| (key, plain(alpha)));
        [ranks.collect(), alphas.collect()]
    }
}

/// One literal pattern per module that has a value of its own.
fn each<T>(resolved: &Resolved, value: impl Fn(&AdaptedModule) -> Option<T>) -> Vec<(String, T)> {
    let named = resolved.modules.iter().map(|m| (fancy_regex::escape(&m.name).into_owned(), value(m)));
    let mut all: Vec<(String, T)> = named.filter_map(|(name, value)| Some((name, value?))).collect();
    all.sort_by(|a, b| a.0.cmp(&b.0));
    all
}

/// A whole number without a decimal point.
pub(super) fn plain(number: f64) -> Value {
    if number.fract() == 0.0 && number.abs() < 1e15 { json!(number as i64) } else { json!(number) }
}

/// A string or a list of strings.
enum Names {
    One(String),
    List(Vec<String>),
}

/// An `adapter_config.json` being read.
struct Keys<'a> {
    path: &'a Path,
    map: &'a Map<String, Value>,
}

impl Keys<'_> {
    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn wrong(&self, key: &str, wanted: &str) -> Error {
        let found = self.map.get(key).unwrap_or(&Value::Null);
        Error::adapter(self.path, format!("`{key}` is {found}, wanted {wanted}"), "")
    }

    fn size(&self, key: &str) -> Result<Option<usize>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let size = value.as_u64().filter(|&n| n > 0).and_then(|n| usize::try_from(n).ok());
        Ok(Some(size.ok_or_else(|| self.wrong(key, "a positive whole number"))?))
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        Ok(Some(value.as_f64().ok_or_else(|| self.wrong(key, "a number"))?))
    }

    fn text(&self, key: &str) -> Result<Option<String>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        Ok(Some(value.as_str().ok_or_else(|| self.wrong(key, "a string"))?.to_string()))
    }

    fn names(&self, key: &str) -> Result<Option<Names>> {
        let wrong = || self.wrong(key, "a string or a list of strings");
        match self.get(key) {
            None => Ok(None),
            Some(Value::String(one)) => Ok(Some(Names::One(one.clone()))),
            Some(Value::Array(list)) => {
                let names: Option<Vec<String>> = list.iter().map(|v| v.as_str().map(String::from)).collect();
                Ok(Some(Names::List(names.ok_or_else(wrong)?)))
            }
            Some(_) => Err(wrong()),
        }
    }

    fn list(&self, key: &str) -> Result<Vec<String>> {
        Ok(match self.names(key)? {
            None => Vec::new(),
            Some(Names::One(one)) => vec![one],
            Some(Names::List(list)) => list,
        })
    }

    fn pattern<T>(
        &self,
        key: &str,
        read: impl Fn(&Keys, &str) -> Result<Option<T>>,
    ) -> Result<Vec<(String, T)>> {
        let Some(value) = self.get(key) else { return Ok(Vec::new()) };
        let map = value.as_object().ok_or_else(|| self.wrong(key, "an object"))?;
        let keys = Keys { path: self.path, map };
        map.keys()
            .map(|pattern| {
                let value = read(&keys, pattern)?;
                Ok((pattern.clone(), value.ok_or_else(|| keys.wrong(pattern, "a number"))?))
            })
            .collect()
    }

    fn layers(&self) -> Result<Option<Vec<usize>>> {
        let key = "layers_to_transform";
        let wrong = || self.wrong(key, "a layer number or a list of them");
        let number = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
        match self.get(key) {
            None => Ok(None),
            Some(Value::Array(list)) if list.is_empty() => Ok(None),
            Some(Value::Array(list)) => {
                let layers: Option<Vec<usize>> = list.iter().map(number).collect();
                Ok(Some(layers.ok_or_else(wrong)?))
            }
            Some(one) => Ok(Some(vec![number(one).ok_or_else(wrong)?])),
        }
    }

    /// Only inits that leave the base model's weights as they are.
    fn init(&self) -> Result<InitLoraWeights> {
        match self.get("init_lora_weights") {
            Some(Value::String(name)) if name == "gaussian" => Ok(InitLoraWeights::Gaussian),
            None | Some(Value::Bool(_)) => Ok(InitLoraWeights::Default),
            Some(Value::String(name)) if ["eva", "orthogonal"].contains(&name.as_str()) => {
                Ok(InitLoraWeights::Default)
            }
            Some(other) => {
                let message = format!("`init_lora_weights` {other} changes the base model's weights");
                let hint = "convert the adapter in PEFT first (`save_pretrained` with \
                            `path_initial_model_for_weight_conversion`)";
                Err(Error::adapter(self.path, message, hint))
            }
        }
    }

    fn refuse_other_kinds(&self) -> Result<()> {
        let kind = self.text("peft_type")?.ok_or_else(|| self.wrong("peft_type", "`LORA`"))?;
        if kind != "LORA" {
            let message = format!("`peft_type` `{kind}` is not supported, wanted `LORA`");
            return Err(Error::adapter(self.path, message, ""));
        }
        if let Some(bias) = self.text("bias")?.filter(|bias| bias != "none") {
            let message = format!("`bias` `{bias}` is not supported, wanted `none`");
            return Err(Error::adapter(self.path, message, ""));
        }
        for key in OFF {
            let on = match self.get(key) {
                None | Some(Value::Bool(false)) => false,
                Some(Value::Object(map)) => !map.is_empty(),
                Some(Value::Array(list)) => !list.is_empty(),
                Some(_) => true,
            };
            if on {
                let hint = "only plain LoRA (with or without rslora and patterns) is computed here";
                return Err(Error::adapter(
                    self.path,
                    format!("`{key}` is set, which is not supported"),
                    hint,
                ));
            }
        }
        Ok(())
    }
}
