//! What a step is measured by: FLOPs, memory, and the file of rows.
//!
//! # FLOPs of a step
//! A product of `[m, k]` and `[k, n]` counts 2mkn. With L layers, h query heads of size d, a
//! linear layer of `p` weights, l the length of a document, t tokens and c trained tokens:
//!
//! * linear layers: 2·p·t forward, the same for the gradient of the input, and once more for the
//!   gradient of the weight where it is trained;
//! * head (p = vocabulary × hidden): the same with c in the place of t, since rows without a
//!   target never reach it;
//! * adapters: 6 × their weights × t;
//! * attention, causal and inside documents: `2·L·h·d·Σ l(l + 1)` forward (two products of h·d per
//!   pair of positions, l(l + 1)/2 pairs), twice that backward. `d` is the model's `head_dim`,
//!   not hidden/heads.
//!
//! Recomputed activations, norms, softmax and the optimizer don't count. MFU = FLOPs / seconds /
//! peak; the peak is the vendor's dense bf16 figure and known only for the cards of [`PEAKS`].

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::checkpoint::folder;
use crate::data::Batch;
use crate::{Error, Result};

/// Dense bf16 tensor-core peaks, FLOP/s, by a part of the device's name; the first that matches
/// counts. From NVIDIA's data sheets; the same figures as prime-rl's.
pub const PEAKS: [(&str, f64); 7] = [
    ("H100 PCIe", 756e12),
    ("H100 NVL", 835e12),
    ("H100", 989e12),
    ("H200", 989e12),
    ("GB200", 2.5e15),
    ("B200", 2.25e15),
    ("A100", 312e12),
];

/// The peak of a device by its name.
pub fn peak_flops(device_name: &str) -> Option<f64> {
    PEAKS.iter().find(|(part, _)| device_name.contains(part)).map(|&(_, peak)| peak)
}

/// The sizes that the FLOPs of a step depend on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlopCounts {
    /// Weights of all linear layers but the head.
    pub linear_weights: usize,
    /// Those of them that are trained themselves.
    pub trained_linear_weights: usize,
    /// Weights of the head.
    pub head_weights: usize,
    /// Whether the head is trained itself.
    pub head_trained: bool,
    /// Weights of all adapters.
    pub adapter_weights: usize,
    /// L·h·d: layers × query heads × head size.
    pub attention_width: usize,
}

impl FlopCounts {
    /// FLOPs of one optimizer step (see the module's formula).
    pub fn of_step(&self, batches: &[Batch]) -> f64 {
        let tokens: usize = batches.iter().map(Batch::tokens).sum();
        let trained: usize = batches.iter().map(Batch::trained_tokens).sum();
        let linear = 4 * self.linear_weights + 2 * self.trained_linear_weights + 6 * self.adapter_weights;
        let head = if self.head_trained { 6 } else { 4 } * self.head_weights;
        let documents = batches.iter().flat_map(|b| b.cu_seqlens.windows(2).map(|w| w[1] - w[0]));
        let pairs: f64 = documents.map(|l| f64::from(l) * f64::from(l + 1)).sum();
        linear as f64 * tokens as f64
            + head as f64 * trained as f64
            + 3.0 * 2.0 * self.attention_width as f64 * pairs
    }
}

/// The process's peak resident memory without mapped files (the program itself, weights that are read): `VmHWM` less
/// `RssFile` of Linux's `/proc/self/status`; `None` elsewhere.
pub fn peak_process_bytes() -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let kib = |name: &str| -> Option<u64> {
        let line = status.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim().strip_suffix("kB")?.trim().parse().ok()
    };
    // Weights let their pages go as they are read, so that the peak holds no more of files than now.
    Some((kib("VmHWM:")?.saturating_sub(kib("RssFile:")?)) * 1024)
}

/// `metrics.jsonl`: a row a step, appended.
#[derive(Debug)]
pub struct MetricsFile {
    path: PathBuf,
    file: File,
    /// Where rows that were cut can still be read.
    pub old: Option<PathBuf>,
    /// The last training and held-out loss, each with its step.
    pub last: [Option<(usize, f64)>; 2],
}

impl MetricsFile {
    /// Opens the file to go on after `step`: later rows, of a run that went on and was lost, are
    /// cut (the file as it was stays as `metrics.jsonl.old-K`), and a row that was cut off by a kill.
    pub fn open(path: &Path, step: usize) -> Result<Self> {
        let (kept, old) = cut_after(path, step)?;
        let file = OpenOptions::new().create(true).append(true).open(path);
        let file = file.map_err(|e| Error::io(path, "write", e))?;
        let mut metrics = Self { path: path.into(), file, old, last: [None; 2] };
        kept.lines().filter_map(|line| serde_json::from_str(line).ok()).for_each(|row| metrics.note(&row));
        Ok(metrics)
    }

    fn note(&mut self, row: &Value) {
        for (last, key) in self.last.iter_mut().zip(["loss/mean", "val/loss"]) {
            if let (Some(step), Some(loss)) = (row["step"].as_u64(), row[key].as_f64()) {
                *last = Some((step as usize, loss));
            }
        }
    }

