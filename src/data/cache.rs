//! Token stores that outlive the run that made them.
//!
//! One is found by what it was made from: the bytes of the files and of the tokenizer, each setting that changes
//! tokens, and this very program. It is written beside and renamed, under a lock: of several processes one makes
//! it and the others wait. Whatever is wrong with the folder or what lies in it costs time and a warning, never
//! the run.

use std::fs::{self, File, TryLockError};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, SystemTime};

use xxhash_rust::xxh3::Xxh3;

use super::store::{Store, Unusable, Writer};
use super::tokenize::ChatTokenizer;
use crate::config::SftDataConfig;
use crate::error::{Error, Result};
use crate::folders;

/// Data that are smaller are tokenised anew by each run, which takes about a second: nothing is left behind.
const WORTH_KEEPING: u64 = 4 << 20;
/// What nobody has used for so long is removed when something new is written.
const FORGOTTEN: Duration = Duration::from_secs(30 * 24 * 3600);
const ENDING: &str = "tokens";
const UNFINISHED: &str = "unfinished";
const LOCK: &str = "lock";

/// Told the rows that were read, often; an error ends what is being done.
pub(super) type Progress<'a, 'b> = &'a mut (dyn FnMut(usize) -> Result<()> + 'b);
/// Makes a store.
type Make<'a> = &'a mut dyn FnMut(Writer, Progress) -> Result<Store>;

/// What a store is made from.
pub(super) struct Origin<'a> {
    pub data: &'a SftDataConfig,
    pub tokenizer: &'a ChatTokenizer,
    pub vocab_size: usize,
    pub max_document: usize,
    /// Files of each source.
    pub sources: &'a [Vec<PathBuf>],
}

/// The store of `origin`, from the cache or made now, and what the user should know about the cache.
///
/// # Errors
/// Those of `make` and `progress`; the data, or the folder for temporary files, can't be read or written.
pub(super) fn store(origin: &Origin, progress: Progress, make: Make) -> Result<(Store, Option<String>)> {
    let Some(folder) = folder(origin)? else {
        return Ok((temporary(progress, make)?, None));
    };
    let before = stamps(origin)?;
    let name = format!("{:032x}", key(origin, progress)?);
    match in_folder(&folder, &name, progress, make, &mut || Ok(stamps(origin)? == before)) {
        Ok(found) => Ok(found),
        Err(Trouble::Run(error)) => Err(error),
        Err(Trouble::Folder(why)) => {
            let (folder, hint) = (folder.display(), "`[data] cache_dir` names another folder");
            let note = format!("the tokens can't be kept in `{folder}`: {why}; {hint}, `cache = false` none");
            Ok((temporary(progress, make)?, Some(note)))
        }
    }
}

/// Why there is no store.
enum Trouble {
    /// The folder can't be used.
    Folder(io::Error),
    /// Whatever else ends the run.
    Run(Error),
}

impl From<Error> for Trouble {
    fn from(error: Error) -> Self {
        Trouble::Run(error)
    }
}

impl From<io::Error> for Trouble {
    fn from(error: io::Error) -> Self {
        Trouble::Folder(error)
    }
}

/// Where the store goes, if it is to be kept.
fn folder(origin: &Origin) -> Result<Option<PathBuf>> {
    let data = origin.data;
    let utf8 = files(origin).all(|file| file.to_str().is_some());
    if !data.cache || !utf8 {
        return Ok(None);
    }
    if let Some(folder) = &data.cache_dir {
        return Ok(Some(folder.into()));
    }
    let mut bytes = 0;
    for file in files(origin) {
        bytes += fs::metadata(file).map_err(|e| Error::io(file, "read", e))?.len();
    }
    Ok((bytes >= WORTH_KEEPING).then(|| folders::cache().join("tokens")))
}

fn files<'a>(origin: &'a Origin) -> impl Iterator<Item = &'a PathBuf> {
    origin.sources.iter().flatten()
}

/// A store in a file that has no name and is gone with it.
fn temporary(progress: Progress, make: Make) -> Result<Store> {
    let file = tempfile::tempfile().map_err(|e| Error::io(std::env::temp_dir(), "write", e))?;
    make(Writer::new(file, &std::env::temp_dir()), progress)
}

