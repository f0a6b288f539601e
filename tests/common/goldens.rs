//! Golden cases (values of transformers and PEFT): reading them, and running the model's cases on
//! a device. The folder is `EMBERTUNE_GOLDENS`, else the copy in the project.
#![allow(dead_code)] // each test program uses a part

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use burn::tensor::{DType, Device, Tensor};
use embertune::data::Batch;
use embertune::export;
use embertune::model::{Decoder, HfConfig};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

pub fn root() -> PathBuf {
    match std::env::var_os("EMBERTUNE_GOLDENS") {
        Some(dir) => dir.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens"),
    }
}

pub fn json(path: &Path) -> Value {
    let text = std::fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// `|got − want| ≤ atol + rtol·|want|`, both taken `factor` times.
#[derive(Debug, Clone, Copy)]
pub struct Tolerance {
    atol: f64,
    rtol: f64,
    /// atol as a share of the largest wanted value of the tensor.
    atol_of_max: f64,
}

impl Tolerance {
    /// The entry of `tolerances.json`, widened by `factor`.
    pub fn of(what: &str, factor: f64) -> Self {
        let all = json(&root().join("tolerances.json"));
        let number = |key: &str| all[what][key].as_f64().unwrap_or(0.0) * factor;
        let found = Tolerance {
            atol: number("atol"),
            rtol: number("rtol"),
            atol_of_max: number("atol_relative_to_max"),
        };
        assert!(found.rtol > 0.0, "tolerances.json has no `{what}`");
        found
    }

    pub fn check(&self, what: &str, got: &[f32], want: &[f32]) {
        assert_eq!(got.len(), want.len(), "{what}: number of values");
        let largest = want.iter().fold(0.0, |m: f64, w| m.max(f64::from(w.abs())));
        let atol = self.atol + self.atol_of_max * largest;
        for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
            let (got, want) = (f64::from(got), f64::from(want));
            let limit = atol + self.rtol * want.abs();
            let off = (got - want).abs();
            assert!(off <= limit, "{what}[{i}]: got {got}, want {want}, off by {off:e}, allowed {limit:e}");
        }
    }
}

/// A tensor of a golden file, in f32.
#[derive(Debug, Clone, PartialEq)]
pub struct Stored {
    pub shape: Vec<usize>,
    pub dtype: Dtype,
    pub values: Vec<f32>,
}

