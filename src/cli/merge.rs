//! `embertune merge`: base and adapter as one Hugging Face model.

use std::path::Path;

use burn::tensor::DType;
use tracing::Level;

use super::{folders, print_after};
use crate::report::LineFormat;
use crate::report::log;
use crate::{Error, Result, export};

pub(super) fn merge(base: &str, adapter: &Path, out: &Path, dtype: Option<&str>) -> Result<()> {
    log::init(Level::INFO, LineFormat::Text, None);
    let taken = std::fs::read_dir(out).map(|mut entries| entries.next().is_some()).unwrap_or(out.exists());
    if taken {
        let hint = "name another folder with `--out`, or delete this one";
        return Err(Error::model(out, "`--out` is there already, and nothing is overwritten", hint));
    }
    let found = folders::adapter_dir(adapter)?;
    if found != adapter {
        print_after(&format!("Adapter: {}", found.display()));
    }
    let base = folders::model_dir(base, "--base")?;
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
