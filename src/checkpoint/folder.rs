//! Folders `step_N` that appear whole or not at all, and know what they hold.
//!
//! A folder is filled under a sibling name that starts with a dot, every file is synced, `STABLE` (size and
//! xxh3 of each file) is written last, and the folder is renamed. So a kill at any moment leaves
//! either no `step_N` or a whole one; a change afterwards is seen against `STABLE`.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Read;
use std::path::{Path, PathBuf};

use rayon::prelude::*;
use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use crate::{Error, Result};

/// The file that is written last and lists the others.
pub const STABLE: &str = "STABLE";

/// What `STABLE` holds.
#[derive(Debug, Serialize, Deserialize)]
struct Stable {
    files: BTreeMap<String, Seal>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
struct Seal {
    size: u64,
    xxh3: String,
}

/// Writes `parent/step_N`: `fill` gets a temporary folder that is synced and renamed afterwards.
///
/// # Errors
/// If the folder is there already (nothing is overwritten), or from `fill` and the file system.
pub fn write(parent: &Path, step: usize, fill: impl FnOnce(&Path) -> Result<()>) -> Result<PathBuf> {
    let target = parent.join(format!("step_{step}"));
    if target.exists() {
        return Err(Error::checkpoint(
            &target,
            "the folder exists already, and nothing is overwritten",
            "choose another `output_dir`, or move the folder away",
        ));
    }
    let temporary = parent.join(format!(".step_{step}.partial-{}", std::process::id()));
    if temporary.exists() {
        remove(&temporary)?;
    }
    fs::create_dir_all(&temporary).map_err(|e| Error::io(&temporary, "create", e))?;
    fill(&temporary)?;
    // A file's bytes go to the disk while it is read once more.
    let finish = |name: String| {
        let path = temporary.join(&name);
        share(&path, &temporary)?;
        let (synced, seal) = rayon::join(|| sync(&path), || seal(&path));
        synced?;
        path.ancestors().skip(1).take_while(|p| *p != temporary).try_for_each(sync)?;
        Ok((name, seal?))
    };
    let files = list(&temporary)?.into_par_iter().map(finish).collect::<Result<BTreeMap<_, _>>>()?;
    let text = serde_json::to_string_pretty(&Stable { files }).expect("names and numbers are JSON");
    let stable = temporary.join(STABLE);
    fs::write(&stable, text).map_err(|e| Error::io(&stable, "write", e))?;
    sync(&stable)?;
    sync(&temporary)?;
    fs::rename(&temporary, &target).map_err(|e| Error::io(&target, "rename", e))?;
    sync(parent)?;
    Ok(target)
}

/// Compares a folder with its `STABLE`.
///
/// # Errors
/// The first file that is missing, truncated or changed, with what was found and what is wanted.
pub fn verify(folder: &Path) -> Result<()> {
    let stable = read_stable(folder)?;
    for (name, wanted) in &stable.files {
        let path = folder.join(name);
        let size = match fs::metadata(&path) {
            Ok(data) => data.len(),
            Err(_) => return Err(broken(&path, format!("missing, though `{STABLE}` lists it"))),
        };
        if size != wanted.size {
            let word = if size < wanted.size { "truncated" } else { "changed" };
            let wanted = wanted.size;
            return Err(broken(&path, format!("{word}: the size is {size} bytes, wanted {wanted}")));
        }
        let found = seal(&path)?.xxh3;
        if found != wanted.xxh3 {
            return Err(broken(&path, format!("corrupt: xxh3 is {found}, wanted {}", wanted.xxh3)));
        }
    }
    Ok(())
}

fn broken(path: &Path, message: String) -> Error {
    Error::checkpoint(path, message, "")
}

fn read_stable(folder: &Path) -> Result<Stable> {
    let path = folder.join(STABLE);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(_) => return Err(broken(&path, "missing: the folder is incomplete".into())),
    };
    serde_json::from_str(&text).map_err(|e| broken(&path, format!("corrupt: {e}")))
}

/// The steps that have a folder with `STABLE`, ascending; partial folders don't count.
pub fn steps(parent: &Path) -> Result<Vec<usize>> {
    let mut steps = Vec::new();
    for (name, path) in entries(parent)? {
        if let Some(step) = step_of(&name)
            && path.join(STABLE).exists()
        {
            steps.push(step);
        }
    }
    steps.sort_unstable();
    Ok(steps)
}

