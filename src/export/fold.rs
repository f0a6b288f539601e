//! An adapter that every server computes alike: its scaling folded into B.
//!
//! PEFT scales module m by `s_m` (α/r or α/√r, by its own α and r); some servers know only one α/r for all. So each B is
//! multiplied by `s_m`, and A and B are filled up with zeros to the largest rank: then `lora_alpha = r` is a scale of 1
//! wherever it is read from, and no pattern is left to be ignored.

use std::fs;
use std::path::Path;

use safetensors::Dtype;
use serde_json::{Value, json};

use super::adapter_config::AdapterConfig;
use super::card::CARD;
use super::file::{Outgoing, encode, in_new_folder, write_tensors, write_text};
use super::peft::{PREFIX, WEIGHTS};
use crate::error::{Error, Result};
use crate::model::{AdaptedModule, Checkpoint, Modules, read_json_object, resolve};

/// Writes the adapter with its scaling folded in as a new folder `out`; returns the rank of all its modules.
///
/// # Errors
/// An adapter that isn't plain LoRA or isn't whole, or `out` holds something already.
pub fn fold_scaling(adapter: &Path, out: &Path) -> Result<usize> {
    let config = AdapterConfig::load(adapter)?;
    let path = adapter.join(WEIGHTS);
    let file = Checkpoint::open_file(&path, Error::adapter)?;
    let name_of = |module: &str, letter| format!("{PREFIX}{module}.lora_{letter}.weight");
    let adapted = file.entries.keys().filter_map(|name| {
        Some(format!("{}.weight", name.strip_prefix(PREFIX)?.strip_suffix(".lora_A.weight")?))
    });
    let adapted: Vec<String> = adapted.collect();
    let modules = Modules::from_parameters(adapted.iter().map(String::as_str));
    let resolved = resolve(&config.spec, &modules)
        .map_err(|problems| super::peft::unfit(&adapter.join("adapter_config.json"), problems))?;
    if 2 * resolved.modules.len() != file.entries.len() {
        let message = format!(
            "holds {} tensors, not A and B of {} modules alone",
            file.entries.len(),
            resolved.modules.len()
        );
        return Err(Error::adapter(&path, message, "only plain LoRA on linear layers can be folded"));
    }
    let rank = resolved.modules.iter().map(|module| module.rank).max().unwrap_or(config.spec.rank);

    let mut tensors = Vec::new();
    for module in &resolved.modules {
        for letter in ["A", "B"] {
            let name = name_of(&module.name, letter);
            let entry = file.entries.get(&name).ok_or_else(|| {
                Error::adapter(&path, format!("`{name}` is missing"), "save the adapter again")
            })?;
            let (values, shape) = (file.values(&name, entry)?, entry.shape.clone());
            let (values, shape) = folded(&values, &shape, module, rank, letter == "A").ok_or_else(|| {
                let message = format!("`{name}` has shape {shape:?}, its rank is {}", module.rank);
                Error::adapter(&path, message, "`adapter_config.json` and the tensors must belong together")
            })?;
            let bytes = Box::new(move || Ok(encode(&values, Dtype::F32).expect("any f32 is an f32")));
            tensors.push(Outgoing { name, dtype: Dtype::F32, shape, bytes });
        }
    }
    let mut map = read_json_object(&adapter.join("adapter_config.json"), Error::adapter)?;
    let names: Vec<&String> = resolved.modules.iter().map(|module| &module.name).collect();
    if config.spec.exclude_modules.is_some() || map["target_modules"].is_string() {
        map.insert("target_modules".into(), json!(names));
        map.insert("exclude_modules".into(), Value::Null);
    }
    for (key, value) in [
        ("r", json!(rank)),
        ("lora_alpha", json!(rank)),
        ("use_rslora", json!(false)),
        ("rank_pattern", json!({})),
        ("alpha_pattern", json!({})),
    ] {
        map.insert(key.into(), value);
    }
    let text = serde_json::to_string_pretty(&map).expect("JSON values can be written");
    in_new_folder(out, |out| {
        write_tensors(&out.join(WEIGHTS), tensors)?;
        write_text(&out.join("adapter_config.json"), &text)?;
        // What was trained is the same.
        match fs::read_to_string(adapter.join(CARD)) {
            Ok(card) => write_text(&out.join(CARD), &card),
            Err(_) => Ok(()),
        }
    })?;
    Ok(rank)
}

/// A `[r, in]` with rows of zeros below, or s·B `[out, r]` with columns of zeros behind; `None` for another shape.
fn folded(
    values: &[f32],
    shape: &[usize],
    module: &AdaptedModule,
    rank: usize,
    is_a: bool,
) -> Option<(Vec<f32>, Vec<usize>)> {
    let &[rows, columns] = shape else { return None };
    if is_a {
        let mut wide = values.to_vec();
        wide.resize(rank * columns, 0.0);
        return (rows == module.rank).then_some((wide, vec![rank, columns]));
    }
    let mut wide = vec![0.0; rows * rank];
    for (to, from) in wide.chunks_mut(rank).zip(values.chunks(columns)) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = module.scale * from);
    }
    (columns == module.rank).then_some((wide, vec![rows, rank]))
}
