//! Documents as tokens in a file, so that memory holds no more of them than their lengths.
//!
//! ```text
//! tokens    of all documents, one after the other: u32, the highest bit set where one is trained
//! lengths   of the documents: u32
//! about     JSON: where the sources end, the report
//! trailer   documents, bytes of `about`, checksum of all before, format: u64
//! ```
//!
//! Numbers are little-endian. What stands in the file is read with positioned reads: mapped pages would count
//! as this process's memory.

use std::fmt;
use std::fs::File;
use std::io::{self, BufWriter, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::Sample;
use super::cache::Progress;
use super::report::DataReport;
use crate::error::{Error, Result};

/// Raised when the file changes its form.
const FORMAT: u64 = u64::from_le_bytes(*b"tokens\x001");
const TRAINED: u32 = 1 << 31;
const TRAILER: usize = 4 * 8;
const TOKEN: u64 = 4;
/// Documents between two noted positions.
const BLOCK: usize = 64;

/// Documents in a file.
pub(super) struct Store {
    file: File,
    path: PathBuf,
    lengths: Arc<[u32]>,
    /// Tokens before document 0, [`BLOCK`], 2 · [`BLOCK`], …
    before: Vec<u64>,
    about: About,
    /// Of the tokens, trained or not, and the lengths.
    hash: u64,
}

/// What there is to know beside the documents.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct About {
    /// The documents of each source.
    pub sources: Vec<Range<u32>>,
    pub report: DataReport,
}

/// A store being made.
pub(super) struct Writer {
    out: BufWriter<File>,
    path: PathBuf,
    hash: Xxh3,
    lengths: Vec<u32>,
    words: Vec<u8>,
}

impl Writer {
    /// Into an empty file, which has to be readable too; `path` is for messages.
    pub fn new(file: File, path: &Path) -> Self {
        let out = BufWriter::with_capacity(1 << 18, file);
        Self { out, path: path.into(), hash: Xxh3::new(), lengths: Vec::new(), words: Vec::new() }
    }

    /// How many documents there are.
    pub fn len(&self) -> usize {
        self.lengths.len()
    }

    /// Appends a document.
    pub fn add(&mut self, sample: &Sample) -> Result<()> {
        let words = sample.ids.iter().zip(&sample.mask).map(|(&id, &trained)| {
            assert!(id < TRAINED, "ids are below the size of the vocabulary");
            id | if trained { TRAINED } else { 0 }
        });
        self.words.clear();
        self.words.extend(words.flat_map(u32::to_le_bytes));
        self.lengths.push(sample.ids.len() as u32);
        self.hash.update(&self.words);
        self.out.write_all(&self.words).map_err(|e| Error::io(&self.path, "write", e))
    }

    /// All documents are there.
    pub fn finish(self, about: About) -> Result<Store> {
        let path = self.path.clone();
        self.write_end(about).map_err(|e| Error::io(path, "write", e))
    }

    fn write_end(mut self, about: About) -> io::Result<Store> {
        let lengths: Vec<u8> = self.lengths.iter().flat_map(|len| len.to_le_bytes()).collect();
        self.hash.update(&lengths);
        let hash = self.hash.digest();
        let json = serde_json::to_vec(&about)?;
        self.hash.update(&json);
        self.out.write_all(&lengths)?;
        self.out.write_all(&json)?;
        for number in [self.lengths.len() as u64, json.len() as u64] {
            self.hash.update(&number.to_le_bytes());
            self.out.write_all(&number.to_le_bytes())?;
        }
        self.out.write_all(&self.hash.digest().to_le_bytes())?;
        self.out.write_all(&FORMAT.to_le_bytes())?;
        let file = self.out.into_inner().map_err(io::IntoInnerError::into_error)?;
        Ok(Store::new(file, self.path, self.lengths.into(), about, hash))
    }
}