pub fn tensors(path: &Path) -> BTreeMap<String, Stored> {
    let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let file = SafeTensors::deserialize(&bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    file.iter()
        .map(|(name, view)| {
            let data = view.data();
            let values = match view.dtype() {
                Dtype::F32 => {
                    data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
                }
                Dtype::BF16 => {
                    let word = |b: &[u8]| u32::from(u16::from_le_bytes(b.try_into().unwrap())) << 16;
                    data.chunks_exact(2).map(|b| f32::from_bits(word(b))).collect()
                }
                _ => Vec::new(), // ids: the cases repeat them in JSON
            };
            (name.to_string(), Stored { shape: view.shape().to_vec(), dtype: view.dtype(), values })
        })
        .collect()
}

pub struct Case {
    pub name: String,
    pub dir: PathBuf,
    pub json: Value,
}

impl Case {
    /// All cases of a kind (`model`, `packed`, `lora`), by name.
    pub fn all(kind: &str) -> Vec<Case> {
        let folder = root().join(kind);
        let entries = std::fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
        let mut cases: Vec<Case> = entries
            .map(|entry| entry.unwrap().path())
            .filter(|dir| dir.join("case.json").exists())
            .map(|dir| Case {
                name: format!("{kind}/{}", dir.file_name().unwrap().to_string_lossy()),
                json: json(&dir.join("case.json")),
                dir,
            })
            .collect();
        assert!(!cases.is_empty(), "{} holds no case", folder.display());
        cases.sort_by(|a, b| a.name.cmp(&b.name));
        cases
    }

    /// The case's base model: its own folder, or the one that it names.
    pub fn base(&self) -> PathBuf {
        match self.json["model"].as_str() {
            Some(model) => root().join(model),
            None => self.dir.clone(),
        }
    }

    /// The case's adapter, if it has one.
    pub fn adapter(&self) -> Option<PathBuf> {
        match self.json["adapter"].as_str() {
            Some(adapter) => Some(root().join(adapter)),
            None => self.dir.join("adapter_config.json").exists().then(|| self.dir.clone()),
        }
    }

    pub fn decoder(&self, device: &Device) -> Decoder {
        self.decoder_in(DType::F32, device)
    }

    pub fn decoder_in(&self, dtype: DType, device: &Device) -> Decoder {
        let mut decoder = Decoder::load(&self.base(), dtype, device, &mut |_, _| {})
            .unwrap_or_else(|e| panic!("{}: {e}", self.name));
        if let Some(adapter) = self.adapter() {
            export::load_adapter(&mut decoder, 0, &adapter).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        }
        decoder
    }

    /// One batch of all rows, and which of its tokens are no padding.
    pub fn batch(&self) -> (Batch, Vec<bool>) {
        match self.json["documents"].as_array() {
            Some(_) => self.packed_batch(),
            None => self.rows_batch(),
        }
    }

    /// Rows that are one document each, padded on the right: the padding is one more document.
    fn rows_batch(&self) -> (Batch, Vec<bool>) {
        let (mut batch, mut real) = (start(), Vec::new());
        let rows = |key: &str| self.json[key].as_array().unwrap().clone();
        let all = rows("input_ids").into_iter().zip(rows("targets")).zip(rows("attention_mask"));
        for ((ids, targets), mask) in all {
            let (ids, targets, mask) = (numbers(&ids), numbers(&targets), numbers(&mask));
            let length = mask.iter().filter(|&&m| m == 1).count();
            push(&mut batch, &ids[..length], &targets[..length]);
            push(&mut batch, &ids[length..], &targets[length..]);
            real.extend(mask.iter().map(|&m| m == 1));
        }
        (finish(batch), real)
    }

    fn packed_batch(&self) -> (Batch, Vec<bool>) {
        let (mut batch, mut real) = (start(), Vec::new());
        let rows = self.json["rows"].as_array().unwrap();
        for (row, documents) in rows.iter().zip(self.json["documents"].as_array().unwrap()) {
            let (ids, targets) = (numbers(&row["input_ids"]), numbers(&row["targets"]));
            let bounds = numbers(&row["cu_seqlens"]);
            for (bound, document) in bounds.windows(2).zip(documents.as_array().unwrap()) {
                let range = bound[0] as usize..bound[1] as usize;
                real.extend(range.clone().map(|_| document["is_padding"] == false));
                push(&mut batch, &ids[range.clone()], &targets[range]);
            }
            let positions = numbers(&row["position_ids"]);
            let got = &batch.position_ids[batch.position_ids.len() - positions.len()..];
            assert_eq!(got.iter().map(|&p| i64::from(p)).collect::<Vec<_>>(), positions, "{}", self.name);
        }
        (finish(batch), real)
    }

    /// Logits and losses, and gradients where the case has them, within the tolerances.
    pub fn check_values(&self, device: &Device, factor: f64) {
        let decoder = self.decoder(device);
        let (batch, real) = self.batch();
        let inputs = decoder.inputs(&batch, None).unwrap_or_else(|e| panic!("{}: {e}", self.name));
        let want = self.expected();
        let vocab = decoder.config().vocab_size;
        let kept: Vec<usize> = (0..real.len()).filter(|&t| real[t]).collect();
        let pick = |values: &[f32], width: usize| -> Vec<f32> {
            kept.iter().flat_map(|&t| values[t * width..(t + 1) * width].to_vec()).collect()
        };

        let logits = floats(decoder.logits(&inputs).inner());
        let logits = (pick(&logits, vocab), pick(&want["logits"].values, vocab));
        Tolerance::of("logits", factor).check(&format!("{} logits", self.name), &logits.0, &logits.1);

        let losses = self.token_losses(&decoder, &batch);
        let losses = (pick(&losses, 1), pick(&want["token_loss"].values, 1));
        Tolerance::of("token_loss", factor).check(&format!("{} token_loss", self.name), &losses.0, &losses.1);

        let loss = decoder.loss_sum(&inputs);
        let n = batch.trained_tokens();
        assert_eq!(n as u64, self.json["n_target_tokens"].as_u64().unwrap(), "{} targets", self.name);
        let mean = floats(loss.clone().inner())[0] / n as f32;
        let want = self.json["loss_mean"].as_f64().unwrap() as f32;
        Tolerance::of("loss", factor).check(&format!("{} loss", self.name), &[mean], &[want]);

        let gradients = self.dir.join("grads.safetensors");
        if gradients.exists() {
            self.check_gradients(&decoder, loss, n, &tensors(&gradients), factor);
        }
    }

    /// Expected values as one flat batch: a packed case stores them per row (`row_0.logits`, …) or
    /// whole.
    fn expected(&self) -> BTreeMap<String, Stored> {
        tensors(&self.dir.join("expected.safetensors"))
    }

    /// Each trained token's loss by itself, through the same head as the sum.
    fn token_losses(&self, decoder: &Decoder, batch: &Batch) -> Vec<f32> {
        let whole = decoder.inputs(batch, None).unwrap();
        let hidden =
            (0..decoder.num_layers()).fold(decoder.embed(&whole), |x, i| decoder.layer(i, x, &whole));
        let mut losses = vec![0.0; batch.tokens()];
        for t in (0..batch.tokens()).filter(|&t| batch.loss_mask[t]) {
            let loss_mask = (0..batch.tokens()).map(|other| other == t).collect();
            let one = decoder.inputs(&Batch { loss_mask, ..batch.clone() }, None).unwrap();
            losses[t] = floats(decoder.head_loss(hidden.clone(), &one).inner())[0];
        }
        losses
    }

    /// The gradient of the mean loss by PEFT's names.
    pub fn gradients(&self, decoder: &Decoder, loss: Tensor<1>, n: usize) -> BTreeMap<String, Vec<f32>> {
        let mut gradients = loss.backward();
        let trainable = decoder.trainable();
        let taken = decoder.take_grads(&mut gradients);
        let named = trainable.iter().zip(taken);
        named
            .map(|(trainable, grad)| {
                let grad = grad.unwrap_or_else(|| panic!("{}: no gradient of {}", self.name, trainable.name));
                (peft_name(&trainable.name), floats(grad).iter().map(|g| g / n as f32).collect())
            })
            .collect()
    }

    fn check_gradients(
        &self,
        decoder: &Decoder,
        loss: Tensor<1>,
        n: usize,
        want: &BTreeMap<String, Stored>,
        factor: f64,
    ) {
        let got = self.gradients(decoder, loss, n);
        let keys = (got.keys().collect::<Vec<_>>(), want.keys().collect::<Vec<_>>());
        assert_eq!(keys.0, keys.1, "{} gradients", self.name);
        for (name, want) in want {
            Tolerance::of("grads", factor).check(
                &format!("{} grad {name}", self.name),
                &got[name],
                &want.values,
            );
        }
    }
}

/// `….q_proj.adapters.0.lora_a` → `base_model.model.….q_proj.lora_A.weight`
pub fn peft_name(path: &str) -> String {
    let path =
        path.replace(".adapters.0.lora_a", ".lora_A.weight").replace(".adapters.0.lora_b", ".lora_B.weight");
    format!("base_model.model.{path}")
}

pub fn floats<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.cast(DType::F32).into_data().as_slice::<f32>().unwrap().to_vec()
}

