//! The bytes of a file, mapped into memory: weights are read tensor by tensor, never twice.

use std::fs::File;
use std::path::Path;

use memmap2::Mmap;

use crate::error::{Error, Result};

/// Maps a file for reading.
///
/// # Errors
/// Where the file cannot be opened or mapped.
pub fn map_file(path: &Path) -> Result<Mmap> {
    let failed = |source| Error::io(path, "read", source);
    let file = File::open(path).map_err(failed)?;
    // SAFETY: the map is read-only and private to this process; weight files are replaced by
    // renaming a new file over them (ours are), never rewritten in place while they are in use.
    unsafe { Mmap::map(&file) }.map_err(failed)
}