/// Why a file isn't taken for a store.
#[derive(Debug)]
pub(super) enum Unusable {
    /// There is none, or of another format.
    Absent,
    /// It was whole once.
    Damaged,
    Unreadable(io::Error),
    /// The caller's own.
    Stopped(Error),
}

impl From<io::Error> for Unusable {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::NotFound => Unusable::Absent,
            io::ErrorKind::UnexpectedEof => Unusable::Damaged,
            _ => Unusable::Unreadable(error),
        }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} documents in {}", self.lengths.len(), self.path.display())
    }
}

impl Store {
    fn new(file: File, path: PathBuf, lengths: Arc<[u32]>, about: About, hash: u64) -> Self {
        let mut total = 0;
        let before = lengths.chunks(BLOCK).map(|block| {
            let before = total;
            total += block.iter().map(|&len| u64::from(len)).sum::<u64>();
            before
        });
        Self { before: before.collect(), file, path, lengths, about, hash }
    }

    /// A store that was written before, if all of it is as it was; `progress` is asked now and then.
    pub fn open(path: &Path, progress: Progress) -> Result<Self, Unusable> {
        let mut file = File::open(path)?;
        let size = file.metadata()?.len();
        let trailer = size.checked_sub(TRAILER as u64).ok_or(Unusable::Damaged)?;
        let mut end = [0; TRAILER];
        file.seek(SeekFrom::Start(trailer))?;
        file.read_exact(&mut end)?;
        let number = |i: usize| u64::from_le_bytes(std::array::from_fn(|byte| end[8 * i + byte]));
        let [documents, about_bytes, checksum, format] = std::array::from_fn(number);
        if format != FORMAT {
            return Err(Unusable::Damaged);
        }
        let lengths_bytes = documents.checked_mul(4).ok_or(Unusable::Damaged)?;
        let rest = about_bytes.checked_add(lengths_bytes).and_then(|end| trailer.checked_sub(end));
        let tokens = rest.ok_or(Unusable::Damaged)?;
        file.seek(SeekFrom::Start(0))?;
        let mut hash = Xxh3::new();
        hash_part(&mut file, tokens, &mut hash, progress)?;
        let lengths = read_part(&mut file, lengths_bytes, &mut hash)?;
        let content = hash.digest();
        let json = read_part(&mut file, about_bytes, &mut hash)?;
        hash.update(&end[..2 * 8]);
        if hash.digest() != checksum {
            return Err(Unusable::Damaged);
        }
        let about = serde_json::from_slice(&json).map_err(|_| Unusable::Damaged)?;
        let (lengths, _) = lengths.as_chunks::<4>();
        let lengths = lengths.iter().map(|len| u32::from_le_bytes(*len)).collect();
        Ok(Self::new(file, path.into(), lengths, about, content))
    }

    /// Tokens of each document.
    pub fn lengths(&self) -> &Arc<[u32]> {
        &self.lengths
    }

    /// What there is to know beside the documents.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// For what is known of it from elsewhere.
    pub fn report_mut(&mut self) -> &mut DataReport {
        &mut self.about.report
    }

    /// A hash of every document.
    pub fn hash(&self) -> u64 {
        self.hash
    }

    /// Document `id`.
    ///
    /// # Errors
    /// The file can't be read.
    pub fn document(&self, id: u64) -> Result<Sample> {
        let id = id as usize;
        let block = id / BLOCK;
        let inside: u64 = self.lengths[block * BLOCK..id].iter().map(|&len| u64::from(len)).sum();
        let mut bytes = vec![0; self.lengths[id] as usize * TOKEN as usize];
        read_at(&self.file, &mut bytes, TOKEN * (self.before[block] + inside))
            .map_err(|e| Error::io(&self.path, "read", e))?;
        let (words, _) = bytes.as_chunks::<4>();
        let words = words.iter().map(|word| u32::from_le_bytes(*word));
        Ok(words.map(|word| (word & !TRAINED, word & TRAINED != 0)).collect())
    }

    /// To the disk itself, so that the file outlives a power cut.
    pub fn sync(&self) -> io::Result<()> {
        self.file.sync_all()
    }
}