/// The store by that name, and a warning.
fn in_folder(
    folder: &Path,
    name: &str,
    progress: Progress,
    make: Make,
    unchanged: &mut dyn FnMut() -> Result<bool>,
) -> Result<(Store, Option<String>), Trouble> {
    let path = folder.join(format!("{name}.{ENDING}"));
    if let Ok(store) = find(&path, progress)? {
        return Ok((store, None));
    }
    fs::create_dir_all(folder)?;
    let _lock = lock(&path.with_extension(LOCK), progress)?;
    // Someone else may have made it while this process waited.
    let note = match find(&path, progress)? {
        Ok(store) => return Ok((store, None)),
        Err(note) => note,
    };
    let unfinished = path.with_extension(UNFINISHED);
    let store = make_at(&unfinished, progress, make);
    let kept = match &store {
        Ok(store) if unchanged()? => keep(store, &unfinished, &path),
        Ok(_) => Err(io::Error::other("the data were written to while they were read")),
        Err(_) => Ok(()),
    };
    if store.is_err() || kept.is_err() {
        let _ = fs::remove_file(&unfinished);
    }
    let store = store?;
    remove_forgotten(folder);
    let not_kept = kept.err().map(|why| format!("the tokens aren't kept in `{}`: {why}", folder.display()));
    Ok((store, not_kept.or(note)))
}

fn make_at(path: &Path, progress: Progress, make: Make) -> Result<Store, Trouble> {
    let file = File::options().read(true).write(true).create(true).truncate(true).open(path)?;
    make(Writer::new(file, path), progress).map_err(|error| match error {
        // No room for it, say.
        Error::Io { path: at, source, .. } if at == path => Trouble::Folder(source),
        other => Trouble::Run(other),
    })
}

/// What lies at `path`, or a warning about it.
fn find(path: &Path, progress: Progress) -> Result<Result<Store, Option<String>>> {
    let note = match Store::open(path, progress) {
        Ok(store) => {
            // Used today; where that can't be noted, it is made anew some day.
            if let Ok(file) = File::options().append(true).open(path) {
                let _ = file.set_modified(SystemTime::now());
            }
            return Ok(Ok(store));
        }
        Err(Unusable::Stopped(error)) => return Err(error),
        Err(Unusable::Absent) => None,
        Err(Unusable::Damaged) => Some("was damaged".to_string()),
        Err(Unusable::Unreadable(error)) => Some(format!("can't be read ({error})")),
    };
    Ok(Err(note.map(|what| format!("the kept tokens in `{}` {what}: made anew", path.display()))))
}

/// Gives a store its name, once it is on the disk.
fn keep(store: &Store, unfinished: &Path, path: &Path) -> io::Result<()> {
    store.sync()?;
    fs::rename(unfinished, path)?;
    match path.parent() {
        // So that the name is on the disk as well.
        Some(folder) if cfg!(unix) => File::open(folder)?.sync_all(),
        _ => Ok(()),
    }
}

/// A file that one process at a time holds; it goes with its holder.
struct Lock {
    file: File,
    path: PathBuf,
    held: bool,
}

impl Lock {
    fn open(path: &Path) -> io::Result<Self> {
        let file = File::options().write(true).create(true).truncate(false).open(path)?;
        Ok(Self { file, path: path.into(), held: false })
    }

    /// Whether nobody else holds it.
    fn try_hold(&mut self) -> io::Result<bool> {
        self.held = match self.file.try_lock() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) => false,
            Err(TryLockError::Error(error)) => return Err(error),
        };
        Ok(self.held)
    }

    /// Whether others find it too: one that was removed keeps nobody out.
    fn is_there(&self) -> bool {
        same_file(&self.file, &self.path)
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // Whoever waits for it sees that it is gone, and asks again. Elsewhere open files can't be removed.
        if cfg!(unix) && self.held && self.is_there() {
            let _ = fs::remove_file(&self.path);
        }
    }
}

