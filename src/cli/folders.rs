//! Folders that are named on the command line: what they hold is looked at first, so that an error can say what was meant.

use std::path::{Path, PathBuf};

use crate::checkpoint::{find_adapter, find_export};
use crate::config::nearest_sibling;
use crate::export::AdapterConfig;
use crate::{Error, Result, hub};

/// What an adapter's folder is known by.
const ADAPTER: &str = "adapter_config.json";

/// The adapter that `named` is, or that the run in it has.
///
/// # Errors
/// There is none.
pub(super) fn adapter_dir(named: &Path) -> Result<PathBuf> {
    const WANTED: &str = "wanted the folder of a PEFT adapter (`adapter_config.json`, `adapter_model.safetensors`), or \
                          the output folder of a run";
    if !named.is_dir() {
        let is = if named.exists() { "this is a file" } else { "there is no such folder" };
        let near = nearest_sibling(named).map(|near| format!("did you mean `{}`? ", near.display()));
        return Err(Error::adapter(named, is, near.unwrap_or_default() + WANTED));
    }
    let found = find_adapter(named)?;
    if found.join(ADAPTER).exists() {
        return Ok(found);
    }
    let model = if named.join("config.json").exists() { ": this is a model" } else { "" };
    Err(Error::adapter(named, format!("there is no `{ADAPTER}` here{model}"), WANTED))
}

/// The folder of the model that `flag` names.
///
/// # Errors
/// There is none; it is an adapter, or a run.
pub(super) fn model_dir(name: &str, flag: &str) -> Result<PathBuf> {
    let dir = hub::model_dir(name).map_err(|error| about_flag(error, flag))?;
    if dir.join("config.json").exists() {
        return Ok(dir);
    }
    let found = find_export(&dir)?;
    let given = dir.display();
    if found.join(ADAPTER).exists() {
        let is = if found == dir { "an adapter" } else { "the folder of a run that trained an adapter" };
        let base = AdapterConfig::load(&found).ok().and_then(|config| config.base_model_name_or_path);
        let base = base.unwrap_or("BASE".into());
        let adapter = if flag == "--model" { format!(" --adapter {given}") } else { String::new() };
        let hint = format!("name the adapter's base there: `{flag} {base}{adapter}`");
        return Err(Error::model(&dir, format!("`{flag}`: this is {is}, wanted a model"), hint));
    }
    let message = format!("`{flag}`: there is no `config.json` here");
    let hint = match found == dir {
        true => "wanted a model's folder (`config.json`, `model.safetensors`, `tokenizer.json`), or its name on the hub".into(),
        false => format!("this is the folder of a run, whose model is `{flag} {}`", found.display()),
    };
    Err(Error::model(&dir, message, hint))
}

/// The model is named by a flag here, not by a key.
fn about_flag(error: Error, flag: &str) -> Error {
    let named = |message: String| message.replace("`model.name`", &format!("`{flag}`"));
    match error {
        Error::Hub { message, hint } => Error::Hub { message: named(message), hint },
        Error::Model { path, message, hint } => Error::Model { path, message: named(message), hint },
        other => other,
    }
}