    /// Appends a row.
    pub fn append(&mut self, row: &Value) -> Result<()> {
        self.note(row);
        self.file.write_all(format!("{row}\n").as_bytes()).map_err(|e| Error::io(&self.path, "write", e))
    }
}

/// Cuts the rows of later steps than `step` out of a file of rows, and what is no row. What is left, and where the file as
/// it was can still be read: it stays if more is cut than a last line that a kill cut off.
pub(super) fn cut_after(path: &Path, step: usize) -> Result<(String, Option<PathBuf>)> {
    let old = match fs::read_to_string(path) {
        Ok(text) => text,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok((String::new(), None)),
        Err(e) => return Err(Error::io(path, "read", e)),
    };
    let step_of = |line: &str| serde_json::from_str::<Value>(line).ok()?["step"].as_u64();
    let stays = |line: &&str| step_of(line).is_some_and(|s| s as usize <= step);
    let mut copy = None;
    let whole = old.rsplit_once('\n').map_or("", |(whole, _)| whole);
    if !whole.lines().all(|line| stays(&line))
        || step_of(&old[whole.len()..]).is_some_and(|s| s as usize > step)
    {
        let free = folder::free_name(path);
        fs::write(&free, &old).map_err(|e| Error::io(&free, "write", e))?;
        copy = Some(free);
    }
    let kept: String = old.lines().filter(stays).flat_map(|line| [line, "\n"]).collect();
    if kept != old {
        let temporary = path.with_extension("jsonl.partial");
        fs::write(&temporary, &kept).map_err(|e| Error::io(&temporary, "write", e))?;
        fs::rename(&temporary, path).map_err(|e| Error::io(path, "rename", e))?;
    }
    Ok((kept, copy))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn batch(documents: &[u32], trained: usize) -> Batch {
        let mut cu_seqlens = vec![0];
        for l in documents {
            cu_seqlens.push(cu_seqlens[cu_seqlens.len() - 1] + l);
        }
        let t = cu_seqlens[cu_seqlens.len() - 1] as usize;
        let loss_mask = (0..t).map(|i| i < trained).collect();
        Batch { input_ids: vec![0; t], loss_mask, cu_seqlens, ..Default::default() }
    }

    #[test]
    fn attention_counts_inside_documents_only() {
        let counts = FlopCounts {
            linear_weights: 0,
            trained_linear_weights: 0,
            head_weights: 0,
            head_trained: false,
            adapter_weights: 0,
            attention_width: 5,
        };
        // Forward of one document of l: two products, 2·h·d each, over l(l+1)/2 pairs.
        assert_eq!(counts.of_step(&[batch(&[3], 0)]), 3.0 * (2.0 * 2.0 * 5.0 * 6.0));
        let two = counts.of_step(&[batch(&[3, 4], 0)]);
        assert_eq!(two, counts.of_step(&[batch(&[3], 0), batch(&[4], 0)]));
        assert!(two < counts.of_step(&[batch(&[7], 0)]));
    }

    #[test]
    fn frozen_weights_have_no_weight_gradient() {
        let lora = FlopCounts {
            linear_weights: 100,
            trained_linear_weights: 0,
            head_weights: 10,
            head_trained: false,
            adapter_weights: 7,
            attention_width: 0,
        };
        assert_eq!(lora.of_step(&[batch(&[4], 3)]), 4.0 * (400.0 + 42.0) + 3.0 * 40.0);
        let full = FlopCounts { trained_linear_weights: 100, head_trained: true, adapter_weights: 0, ..lora };
        assert_eq!(full.of_step(&[batch(&[4], 3)]), 4.0 * 600.0 + 3.0 * 60.0);
    }

    #[test]
    fn peaks_by_name() {
        assert_eq!(peak_flops("NVIDIA H100 PCIe"), Some(756e12));
        assert_eq!(peak_flops("NVIDIA H100 80GB HBM3"), Some(989e12));
        assert_eq!(peak_flops("llvmpipe (LLVM 19)"), None);
    }

    #[test]
    fn rows_after_the_resumed_step_are_cut() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut file = MetricsFile::open(&path, 0).unwrap();
        for step in 1..=4 {
            file.append(&json!({ "step": step })).unwrap();
        }
        // A kill in the middle of a row.
        fs::write(&path, fs::read_to_string(&path).unwrap() + "{\"step\": 2, \"lo").unwrap();
        let whole = fs::read_to_string(&path).unwrap();
        let mut file = MetricsFile::open(&path, 2).unwrap();
        file.append(&json!({ "step": 3, "new": true })).unwrap();
        assert_eq!(fs::read_to_string(file.old.unwrap()).unwrap(), whole, "cut rows can still be read");
        assert_eq!(MetricsFile::open(&path, 3).unwrap().old, None, "nothing was cut");
        let rows = fs::read_to_string(&path).unwrap();
        assert_eq!(rows, "{\"step\":1}\n{\"step\":2}\n{\"step\":3,\"new\":true}\n");
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn peak_memory_is_read_on_linux() {
        assert!(peak_process_bytes().unwrap() > 1 << 20);
    }
}