/// Holds the lock until it is dropped; whoever has it is waited for.
fn lock(path: &Path, progress: Progress) -> Result<Lock, Trouble> {
    loop {
        let mut lock = Lock::open(path)?;
        while !lock.try_hold()? {
            progress(0)?;
            thread::sleep(Duration::from_millis(50));
        }
        if lock.is_there() {
            return Ok(lock);
        }
    }
}

#[cfg(unix)]
fn same_file(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    let id = |metadata: &fs::Metadata| (metadata.dev(), metadata.ino());
    matches!((file.metadata(), fs::metadata(path)), (Ok(a), Ok(b)) if id(&a) == id(&b))
}

/// Elsewhere a file that is open can't be removed.
#[cfg(not(unix))]
fn same_file(_: &File, _: &Path) -> bool {
    true
}

/// Removes stores that nobody has used for long, and what builders that were killed left behind.
fn remove_forgotten(folder: &Path) {
    let forgotten = |path: &Path| {
        let age = fs::metadata(path).and_then(|m| m.modified()).ok()?.elapsed().ok()?;
        Some(age > FORGOTTEN)
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path());
    let ours = |path: &Path| path.extension().is_some_and(|e| e == ENDING || e == UNFINISHED || e == LOCK);
    for path in entries.filter(|path| ours(path) && forgotten(path) == Some(true)) {
        let Ok(mut lock) = Lock::open(&path.with_extension(LOCK)) else { continue };
        if lock.try_hold().is_ok_and(|held| held) && lock.is_there() {
            let _ = fs::remove_file(&path);
        }
    }
}

/// Size and time of each file.
fn stamps(origin: &Origin) -> Result<Vec<(u64, Option<SystemTime>)>> {
    let stamp = |file: &PathBuf| {
        let metadata = fs::metadata(file).map_err(|e| Error::io(file, "read", e))?;
        Ok((metadata.len(), metadata.modified().ok()))
    };
    files(origin).map(stamp).collect()
}

/// The name of a store: a hash of all that it depends on.
fn key(origin: &Origin, progress: Progress) -> Result<u128> {
    // Each key is named, so that a new one can't be forgotten: it changes tokens, or it doesn't.
    let SftDataConfig { format, columns, long_documents, loss_mask, .. } = origin.data;
    #[rustfmt::skip]
    let SftDataConfig {
        batch_size: _, seq_len: _, micro_batch_size: _, name: _, subsets: _, splits: _, format: _, columns: _,
        long_documents: _, probabilities: _, stopping_strategy: _, shuffle: _, seed: _, loss_mask: _, cache: _, cache_dir: _,
    } = origin.data;
    let mut hash = Xxh3::new();
    let mut add = |what: &str| {
        hash.update(what.as_bytes());
        hash.update(&[0]);
    };
    add(&program());
    add(&origin.tokenizer.identity());
    add(&format!("{:?}", (format, columns, long_documents, loss_mask)));
    add(&format!("{:?}", (origin.vocab_size, origin.max_document)));
    for source in origin.sources {
        add("source");
        for file in source {
            // The report names files as they are named now.
            add(&file.to_string_lossy());
            add(&format!("{:032x}", content(file, progress)?));
        }
    }
    Ok(hash.digest128())
}

/// This very program: another one may make other tokens of the same rows.
fn program() -> String {
    let of = |metadata: fs::Metadata| format!("{} {:?}", metadata.len(), metadata.modified().ok());
    let stamp = std::env::current_exe().and_then(fs::metadata).map(of).unwrap_or_default();
    format!("{} {stamp}", env!("CARGO_PKG_VERSION"))
}

/// A hash of a file's bytes.
fn content(path: &Path, progress: Progress) -> Result<u128> {
    let unreadable = |e| Error::io(path, "read", e);
    let mut file = File::open(path).map_err(unreadable)?;
    let mut hash = Xxh3::new();
    let mut buffer = vec![0; 1 << 18];
    loop {
        match file.read(&mut buffer).map_err(unreadable)? {
            0 => return Ok(hash.digest128()),
            read => hash.update(&buffer[..read]),
        }
        progress(0)?;
    }
}