/// Everything called `step_N`, whole or not, ascending.
pub(super) fn named(parent: &Path) -> Result<Vec<usize>> {
    let mut steps: Vec<_> = entries(parent)?.iter().filter_map(|(name, _)| step_of(name)).collect();
    steps.sort_unstable();
    Ok(steps)
}

/// N of `step_N`, as it is written here (no sign, no leading zero).
fn step_of(name: &str) -> Option<usize> {
    let step = name.strip_prefix("step_")?.parse().ok()?;
    (name == format!("step_{step}")).then_some(step)
}

/// Whether `name` is `BASE.old-K`.
pub(super) fn is_old(name: &str, base: &str) -> bool {
    let number = name.strip_prefix(base).and_then(|rest| rest.strip_prefix(".old-"));
    number.is_some_and(|k| k.parse::<u64>().is_ok())
}

/// Whether `name` is what an interrupted save or deletion leaves behind.
fn is_partial(name: &str) -> bool {
    let rest = name.strip_prefix(".step_").and_then(|rest| rest.split_once('.'));
    let Some((step, process)) = rest else { return false };
    let process = process.strip_prefix("partial-").or(process.strip_prefix("removed-"));
    step.parse::<usize>().is_ok() && process.is_some_and(|id| id.parse::<u32>().is_ok())
}

/// Whether a run of ours wrote this entry of `checkpoints/` or `weights/` and all that is in it: a partial folder,
/// or `step_N` (also set aside) that holds what its `STABLE` lists and nothing more.
pub(super) fn is_own(name: &str, path: &Path) -> bool {
    if !is_folder(path) {
        return false;
    }
    let step = name.split_once(".old-").map_or(name, |(step, _)| step);
    let is_step = step_of(step).is_some() && (name == step || is_old(name, step));
    let only_listed = || {
        let (Ok(stable), Ok(files)) = (read_stable(path), list(path)) else { return false };
        files.iter().all(|file| file == STABLE || stable.files.contains_key(file))
    };
    is_partial(name) || is_step && only_listed()
}

/// A folder itself, not a link to one.
fn is_folder(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|data| data.is_dir())
}

/// Renames a `step_N` that isn't whole, or isn't ours, out of the way of a save; where to.
pub fn make_way(parent: &Path, step: usize) -> Result<Option<PathBuf>> {
    let path = parent.join(format!("step_{step}"));
    if fs::symlink_metadata(&path).is_err() || path.join(STABLE).exists() {
        return Ok(None);
    }
    set_aside(&path).map(Some)
}

/// A whole folder set aside earlier that holds the same as `path`, byte for byte.
pub(super) fn same_set_aside(path: &Path) -> Option<PathBuf> {
    let name = path.file_name()?.to_string_lossy().into_owned();
    let stable = fs::read(path.join(STABLE)).ok()?;
    let mut others = entries(path.parent()?).ok()?.into_iter().filter(|(other, _)| is_old(other, &name));
    let same = |other: &Path| {
        fs::read(other.join(STABLE)).is_ok_and(|s| s == stable)
            && is_own(&name, path)
            && verify(other).is_ok()
    };
    others.find(|(_, other)| same(other)).map(|(_, other)| other)
}

/// Deletes what an interrupted save or deletion left behind; returns how many folders.
pub fn remove_partial(parent: &Path) -> Result<usize> {
    let mut removed = 0;
    for (name, path) in entries(parent)? {
        if is_partial(&name) && is_folder(&path) {
            remove(&path)?;
            removed += 1;
        }
    }
    Ok(removed)
}

/// Deletes all folders but the last `keep_last` and those whose step `keep_interval` divides;
/// with neither, nothing. The newest always stays.
pub fn prune(parent: &Path, keep_last: Option<usize>, keep_interval: Option<usize>) -> Result<Vec<usize>> {
    if keep_last.is_none() && keep_interval.is_none() {
        return Ok(Vec::new());
    }
    let steps = steps(parent)?;
    let last = keep_last.unwrap_or(1).max(1);
    let old = steps.iter().take(steps.len().saturating_sub(last)).copied();
    let doomed: Vec<usize> =
        old.filter(|step| !keep_interval.is_some_and(|n| n > 0 && step % n == 0)).collect();
    for step in &doomed {
        let path = parent.join(format!("step_{step}"));
        // Renamed first: a kill in between must not leave half a `step_N`.
        let hidden = parent.join(format!(".step_{step}.removed-{}", std::process::id()));
        fs::rename(&path, &hidden).map_err(|e| Error::io(&path, "rename", e))?;
        remove(&hidden)?;
    }
    Ok(doomed)
}

