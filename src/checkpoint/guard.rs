//! Before anything is written: that the run's folders can be written, and that no other run writes there.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use super::RunFolder;
use crate::{Error, Result};

/// The file that a run holds locked while it lives. It stays behind, empty; the lock goes with the process.
const LOCK: &str = ".lock";

/// Locks on the folders that a run writes to, let go when this is dropped or the process ends, however it ends.
#[derive(Debug, Default)]
pub struct Locks(Vec<(PathBuf, File)>);

impl Locks {
    /// Locks the folders that have a lock file already, so that a second run hears of the first before it
    /// loads anything; creates nothing.
    ///
    /// # Errors
    /// Another run holds one of them.
    pub fn of_existing(folder: &RunFolder) -> Result<Self> {
        let mut locks = Self::default();
        for place in folder.places().map(|(_, place)| place).filter(|place| place.join(LOCK).exists()) {
            locks.add(place)?;
        }
        Ok(locks)
    }

    /// Locks all folders of the run; makes those that aren't there.
    ///
    /// # Errors
    /// Another run holds one of them, or a folder can't be made.
    pub fn add_all(&mut self, folder: &RunFolder) -> Result<()> {
        for (_, place) in folder.places() {
            fs::create_dir_all(place).map_err(|e| Error::io(place, "create", e))?;
            self.add(place)?;
        }
        Ok(())
    }

    fn add(&mut self, place: &Path) -> Result<()> {
        let whole = fs::canonicalize(place).map_err(|e| Error::io(place, "find", e))?;
        if self.0.iter().any(|(locked, _)| *locked == whole) {
            return Ok(());
        }
        let path = place.join(LOCK);
        let file = OpenOptions::new().write(true).create(true).truncate(false).open(&path);
        let file = file.map_err(|e| Error::io(&path, "write", e))?;
        match file.try_lock() {
            Ok(()) => {}
            // A file system without locks: nothing to be done about it.
            Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Unsupported => {}
            Err(TryLockError::Error(e)) => return Err(Error::io(&path, "lock", e)),
            Err(TryLockError::WouldBlock) => {
                let hint = "wait until it ends, stop it, or set another `output_dir`";
                return Err(Error::checkpoint(place, "another run is writing here", hint));
            }
        }
        self.0.push((whole, file));
        Ok(())
    }
}

impl RunFolder {
    /// The folders that belong to one run at a time, with the keys that name them.
    fn places(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let saves = self.checkpoints.parent().filter(|saves| *saves != self.root);
        let saves = saves.map(|saves| ("ckpt.output_dir", saves));
        std::iter::once(("output_dir", self.root.as_path())).chain(saves)
    }

    /// Checks that the run will be able to write; leaves nothing behind.
    ///
    /// # Errors
    /// What can't be written, with the key that names it.
    pub fn check_writable(&self) -> Result<()> {
        for (key, place) in self.places() {
            writable(key, place)?;
        }
        for folder in [&self.checkpoints, &self.weights, &self.root.join("configs"), &self.root.join("logs")]
        {
            if folder.exists() {
                writable("output_dir", folder)?;
            }
        }
        Ok(())
    }
}

/// Whether `place`, or the nearest folder above it that is there, takes a file.
fn writable(key: &str, place: &Path) -> Result<()> {
    let refused = |message| {
        Err(Error::checkpoint(place, message, format!("set `{key}` to a folder that can be written")))
    };
    let above = place.ancestors().filter(|path| !path.as_os_str().is_empty()).find(|path| path.exists());
    let nearest = above.unwrap_or(Path::new("."));
    if !nearest.is_dir() {
        let nearest = nearest.display();
        return refused(format!("`{key}` can't be a folder: `{nearest}` is a file"));
    }
    let probe = nearest.join(format!(".embertune-{}", std::process::id()));
    match File::create(&probe).and_then(|_| fs::remove_file(&probe)) {
        Ok(()) => Ok(()),
        Err(e) => refused(format!("`{key}` can't be written: {e}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(root: &Path, saves: &Path) -> RunFolder {
        let (checkpoints, weights) = (saves.join("checkpoints"), saves.join("weights"));
        RunFolder { root: root.into(), checkpoints, weights }
    }

    #[test]
    fn one_run_at_a_time() {
        let parent = tempfile::tempdir().unwrap();
        let (a, b) = (parent.path().join("a"), parent.path().join("b"));
        let first = folder(&a, &b);
        assert!(Locks::of_existing(&first).unwrap().0.is_empty());
        assert!(!a.exists(), "looking creates nothing");
        let mut held = Locks::default();
        held.add_all(&first).unwrap();
        held.add_all(&first).unwrap();
        assert_eq!(held.0.len(), 2);
        // Another root that saves to the same place; the same folder spelled otherwise.
        let spelled = parent.path().join("x/../b");
        fs::create_dir(parent.path().join("x")).unwrap();
        for second in [first.clone(), folder(&parent.path().join("c"), &spelled)] {
            let error = Locks::of_existing(&second).unwrap_err();
            assert!(error.to_string().contains("another run is writing here"), "{error}");
        }
        drop(held);
        assert_eq!(Locks::of_existing(&first).unwrap().0.len(), 2);
    }

    #[test]
    fn a_file_in_the_way_names_the_key() {
        let parent = tempfile::tempdir().unwrap();
        let file = parent.path().join("file");
        fs::write(&file, "").unwrap();
        let good = parent.path().join("good");
        folder(&good, &good).check_writable().unwrap();
        assert!(!good.exists());
        let error = folder(&file.join("run"), &file.join("run")).check_writable().unwrap_err();
        assert!(error.to_string().contains("`output_dir`"), "{error}");
        let error = folder(&good, &file).check_writable().unwrap_err();
        assert!(error.to_string().contains("`ckpt.output_dir`"), "{error}");
        fs::create_dir(&good).unwrap();
        fs::write(good.join("logs"), "").unwrap();
        assert!(folder(&good, &good).check_writable().is_err());
    }
}
