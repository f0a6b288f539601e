//! A Hugging Face `config.json` → [`HfConfig`]: Qwen3, Qwen2 and Llama as flags of one decoder.
//!
//! What the decoder cannot compute (scaled RoPE, sliding windows that bite, quantised weights,
//! another activation) is refused here, by the key's name, before any weight is read.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use crate::error::{Error, Result};

/// The model types that are understood, as `config.json` spells them.
const SUPPORTED: [&str; 3] = ["qwen3", "qwen2", "llama"];

/// The sizes and flags of a decoder, under Hugging Face's key names.
#[derive(Debug, Clone, PartialEq)]
pub struct HfConfig {
    /// `qwen3`, `qwen2` or `llama`.
    pub model_type: String,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width inside the MLP.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Query heads.
    pub num_attention_heads: usize,
    /// Key and value heads; divides the query heads.
    pub num_key_value_heads: usize,
    /// Size of one head; need not be `hidden_size / num_attention_heads`.
    pub head_dim: usize,
    /// Added to the mean square in every norm.
    pub rms_norm_eps: f64,
    /// Base of the rotary frequencies.
    pub rope_theta: f64,
    /// Longest document that the model was made for.
    pub max_position_embeddings: usize,
    /// Whether the head is the embedding.
    pub tie_word_embeddings: bool,
    /// Whether `q_proj`, `k_proj` and `v_proj` have a bias.
    pub qkv_bias: bool,
    /// Whether `o_proj` has a bias.
    pub o_bias: bool,
    /// Whether the MLP's projections have a bias.
    pub mlp_bias: bool,
    /// Whether queries and keys are normed per head (Qwen3).
    pub qk_norm: bool,
    /// Standard deviation of freshly made weights.
    pub initializer_range: f64,
    /// The dtype that the file says its weights have (`float32`, `bfloat16`, …), if it says so.
    pub dtype: Option<String>,
}

/// A `config.json` being read: every error names file, key, found and wanted.
struct Keys<'a> {
    path: &'a Path,
    map: &'a Map<String, Value>,
}

impl HfConfig {
    /// Reads `dir/config.json`.
    ///
    /// # Errors
    /// Where the file is missing or isn't JSON, a key is missing or has the wrong type, or the
    /// model is one that the decoder cannot compute.
    pub fn load(dir: &Path) -> Result<Self> {
        let path = dir.join("config.json");
        let map = read_json_object(&path, Error::model)?;
        Self::from_json(&map, &path)
    }

    /// The config in `map`; `path` is for messages.
    ///
    /// # Errors
    /// As [`HfConfig::load`].
    pub fn from_json(map: &Map<String, Value>, path: &Path) -> Result<Self> {
        let keys = Keys { path, map };
        let model_type = keys.model_type()?;
        keys.refuse_what_is_not_computed()?;
        let (hidden_size, heads) = (keys.size("hidden_size")?, keys.size("num_attention_heads")?);
        let head_dim = match (keys.optional_size("head_dim")?, model_type.as_str()) {
            (Some(head_dim), _) => head_dim,
            // transformers' Qwen3Config: `head_dim: int = 128`.
            (None, "qwen3") if !map.contains_key("head_dim") => 128,
            (None, _) => hidden_size / heads,
        };
        let bias = keys.flag("attention_bias")?;
        let config = HfConfig {
            vocab_size: keys.size("vocab_size")?,
            hidden_size,
            intermediate_size: keys.size("intermediate_size")?,
            num_hidden_layers: keys.size("num_hidden_layers")?,
            num_attention_heads: heads,
            num_key_value_heads: keys.optional_size("num_key_value_heads")?.unwrap_or(heads),
            head_dim,
            rms_norm_eps: keys.number("rms_norm_eps")?.unwrap_or(1e-6),
            rope_theta: keys.rope_theta()?,
            max_position_embeddings: keys.optional_size("max_position_embeddings")?.unwrap_or(
                // transformers' defaults.
                if model_type == "llama" { 2048 } else { 32768 },
            ),
            tie_word_embeddings: keys.flag("tie_word_embeddings")?,
            qkv_bias: model_type == "qwen2" || bias,
            o_bias: model_type != "qwen2" && bias,
            mlp_bias: model_type == "llama" && keys.flag("mlp_bias")?,
            qk_norm: model_type == "qwen3",
            initializer_range: keys.number("initializer_range")?.unwrap_or(0.02),
            dtype: keys.text("dtype")?.or(keys.text("torch_dtype")?),
            model_type,
        };
        config.check_sizes(path)?;
        keys.refuse_sliding_window(&config)?;
        Ok(config)
    }