/// Renames a file or folder to the first free `NAME.old-K`, so that its name can be used again.
pub fn set_aside(path: &Path) -> Result<PathBuf> {
    let free = free_name(path);
    fs::rename(path, &free).map_err(|e| Error::io(path, "rename", e))?;
    Ok(free)
}

/// The first free `NAME.old-K`.
pub fn free_name(path: &Path) -> PathBuf {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let mut names = (1..).map(|k| path.with_file_name(format!("{name}.old-{k}")));
    names.find(|p| fs::symlink_metadata(p).is_err()).expect("some number is free")
}

/// Deletes a folder with all it holds.
pub fn remove(folder: &Path) -> Result<()> {
    fs::remove_dir_all(folder).map_err(|e| Error::io(folder, "delete", e))
}

/// Gives a file the readers that its folder has: some writers make files that only the owner can read.
fn share(path: &Path, folder: &Path) -> Result<()> {
    #[cfg(unix)]
    {
        use std::os::unix::fs::PermissionsExt;
        let of_folder = fs::metadata(folder).map_err(|e| Error::io(folder, "read", e))?.permissions().mode();
        let mode = fs::Permissions::from_mode(of_folder & 0o666);
        fs::set_permissions(path, mode).map_err(|e| Error::io(path, "write", e))?;
    }
    #[cfg(not(unix))]
    let _ = (path, folder);
    Ok(())
}

/// Flushes a file or folder to the disk.
fn sync(path: &Path) -> Result<()> {
    if cfg!(windows) && path.is_dir() {
        return Ok(()); // folders can't be opened there
    }
    let file = File::open(path).map_err(|e| Error::io(path, "open", e))?;
    file.sync_all().map_err(|e| Error::io(path, "sync", e))
}

/// Names and paths of what is in a folder, sorted; of none if it isn't there.
pub(super) fn entries(parent: &Path) -> Result<Vec<(String, PathBuf)>> {
    let entries = match fs::read_dir(parent) {
        Ok(entries) => entries,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(e) => return Err(Error::io(parent, "list", e)),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| Error::io(parent, "list", e))?;
        found.push((entry.file_name().to_string_lossy().into_owned(), entry.path()));
    }
    found.sort();
    Ok(found)
}

/// All files below `folder`, as `a/b` with forward slashes, sorted.
fn list(folder: &Path) -> Result<Vec<String>> {
    let mut files = Vec::new();
    for (name, path) in entries(folder)? {
        if is_folder(&path) {
            files.extend(list(&path)?.into_iter().map(|inner| format!("{name}/{inner}")));
        } else {
            files.push(name);
        }
    }
    Ok(files)
}

