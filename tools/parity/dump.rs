//! Writes what `tools/parity/*.py` compare: the batches and the initial adapter of a run, or logits.
//!
//! usage: dump batches STEPS OUT_DIR @ run.toml [--section.key value]...
//!            → OUT_DIR/batches.jsonl (a line a micro-batch), OUT_DIR/adapter (before the first step)
//!        dump logits MODEL ADAPTER ROWS OUT.safetensors @ run.toml [--section.key value]...
//!            → `input_ids` and `logits` of the run's first documents, with the trained adapter

use std::collections::HashMap;
use std::error::Error;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::{DType, Device};
use embertune::config::{self, DataConfig, SftConfig};
use embertune::data::{Batch, ChatTokenizer, Loader};
use embertune::export::{AdapterMeta, load_adapter, save_adapter};
use embertune::hub;
use embertune::model::{Decoder, LoraSpec};
use safetensors::tensor::{Dtype, TensorView};
use serde_json::json;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let at = args.iter().position(|a| a == "@").ok_or("no `@ run.toml`")?;
    let config = config::load(&args[at..])?.config;
    match args[..at].iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["batches", steps, out] => batches(&config, steps.parse()?, Path::new(out)),
        ["logits", model, adapter, rows, out] => {
            logits(&config, Path::new(model), Path::new(adapter), rows.parse()?, Path::new(out))
        }
        _ => Err("see the usage at the top of tools/parity/dump.rs".into()),
    }
}

/// The model as the run has it before its first step, and the run's data.
fn setup(config: &SftConfig) -> Result<(Decoder, Loader)> {
    let folder = hub::model_dir(&config.model.name)?;
    let mut model = Decoder::load(&folder, DType::F32, &Device::flex(), &mut |_, _| {})?;
    let lora = config.model.lora.as_ref().ok_or("the run has no `[model.lora]`")?;
    model.attach_lora(&[LoraSpec::from_config(lora)], config.seed)?;
    let DataConfig::Sft(data) = &config.data else { return Err("the run has no real data".into()) };
    let tokenizer = Arc::new(ChatTokenizer::load(&folder, &config.tokenizer)?);
    let (vocabulary, longest) = (model.config().vocab_size, model.config().max_position_embeddings);
    let loader = Loader::new(data, tokenizer, 0, config.num_epochs, vocabulary, longest)?;
    Ok((model, loader))
}

fn batches(config: &SftConfig, steps: usize, out: &Path) -> Result<()> {
    let (model, mut loader) = setup(config)?;
    fs::create_dir_all(out)?;
    save_adapter(&model, 0, &out.join("adapter"), &AdapterMeta::default())?;
    let mut file = fs::File::create(out.join("batches.jsonl"))?;
    for step in 1..=steps {
        for (micro, batch) in loader.next_step()?.ok_or("the data ended early")?.iter().enumerate() {
            let Batch { input_ids, position_ids, targets, loss_mask, cu_seqlens, .. } = batch;
            let line = json!({
                "step": step, "micro": micro, "input_ids": input_ids, "position_ids": position_ids,
                "targets": targets, "loss_mask": loss_mask, "cu_seqlens": cu_seqlens,
            });
            writeln!(file, "{line}")?;
        }
    }
    Ok(())
}

fn logits(config: &SftConfig, model: &Path, adapter: &Path, rows: usize, out: &Path) -> Result<()> {
    let (mut decoder, mut loader) = setup(&SftConfig {
        model: config::ModelConfig { name: model.display().to_string(), ..config.model.clone() },
        ..config.clone()
    })?;
    load_adapter(&mut decoder, 0, adapter)?;
    let batches = loader.next_step()?.ok_or("no data")?;
    let length = config.data.seq_len() / 2;
    let (mut ids, mut values) = (Vec::new(), Vec::new());
    for batch in batches.iter().take(rows) {
        // The head of a row as one document of its own.
        let n = length as u32;
        let head = Batch {
            input_ids: batch.input_ids[..length].to_vec(),
            position_ids: (0..n).collect(),
            targets: vec![0; length],
            loss_mask: vec![false; length],
            cu_seqlens: vec![0, n],
            run_tokens: vec![length],
            streams: vec![Default::default()],
        };
        let logits = decoder.logits(&decoder.inputs(&head, None)?).inner();
        ids.extend(head.input_ids.iter().flat_map(|&id| i64::from(id).to_le_bytes()));
        values.extend(logits.into_data().iter::<f32>().flat_map(f32::to_le_bytes));
    }
    let (rows, vocabulary) = (ids.len() / 8 / length, decoder.config().vocab_size);
    let tensors = [
        ("input_ids", TensorView::new(Dtype::I64, vec![rows, length], &ids)?),
        ("logits", TensorView::new(Dtype::F32, vec![rows, length, vocabulary], &values)?),
    ];
    Ok(safetensors::serialize_to_file(tensors, None::<HashMap<String, String>>, out)?)
}