    fn check_sizes(&self, path: &Path) -> Result<()> {
        // Far beyond any model there is: a slip in the file, not a reason to run out of memory.
        let sizes = [
            ("num_hidden_layers", self.num_hidden_layers, 10_000),
            ("hidden_size", self.hidden_size, 1 << 20),
            ("intermediate_size", self.intermediate_size, 1 << 24),
            ("vocab_size", self.vocab_size, 1 << 24),
        ];
        if let Some((key, size, most)) = sizes.into_iter().find(|(_, size, most)| size > most) {
            return Err(Error::model(path, format!("`{key}` is {size}, at most {most} is wanted"), ""));
        }
        let (h, g) = (self.num_attention_heads, self.num_key_value_heads);
        if !h.is_multiple_of(g) {
            let message = format!("`num_attention_heads` {h} is not a multiple of `num_key_value_heads` {g}");
            return Err(Error::model(path, message, ""));
        }
        if !self.head_dim.is_multiple_of(2) {
            let message = format!("the head size is {}: rotary embedding wants an even one", self.head_dim);
            return Err(Error::model(path, message, "set `head_dim`"));
        }
        Ok(())
    }

    /// Whether every token of the tokenizer has a row in the embedding.
    ///
    /// # Errors
    /// Where `tokenizer_size` (largest id + 1) is larger than `vocab_size`.
    pub fn check_vocab(&self, dir: &Path, tokenizer_size: usize) -> Result<()> {
        if tokenizer_size <= self.vocab_size {
            return Ok(());
        }
        let message = format!(
            "the tokenizer has {tokenizer_size} tokens, but `vocab_size` is {}: the embedding has no row for \
             the last {}",
            self.vocab_size,
            tokenizer_size - self.vocab_size
        );
        let hint = "use the tokenizer that belongs to this model (`tokenizer.name`), or a model with resized \
                    embeddings";
        Err(Error::model(dir.join("config.json"), message, hint))
    }

    /// Number of query, then key or value columns.
    pub fn attention_widths(&self) -> (usize, usize) {
        (self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim)
    }

    /// `1 / theta^(2i/d)` for each pair of a head, in f32 as Hugging Face computes it.
    pub fn inverse_frequencies(&self) -> Vec<f32> {
        let d = self.head_dim as f32;
        let power = |i: usize| self.rope_theta.powf(f64::from((2 * i) as f32 / d)) as f32;
        (0..self.head_dim / 2).map(|i| 1.0 / power(i)).collect()
    }
}

/// A JSON file that holds one object; `error` makes the error (model or adapter).
pub(crate) fn read_json_object(
    path: &Path,
    error: fn(PathBuf, String, String) -> Error,
) -> Result<Map<String, Value>> {
    let text = std::fs::read_to_string(path).map_err(|source| Error::io(path, "read", source))?;
    match serde_json::from_str(&text) {
        Ok(Value::Object(map)) => Ok(map),
        Ok(_) => Err(error(path.into(), "holds no JSON object".into(), String::new())),
        Err(cause) => {
            let hint = "the file may be cut: download it again".into();
            Err(error(path.into(), format!("is not valid JSON: {cause}"), hint))
        }
    }
}