impl FromIterator<(u32, bool)> for Sample {
    fn from_iter<T: IntoIterator<Item = (u32, bool)>>(tokens: T) -> Self {
        let (ids, mask) = tokens.into_iter().unzip();
        Sample { ids, mask }
    }
}

/// Hashes the next `bytes` of a file, without keeping them.
fn hash_part(file: &mut File, bytes: u64, hash: &mut Xxh3, progress: Progress) -> Result<(), Unusable> {
    let mut left = bytes;
    let mut buffer = vec![0; 1 << 18];
    while left > 0 {
        let take = buffer.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        file.read_exact(&mut buffer[..take])?;
        hash.update(&buffer[..take]);
        left -= take as u64;
        progress(0).map_err(Unusable::Stopped)?;
    }
    Ok(())
}

fn read_part(file: &mut File, bytes: u64, hash: &mut Xxh3) -> io::Result<Vec<u8>> {
    let mut part = Vec::new();
    // Not more than there is, whatever a damaged trailer says.
    if file.take(bytes).read_to_end(&mut part)? as u64 != bytes {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    hash.update(&part);
    Ok(part)
}

#[cfg(unix)]
fn read_at(file: &File, buffer: &mut [u8], at: u64) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, buffer, at)
}

#[cfg(windows)]
fn read_at(file: &File, mut buffer: &mut [u8], mut at: u64) -> io::Result<()> {
    while !buffer.is_empty() {
        match std::os::windows::fs::FileExt::seek_read(file, buffer, at)? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            read => (buffer, at) = (&mut buffer[read..], at + read as u64),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(i: u32) -> Sample {
        (0..i * 37 % 11).map(|t| (i * 1000 + t, (i + t).is_multiple_of(3))).collect()
    }

    fn write(path: &Path, n: u32) -> Store {
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path).unwrap();
        let mut writer = Writer::new(file, path);
        (0..n).for_each(|i| writer.add(&sample(i)).unwrap());
        let report = DataReport { rows: 1000, documents: n as usize, ..Default::default() };
        writer.finish(About { sources: std::iter::once(0..n).collect(), report }).unwrap()
    }

    fn open(path: &Path) -> Result<Store, Unusable> {
        Store::open(path, &mut |_| Ok(()))
    }

    #[test]
    fn what_is_written_is_read_in_any_order() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.tokens");
        for n in [0, 1, 63, 64, 65, 300] {
            let written = write(&path, n);
            let read = open(&path).unwrap();
            assert_eq!((written.hash(), &written.about().report), (read.hash(), &read.about().report));
            assert_eq!(read.about().sources, std::slice::from_ref(&(0..n)));
            for i in (0..n).rev() {
                assert_eq!(written.document(i.into()).unwrap(), sample(i));
                assert_eq!(read.document(i.into()).unwrap(), sample(i));
                assert_eq!(read.lengths()[i as usize] as usize, sample(i).ids.len());
            }
        }
    }

    #[test]
    fn every_cut_and_every_flipped_bit_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.tokens");
        drop(write(&path, 20));
        let whole = std::fs::read(&path).unwrap();
        for at in 0..whole.len() {
            std::fs::write(&path, &whole[..at]).unwrap();
            assert!(matches!(open(&path), Err(Unusable::Damaged)), "cut to {at} bytes");
            let mut flipped = whole.clone();
            flipped[at] ^= 1 << (at % 8);
            std::fs::write(&path, flipped).unwrap();
            assert!(matches!(open(&path), Err(Unusable::Damaged)), "a bit of byte {at} flipped");
        }
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(open(&path), Err(Unusable::Absent)));
    }

    #[test]
    fn opening_can_be_stopped() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.tokens");
        drop(write(&path, 20));
        let stopped = Store::open(&path, &mut |_| Err(Error::train("stopped", "")));
        assert!(matches!(stopped, Err(Unusable::Stopped(_))));
    }
}
