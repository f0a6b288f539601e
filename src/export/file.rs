//! Writing folders and safetensors files: tensor by tensor, whole or not at all.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use half::{bf16, f16};
use rayon::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use crate::error::{Error, Result};

/// A tensor to be written; its bytes are asked for when the writer reaches it.
pub(super) struct Outgoing<'a> {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Box<dyn Fn() -> Result<Vec<u8>> + 'a>,
}

impl Outgoing<'_> {
    /// Number of bytes in the file.
    pub fn len(&self) -> usize {
        self.shape.iter().product::<usize>() * self.dtype.bitsize() / 8
    }
}

/// Writes a safetensors file with PyTorch's metadata; the file appears when it is whole and on disk.
///
/// # Errors
/// Where a tensor's bytes cannot be had or the file cannot be written.
pub(super) fn write_tensors(path: &Path, mut tensors: Vec<Outgoing>) -> Result<()> {
    // The order of the reference implementation: wide dtypes first, so that all are aligned.
    tensors.sort_by(|x, y| y.dtype.cmp(&x.dtype).then_with(|| x.name.cmp(&y.name)));
    let mut infos = Vec::new();
    let mut offset = 0;
    for tensor in &tensors {
        let data_offsets = (offset, offset + tensor.len());
        offset = data_offsets.1;
        let info = TensorInfo { dtype: tensor.dtype, shape: tensor.shape.clone(), data_offsets };
        infos.push((tensor.name.clone(), info));
    }
    let bad = |cause: String| Error::io(path, "write", std::io::Error::other(cause));
    let metadata = [("format".to_string(), "pt".to_string())].into();
    let metadata = Metadata::new(Some(metadata), infos).map_err(|e| bad(e.to_string()))?;
    let mut header = serde_json::to_vec(&metadata).map_err(|e| bad(e.to_string()))?;
    header.resize(header.len().next_multiple_of(8), b' ');
    write_whole(path, |file| {
        let failed = |source| Error::io(path, "write", source);
        file.write_all(&(header.len() as u64).to_le_bytes()).map_err(failed)?;
        file.write_all(&header).map_err(failed)?;
        for tensor in &tensors {
            let bytes = (tensor.bytes)()?;
            assert_eq!(bytes.len(), tensor.len(), "bytes of {}", tensor.name);
            file.write_all(&bytes).map_err(failed)?;
        }
        Ok(())
    })
}

/// Writes text; the file appears when it is whole and on disk.
pub(super) fn write_text(path: &Path, text: &str) -> Result<()> {
    let failed = |source| Error::io(path, "write", source);
    write_whole(path, |file| file.write_all(text.as_bytes()).map_err(failed))
}

fn write_whole(path: &Path, fill: impl FnOnce(&mut BufWriter<File>) -> Result<()>) -> Result<()> {
    let failed = |source| Error::io(path, "write", source);
    let temporary = sibling(path);
    let write = || {
        let mut file = BufWriter::with_capacity(1 << 20, File::create(&temporary).map_err(failed)?);
        fill(&mut file)?;
        let file = file.into_inner().map_err(|e| failed(e.into_error()))?;
        file.sync_all().map_err(failed)?;
        fs::rename(&temporary, path).map_err(failed)
    };
    write().inspect_err(|_| {
        // What is left of a failed write is of no use; if it can't be removed, the error says enough.
        let _ = fs::remove_file(&temporary);
    })
}

/// `dir/.NAME.PID.tmp` beside `dir/NAME`.
fn sibling(path: &Path) -> PathBuf {
    let name = path.file_name().map(|name| name.to_string_lossy()).unwrap_or_default();
    path.with_file_name(format!(".{name}.{}.tmp", std::process::id()))
}

/// Fills a new folder beside `out` and renames it: `out` is whole or not there.
///
/// A folder that is there already and empty is filled in place (a caller that makes its own
/// temporary folder).
///
/// # Errors
/// Where `out` holds something, or what `fill` says.
pub(super) fn in_new_folder<T>(out: &Path, fill: impl FnOnce(&Path) -> Result<T>) -> Result<T> {
    if out.exists() {
        let mut entries = fs::read_dir(out).map_err(|source| Error::io(out, "read", source))?;
        if entries.next().is_some() {
            let hint = "name a folder that isn't there yet, or remove this one";
            return Err(Error::model(out, "exists and is not empty: nothing is overwritten", hint));
        }
        return fill(out);
    }
    let temporary = sibling(out);
    let failed = |source| Error::io(&temporary, "create", source);
    fs::create_dir_all(&temporary).map_err(failed)?;
    let filled = fill(&temporary).and_then(|filled| {
        fs::rename(&temporary, out).map_err(|source| Error::io(out, "create", source))?;
        Ok(filled)
    });
    filled.inspect_err(|_| {
        let _ = fs::remove_dir_all(&temporary); // as above
    })
}

/// Values as they lie in a file; `None` where one doesn't fit the dtype or the dtype is no float
/// that is written here.
pub(super) fn encode(values: &[f32], dtype: Dtype) -> Option<Vec<u8>> {
    let fits = |limit: f32| values.iter().fold(true, |all, value| all & (value.abs() <= limit));
    match dtype {
        Dtype::F32 => Some(bytes_of(values, f32::to_le_bytes)),
        Dtype::BF16 => {
            fits(bf16::MAX.to_f32()).then(|| bytes_of(values, |v| bf16::from_f32(v).to_le_bytes()))
        }
        Dtype::F16 => fits(f16::MAX.to_f32()).then(|| bytes_of(values, |v| f16::from_f32(v).to_le_bytes())),
        _ => None,
    }
}

fn bytes_of<const N: usize>(values: &[f32], bytes: impl Fn(f32) -> [u8; N] + Sync) -> Vec<u8> {
    /// Values of one task.
    const CHUNK: usize = 1 << 16;
    let mut all = vec![0; N * values.len()];
    let chunks = all.par_chunks_mut(N * CHUNK).zip(values.par_chunks(CHUNK));
    chunks.for_each(|(to, from)| {
        to.as_chunks_mut().0.iter_mut().zip(from).for_each(|(to, &value)| *to = bytes(value));
    });
    all
}
