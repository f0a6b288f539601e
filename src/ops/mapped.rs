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

/// Gives back the memory that a part of the map has come to hold: who goes through a large model doesn't want all of
/// it there at once. What is read again comes from the file again.
pub fn release(map: &Mmap, range: Range<usize>) {
    #[cfg(unix)]
    {
        use memmap2::UncheckedAdvice::DontNeed;
        // SAFETY: the map is shared with a file that isn't rewritten (see above), so its pages come back as they were.
        let released = unsafe { map.unchecked_advise_range(DontNeed, range.start, range.len()) };
        // Where it can't be done, the system does it when it needs the room.
        let _ = released;
    }
    #[cfg(not(unix))]
    let _ = (map, range);
}