pub fn numbers(value: &Value) -> Vec<i64> {
    value.as_array().unwrap().iter().map(|n| n.as_i64().unwrap()).collect()
}

fn start() -> Batch {
    Batch { cu_seqlens: vec![0], ..Batch::default() }
}

/// Adds one document.
fn push(batch: &mut Batch, ids: &[i64], targets: &[i64]) {
    if ids.is_empty() {
        return;
    }
    batch.input_ids.extend(ids.iter().map(|&id| id as u32));
    batch.position_ids.extend(0..ids.len() as u32);
    batch.targets.extend(targets.iter().map(|&t| t.max(0) as u32));
    batch.loss_mask.extend(targets.iter().map(|&t| t >= 0));
    batch.cu_seqlens.push(batch.input_ids.len() as u32);
}

fn finish(mut batch: Batch) -> Batch {
    batch.run_tokens = vec![batch.tokens()];
    batch.streams = vec![Default::default()];
    batch
}

/// Both spellings of a model's config mean the same.
pub fn check_config(case: &Case) {
    let alternative = case.dir.join("config.alt.json");
    if !alternative.exists() {
        return;
    }
    let Value::Object(map) = json(&alternative) else { panic!("{}", alternative.display()) };
    let (alternative, plain) = (HfConfig::from_json(&map, &alternative), HfConfig::load(&case.dir));
    assert_eq!(alternative.unwrap(), plain.unwrap(), "{}", case.name);
}
