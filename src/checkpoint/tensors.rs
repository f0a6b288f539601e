//! Flat f32 tensors by name, to and from a safetensors file, four tensors in host memory at most.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::panic::resume_unwind;
use std::path::Path;
use std::sync::mpsc::{Receiver, sync_channel};
use std::sync::{Mutex, PoisonError};
use std::thread;

use burn::tensor::{Device, Tensor, TensorData};
use safetensors::tensor::{Dtype, Metadata, View};

use crate::{Error, Result};

/// A parameter or a piece of optimizer state: f32, flattened.
#[derive(Debug, Clone)]
pub struct Named {
    /// Unique in its file.
    pub name: String,
    /// The shape before flattening, as it is written.
    pub shape: Vec<usize>,
    /// `[n]` values.
    pub values: Tensor<1>,
}

impl Named {
    /// As they lie in the file.
    fn bytes(&self) -> Vec<u8> {
        let data = self.values.to_data();
        let values = data.as_slice::<f32>().expect("trainable tensors are f32");
        // As one copy where numbers lie in memory as they lie in the file.
        match cfg!(target_endian = "little") {
            true => bytemuck::cast_slice(values).to_vec(),
            false => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        }
    }
}

/// A tensor whose bytes come when it is its turn.
struct Coming<'a> {
    tensor: &'a Named,
    bytes: &'a Mutex<Receiver<Vec<u8>>>,
}

impl View for Coming<'_> {
    fn dtype(&self) -> Dtype {
        Dtype::F32
    }

    fn shape(&self) -> &[usize] {
        &self.tensor.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let bytes = self.bytes.lock().unwrap_or_else(PoisonError::into_inner);
        // None comes where bringing one has panicked; that goes on once the writer has ended.
        Cow::Owned(bytes.recv().unwrap_or_default())
    }

    fn data_len(&self) -> usize {
        self.tensor.shape.iter().product::<usize>() * size_of::<f32>()
    }
}

/// Writes `tensors` to a safetensors file. While one is written, the next is brought from the device.
pub fn save(path: &Path, tensors: &[Named]) -> Result<()> {
    // The file's order, since all are of one type.
    let mut tensors: Vec<&Named> = tensors.iter().collect();
    tensors.sort_by(|a, b| a.name.cmp(&b.name));
    let (sender, receiver) = sync_channel(1);
    let written = thread::scope(|scope| {
        let writer = scope.spawn(|| {
            let bytes = Mutex::new(receiver);
            let views = tensors.iter().map(|tensor| (&tensor.name, Coming { tensor, bytes: &bytes }));
            let metadata = HashMap::from([("format".to_string(), "pt".to_string())]);
            safetensors::serialize_to_file(views, Some(metadata), path)
        });
        // A writer that has failed takes no more.
        let _ = tensors.iter().try_for_each(|tensor| sender.send(tensor.bytes()));
        drop(sender);
        writer.join().unwrap_or_else(|panic| resume_unwind(panic))
    });
    written.map_err(|e| match e {
        // A full disk has a hint of its own.
        safetensors::SafeTensorError::IoError(source) => Error::io(path, "write", source),
        other => Error::checkpoint(path, format!("cannot write: {other}"), ""),
    })
}

/// Reads of what [`save`] wrote the tensors with these names.
///
/// # Errors
/// A file that isn't safetensors, or a tensor that isn't f32.
pub fn load(path: &Path, device: &Device, wanted: impl Fn(&str) -> bool) -> Result<BTreeMap<String, Named>> {
    let mut file = File::open(path).map_err(|e| Error::io(path, "read", e))?;
    let (start, metadata) = read_header(path, &mut file)?;
    let mut tensors = BTreeMap::new();
    for (name, info) in metadata.tensors().into_iter().filter(|(name, _)| wanted(name)) {
        if info.dtype != Dtype::F32 {
            return Err(bad(path, format!("tensor `{name}` is {:?}, wanted F32", info.dtype)));
        }
        let (from, to) = info.data_offsets;
        let mut bytes = vec![0; to - from];
        file.seek(SeekFrom::Start(start + from as u64)).map_err(|e| Error::io(path, "read", e))?;
        file.read_exact(&mut bytes).map_err(|e| Error::io(path, "read", e))?;
        let values = bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect::<Vec<_>>();
        let n = values.len();
        let values = Tensor::from_data(TensorData::new(values, [n]), device);
        tensors.insert(name.clone(), Named { name, shape: info.shape.clone(), values });
    }
    Ok(tensors)
}

/// The header and where the data starts.
fn read_header(path: &Path, file: &mut File) -> Result<(u64, Metadata)> {
    let size = file.metadata().map_err(|e| Error::io(path, "read", e))?.len();
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(|e| Error::io(path, "read", e))?;
    let length = u64::from_le_bytes(length);
    if length > size.saturating_sub(8) {
        return Err(bad(path, format!("header length {length} in a file of {size} bytes")));
    }
    let mut header = vec![0; length as usize];
    file.read_exact(&mut header).map_err(|e| Error::io(path, "read", e))?;
    let metadata: Metadata =
        serde_json::from_slice(&header).map_err(|e| bad(path, format!("header: {e}")))?;
    let (found, wanted) = (size - 8 - length, metadata.data_len() as u64);
    if found != wanted {
        return Err(bad(path, format!("{found} bytes of tensors, the header wants {wanted}")));
    }
    Ok((8 + length, metadata))
}

fn bad(path: &Path, message: String) -> Error {
    Error::checkpoint(path, message, "")
}

#[cfg(all(test, feature = "flex"))]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.safetensors");
        let device = Device::flex();
        let named = |name: &str, shape: &[usize], values: Vec<f32>| Named {
            name: name.into(),
            shape: shape.to_vec(),
            values: Tensor::from_data(TensorData::new(values.clone(), [values.len()]), &device),
        };
        let tensors =
            [named("b.x", &[2, 2], vec![1.0, -2.0, 3.5, f32::MIN_POSITIVE]), named("a", &[1], vec![0.5])];
        save(&path, &tensors).unwrap();
        let read = load(&path, &device, |_| true).unwrap();
        assert_eq!(read.len(), 2);
        for tensor in &tensors {
            let got = &read[&tensor.name];
            assert_eq!(got.shape, tensor.shape);
            assert_eq!(got.values.to_data(), tensor.values.to_data());
        }
        let whole = std::fs::read(&path).unwrap();
        std::fs::write(&path, &whole[..whole.len() - 3]).unwrap();
        assert!(load(&path, &device, |_| true).unwrap_err().to_string().contains("bytes of tensors"));
    }
}
