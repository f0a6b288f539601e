//! The bytes of a file, mapped into memory: weights are read tensor by tensor, never twice.

use std::fs::File;
use std::ops::Range;
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

/// Lets the pages of a range go, once its values are read: they count as this process's memory while they stay. Whoever
/// looks again has them read from the file again.
pub fn release(map: &Mmap, range: Range<usize>) {
    #[cfg(unix)]
    {
        let len = range.len().min(map.len().saturating_sub(range.start));
        // SAFETY: the map is read-only and backed by its file, so a page that was let go comes back as it was.
        // That the system may refuse changes no value.
        let _ = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, len) };
    }
    #[cfg(not(unix))]
    let _ = (map, range);
}