fn seal(path: &Path) -> Result<Seal> {
    let mut file = File::open(path).map_err(|e| Error::io(path, "read", e))?;
    let (mut hash, mut size) = (Xxh3::new(), 0);
    let mut buffer = vec![0; 1 << 20];
    loop {
        let n = file.read(&mut buffer).map_err(|e| Error::io(path, "read", e))?;
        if n == 0 {
            return Ok(Seal { size, xxh3: format!("{:016x}", hash.digest()) });
        }
        hash.update(&buffer[..n]);
        size += n as u64;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn save(parent: &Path, step: usize) -> PathBuf {
        write(parent, step, |folder| {
            fs::create_dir(folder.join("inner")).unwrap();
            fs::write(folder.join("a.txt"), format!("step {step}")).unwrap();
            fs::write(folder.join("inner/b.txt"), "b").unwrap();
            Ok(())
        })
        .unwrap()
    }

    #[test]
    fn a_whole_folder_verifies_and_changes_are_named() {
        let parent = tempfile::tempdir().unwrap();
        let folder = save(parent.path(), 3);
        verify(&folder).unwrap();
        let cases: [(&str, &str); 3] = [("step", "truncated"), ("step 4", "corrupt"), ("step 33", "changed")];
        for (text, word) in cases {
            fs::write(folder.join("a.txt"), text).unwrap();
            let message = verify(&folder).unwrap_err().to_string();
            assert!(message.contains("a.txt") && message.contains(word), "{message}");
        }
        fs::write(folder.join("a.txt"), "step 3").unwrap();
        verify(&folder).unwrap();
        fs::remove_file(folder.join("inner/b.txt")).unwrap();
        let message = verify(&folder).unwrap_err().to_string();
        assert!(message.contains("b.txt") && message.contains("missing"), "{message}");
    }

    #[test]
    fn a_save_that_stops_half_way_is_no_step() {
        let parent = tempfile::tempdir().unwrap();
        save(parent.path(), 1);
        let stopped = write(parent.path(), 2, |folder| {
            fs::write(folder.join("a.txt"), "half").unwrap();
            Err(Error::train("power cut", ""))
        });
        assert!(stopped.is_err());
        fs::create_dir(parent.path().join("step_9")).unwrap();
        assert_eq!(steps(parent.path()).unwrap(), [1]);
        assert_eq!(remove_partial(parent.path()).unwrap(), 1);
        save(parent.path(), 2);
        assert_eq!(steps(parent.path()).unwrap(), [1, 2]);
    }

    #[test]
    fn nothing_is_overwritten() {
        let parent = tempfile::tempdir().unwrap();
        let folder = save(parent.path(), 1);
        assert!(write(parent.path(), 1, |_| Ok(())).is_err());
        let aside = set_aside(&folder).unwrap();
        assert!(aside.ends_with("step_1.old-1"));
        assert!(steps(parent.path()).unwrap().is_empty());
        assert!(set_aside(&save(parent.path(), 1)).unwrap().ends_with("step_1.old-2"));
    }

    #[test]
    fn only_what_a_run_wrote_is_its_own() {
        let parent = tempfile::tempdir().unwrap();
        let own = |name: &str| is_own(name, &parent.path().join(name));
        let whole = save(parent.path(), 3);
        assert!(own("step_3"));
        fs::write(whole.join("inner/notes.txt"), "mine").unwrap();
        assert!(!own("step_3"), "it holds another's file");
        fs::remove_file(whole.join("inner/notes.txt")).unwrap();
        set_aside(&whole).unwrap();
        assert!(own("step_3.old-1"));
        for name in ["step_4", "step_best", ".step_5.partial-77", ".step_x.partial-1", ".step_notes", "data"]
        {
            fs::create_dir(parent.path().join(name)).unwrap();
            assert_eq!(own(name), name == ".step_5.partial-77", "{name}");
        }
        assert_eq!(remove_partial(parent.path()).unwrap(), 1);
        let stable = fs::read(parent.path().join("step_3.old-1/STABLE")).unwrap();
        for name in ["step_best", "step_03"] {
            fs::create_dir_all(parent.path().join(name)).unwrap();
            fs::write(parent.path().join(name).join(STABLE), &stable).unwrap();
            assert!(!own(name), "{name}");
        }
    }

    #[test]
    fn a_folder_that_is_no_save_makes_way() {
        let parent = tempfile::tempdir().unwrap();
        assert_eq!(make_way(parent.path(), 1).unwrap(), None);
        save(parent.path(), 1);
        assert_eq!(make_way(parent.path(), 1).unwrap(), None);
        fs::create_dir(parent.path().join("step_2")).unwrap();
        fs::write(parent.path().join("step_2/mine.txt"), "mine").unwrap();
        let aside = make_way(parent.path(), 2).unwrap().unwrap();
        assert_eq!(fs::read_to_string(aside.join("mine.txt")).unwrap(), "mine");
        save(parent.path(), 2);
    }

    #[test]
    fn a_copy_of_what_was_set_aside_is_found() {
        let parent = tempfile::tempdir().unwrap();
        let aside = set_aside(&save(parent.path(), 1)).unwrap();
        let again = save(parent.path(), 1);
        assert_eq!(same_set_aside(&again), Some(aside.clone()));
        fs::write(aside.join("a.txt"), "step 9").unwrap();
        assert_eq!(same_set_aside(&again), None, "the older one is broken");
    }

    #[test]
    fn keep_last_and_keep_interval_join() {
        let parent = tempfile::tempdir().unwrap();
        for step in [2, 4, 6, 8, 10] {
            save(parent.path(), step);
        }
        assert!(prune(parent.path(), None, None).unwrap().is_empty());
        assert_eq!(prune(parent.path(), Some(2), Some(4)).unwrap(), [2, 6]);
        assert_eq!(steps(parent.path()).unwrap(), [4, 8, 10]);
        assert_eq!(prune(parent.path(), None, Some(8)).unwrap(), [4]);
        assert_eq!(steps(parent.path()).unwrap(), [8, 10]);
    }
}