impl Keys<'_> {
    fn error(&self, message: String, hint: &str) -> Error {
        Error::model(self.path, message, hint)
    }

    fn wrong(&self, key: &str, wanted: &str) -> Error {
        match self.map.get(key) {
            Some(found) => self.error(format!("`{key}` is {found}, wanted {wanted}"), ""),
            None => self.error(format!("`{key}` is missing, wanted {wanted}"), ""),
        }
    }

    /// The value of a key that is there and not null.
    fn get(&self, key: &str) -> Option<&Value> {
        self.map.get(key).filter(|value| !value.is_null())
    }

    fn optional_size(&self, key: &str) -> Result<Option<usize>> {
        let wanted = "a positive whole number";
        let Some(value) = self.get(key) else { return Ok(None) };
        let size = value.as_u64().filter(|&n| n > 0).ok_or_else(|| self.wrong(key, wanted))?;
        usize::try_from(size).map(Some).map_err(|_| self.wrong(key, wanted))
    }

    fn size(&self, key: &str) -> Result<usize> {
        self.optional_size(key)?.ok_or_else(|| self.wrong(key, "a positive whole number"))
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let number = value.as_f64().filter(|n| n.is_finite() && *n > 0.0);
        Ok(Some(number.ok_or_else(|| self.wrong(key, "a positive number"))?))
    }

    fn flag(&self, key: &str) -> Result<bool> {
        let Some(value) = self.get(key) else { return Ok(false) };
        value.as_bool().ok_or_else(|| self.wrong(key, "true or false"))
    }

    fn text(&self, key: &str) -> Result<Option<String>> {
        let Some(value) = self.get(key) else { return Ok(None) };
        let text = value.as_str().ok_or_else(|| self.wrong(key, "a string"))?;
        Ok(Some(text.to_string()))
    }

    fn model_type(&self) -> Result<String> {
        let model_type = self.text("model_type")?.ok_or_else(|| self.wrong("model_type", "a string"))?;
        if SUPPORTED.contains(&model_type.as_str()) {
            return Ok(model_type);
        }
        let message = format!("`model_type` `{model_type}` is not supported");
        Err(self.error(message, &format!("supported are {}", SUPPORTED.join(", "))))
    }

    fn refuse_what_is_not_computed(&self) -> Result<()> {
        if let Some(act) = self.text("hidden_act")?.filter(|act| act != "silu" && act != "swish") {
            return Err(self.error(format!("`hidden_act` `{act}` is not supported, wanted `silu`"), ""));
        }
        if let Some(found) = self.get("quantization_config") {
            let method = found.get("quant_method").and_then(Value::as_str).unwrap_or("unknown");
            let message =
                format!("`quantization_config`: weights quantised with `{method}` are not supported");
            return Err(self.error(message, "use the model's f32, f16 or bf16 weights"));
        }
        for key in ["rope_scaling", "rope_parameters"] {
            self.refuse_scaled_rope(key)?;
        }
        Ok(())
    }

    fn refuse_scaled_rope(&self, key: &str) -> Result<()> {
        let Some(value) = self.get(key) else { return Ok(()) };
        let map = value.as_object().ok_or_else(|| self.wrong(key, "an object or null"))?;
        let kind = map.get("rope_type").or(map.get("type"));
        let kind = match kind {
            None => "default",
            Some(kind) => kind.as_str().ok_or_else(|| self.wrong(key, "a `rope_type` that is a string"))?,
        };
        if kind != "default" {
            let message =
                format!("`{key}` asks for `{kind}` scaling of the positions, which is not supported");
            let hint = "positions would be wrong without it; where the model works without scaling up to its \
                        original length (yarn, dynamic), set the key to null in a copy of the folder and keep \
                        `seq_len` within that length";
            return Err(self.error(message, hint));
        }
        let factor = map.get("partial_rotary_factor").or(self.map.get("partial_rotary_factor"));
        if let Some(factor) = factor.and_then(Value::as_f64).filter(|&f| f != 1.0) {
            let message = format!("`partial_rotary_factor` {factor} is not supported, wanted 1");
            return Err(self.error(message, ""));
        }
        Ok(())
    }

    /// `rope_parameters.rope_theta` (transformers 5) or a top-level `rope_theta`.
    fn rope_theta(&self) -> Result<f64> {
        let inner = self.get("rope_parameters").and_then(Value::as_object);
        if let Some(inner) = inner.filter(|inner| inner.contains_key("rope_theta")) {
            let inner = Keys { path: self.path, map: inner };
            return inner.number("rope_theta")?.ok_or_else(|| inner.wrong("rope_theta", "a positive number"));
        }
        Ok(self.number("rope_theta")?.unwrap_or(10_000.0))
    }

    /// A window that is switched on and shorter than the longest document would change the mask.
    fn refuse_sliding_window(&self, config: &HfConfig) -> Result<()> {
        let window = self.optional_size("sliding_window")?;
        let layers = config.num_hidden_layers;
        let listed = match self.get("layer_types").and_then(Value::as_array) {
            Some(types) => types.iter().any(|t| t.as_str() == Some("sliding_attention")),
            None => self.get("max_window_layers").and_then(Value::as_u64).unwrap_or(0) < layers as u64,
        };
        let on = self.flag("use_sliding_window")? && listed;
        match window.filter(|&w| on && w < config.max_position_embeddings) {
            None => Ok(()),
            Some(window) => {
                let message = format!("`use_sliding_window` with `sliding_window` {window} is not supported");
                let hint = format!(
                    "if no document is longer than {window} tokens the window changes nothing: set \
                     `use_sliding_window` to false in a copy of the folder and keep `seq_len` within {window}"
                );
                Err(self.error(message, &hint))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn base() -> Map<String, Value> {
        let text = r#"{"model_type": "qwen3", "vocab_size": 300, "hidden_size": 48, "intermediate_size": 96,
            "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16,
            "max_position_embeddings": 64, "rms_norm_eps": 1e-3, "rope_theta": 1000000}"#;
        serde_json::from_str(text).unwrap()
    }

    fn parse(changes: &[(&str, Value)]) -> Result<HfConfig> {
        let mut map = base();
        for (key, value) in changes {
            map.insert(key.to_string(), value.clone());
        }
        HfConfig::from_json(&map, Path::new("config.json"))
    }

    fn message(changes: &[(&str, Value)]) -> String {
        parse(changes).unwrap_err().to_string()
    }

    #[test]
    fn integer_and_nested_rope_theta_are_the_same() {
        let nested = serde_json::json!({"rope_theta": 1000000.0, "rope_type": "default"});
        let plain = parse(&[]).unwrap();
        assert_eq!(plain.rope_theta, 1e6);
        assert_eq!(parse(&[("rope_theta", Value::Null), ("rope_parameters", nested)]).unwrap(), plain);
    }

    #[test]
    fn head_dim_follows_transformers_where_it_is_absent() {
        let absent = |model_type: &str| {
            let mut map = base();
            map.insert("model_type".into(), model_type.into());
            map.remove("head_dim");
            HfConfig::from_json(&map, Path::new("config.json")).unwrap().head_dim
        };
        assert_eq!((absent("llama"), absent("qwen2"), absent("qwen3")), (8, 8, 128));
    }

    #[test]
    fn sizes_beyond_any_model_are_refused_before_memory_is_asked_for() {
        let text = message(&[("num_hidden_layers", 99_999_999.into())]);
        assert!(text.contains("`num_hidden_layers` is 99999999"), "{text}");
    }

    #[test]
    fn scaled_positions_are_refused_by_name() {
        for (key, kind) in [("rope_scaling", "yarn"), ("rope_parameters", "llama3")] {
            let text = message(&[(key, serde_json::json!({"rope_type": kind, "factor": 4.0}))]);
            assert!(text.contains(key) && text.contains(kind), "{text}");
        }
        let old = message(&[("rope_scaling", serde_json::json!({"type": "linear", "factor": 2.0}))]);
        assert!(old.contains("linear"), "{old}");
        assert!(parse(&[("rope_scaling", serde_json::json!({"rope_type": "default"}))]).is_ok());
    }

    #[test]
    fn a_sliding_window_is_refused_only_where_it_would_apply() {
        let window = ("sliding_window", Value::from(8));
        let on = ("use_sliding_window", Value::from(true));
        assert!(parse(std::slice::from_ref(&window)).is_ok());
        assert!(parse(std::slice::from_ref(&on)).is_ok());
        assert!(parse(&[window.clone(), on.clone(), ("max_window_layers", Value::from(2))]).is_ok());
        assert!(message(&[window, on]).contains("sliding_window"));
    }

    #[test]
    fn what_is_not_computed_is_refused() {
        assert!(message(&[("hidden_act", "gelu".into())]).contains("gelu"));
        let quantised = serde_json::json!({"quant_method": "awq"});
        assert!(message(&[("quantization_config", quantised)]).contains("awq"));
        assert!(message(&[("model_type", "mamba".into())]).contains("mamba"));
        assert!(message(&[("hidden_size", "wide".into())]).contains("hidden_size"));
        assert!(message(&[("num_key_value_heads", 4.into())]).contains("multiple"));
    }

    #[test]
    fn biases_follow_the_architecture() {
        let qwen2 = parse(&[("model_type", "qwen2".into())]).unwrap();
        assert_eq!((qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm), (true, false, false));
        let llama = [("model_type", "llama".into()), ("attention_bias", true.into())];
        let llama = parse(&llama).unwrap();
        assert_eq!((llama.qkv_bias, llama.o_bias, llama.mlp_bias), (true, true, false));
    }
}
