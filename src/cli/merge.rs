//! `embertune merge`: base and adapter as one Hugging Face model.

use std::path::Path;

use burn::tensor::DType;
use tracing::Level;

use super::print_after;
use crate::checkpoint::find_adapter;
use crate::report::LineFormat;
use crate::report::log;
use crate::{Error, Result, export, hub};

pub(super) fn merge(base: &str, adapter: &Path, out: &Path, dtype: Option<&str>) -> Result<()> {
    log::init(Level::INFO, LineFormat::Text, None);
    let taken = std::fs::read_dir(out).map(|mut entries| entries.next().is_some()).unwrap_or(out.exists());
    if taken {
        let hint = "name another folder with `--out`, or delete this one";
        return Err(Error::model(out, "`--out` is there already, and nothing is overwritten", hint));
    }
    let found = find_adapter(adapter)?;
    if found != adapter {
        print_after(&format!("Adapter: {}", found.display()));
    }
    let base = hub::model_dir(base).map_err(about_base)?;
    let dtype = dtype.map(|name| match name {
        "float32" => DType::F32,
        "float16" => DType::F16,
        _ => DType::BF16,
    });
    let report = export::merge_as(&base, &found, out, dtype)?;
    for warning in &report.warnings {
        tracing::warn!("{warning}");
    }
    let (change, name) = &report.largest_change;
    print_after(&format!(
        "Merged: {}\n{} weights changed, by {change:.3e} at most (in `{name}`); rounding to the base's type \
         costs {:.3e} at most",
        out.display(),
        report.changed,
        report.largest_rounding
    ));
    Ok(())
}

/// The base of a merge is named by a flag, not by a key.
fn about_base(error: Error) -> Error {
    let named = |message: String| message.replace("`model.name`", "`--base`");
    match error {
        Error::Hub { message, hint } => Error::Hub { message: named(message), hint },
        Error::Model { path, message, hint } => Error::Model { path, message: named(message), hint },
        other => other,
    }
}
