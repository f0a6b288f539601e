//! TensorBoard's event files: a `tf.Event` message a record, each record framed with its length and checksums.
//!
//! ```text
//! length u64 · masked crc32c of it u32 · message · masked crc32c of the message u32      (little-endian)
//! ```
//! After tensorboard's `compat/proto/event.proto` and TensorFlow's `lib/io/record_writer.cc`. Scalars alone are written,
//! so the messages are put together here.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// One file, open for more records.
#[derive(Debug)]
pub(super) struct EventFile(File);

impl EventFile {
    /// A new file beside those of earlier processes. TensorBoard drops what those say of steps after `before`.
    pub fn create(folder: &Path, before: usize) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let seconds = now() as u64;
        let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        let host = match host.trim() {
            "" => "localhost",
            host => host,
        };
        let name = format!("events.out.tfevents.{seconds:010}.{host}.{}.0", std::process::id());
        let mut file = Self(File::options().append(true).create(true).open(folder.join(name))?);
        file.record(&event(None, 3, b"brain.Event:2"))?;
        // A SessionLog whose status is START.
        file.record(&event(Some(before + 1), 7, &[0x08, 0x01]))?;
        Ok(file)
    }

    /// The scalars of a step.
    pub fn append(&mut self, step: usize, values: &[(&str, f64)]) -> io::Result<()> {
        let mut summary = Vec::new();
        for (tag, value) in values {
            let mut inner = Vec::new();
            bytes_field(&mut inner, 1, tag.as_bytes());
            inner.push(0x15); // field 2, four bytes
            inner.extend((*value as f32).to_le_bytes());
            bytes_field(&mut summary, 1, &inner);
        }
        self.record(&event(Some(step), 5, &summary))
    }

    fn record(&mut self, message: &[u8]) -> io::Result<()> {
        self.0.write_all(&framed(message))
    }
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// An Event with the time, the step, and one more field.
fn event(step: Option<usize>, field: u8, content: &[u8]) -> Vec<u8> {
    let mut message = vec![0x09]; // field 1, eight bytes
    message.extend(now().to_le_bytes());
    if let Some(step) = step {
        message.push(0x10); // field 2, a varint
        varint(&mut message, step as u64);
    }
    bytes_field(&mut message, field, content);
    message
}

fn bytes_field(to: &mut Vec<u8>, field: u8, content: &[u8]) {
    to.push(field << 3 | 2);
    varint(to, content.len() as u64);
    to.extend(content);
}

fn varint(to: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        to.push(value as u8 | 0x80);
        value >>= 7;
    }
    to.push(value as u8);
}

fn framed(message: &[u8]) -> Vec<u8> {
    let length = (message.len() as u64).to_le_bytes();
    [&length, &masked(&length).to_le_bytes()[..], message, &masked(message).to_le_bytes()].concat()
}

/// The checksum, masked so that one over bytes that hold checksums is none by chance.
fn masked(bytes: &[u8]) -> u32 {
    crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Castagnoli's CRC-32 (RFC 3720, appendix B.4).
fn crc32c(bytes: &[u8]) -> u32 {
    let byte = |crc: u32, byte: &u8| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0x82F6_3B78 & (crc & 1).wrapping_neg()))
    };
    !bytes.iter().fold(!0, byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_that_of_the_rfc() {
        // RFC 3720, B.4: 32 bytes of zeros, of ones, and counted up.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
        assert_eq!(crc32c(&(0..32).collect::<Vec<u8>>()), 0x46dd_794e);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    #[test]
    fn records_are_framed_and_hold_what_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let mut file = EventFile::create(&folder.path().join("tensorboard"), 300).unwrap();
        file.append(301, &[("loss/mean", 1.5), ("optim/lr", 1e-4)]).unwrap();
        let path = fs::read_dir(folder.path().join("tensorboard")).unwrap().next().unwrap().unwrap().path();
        assert!(path.file_name().unwrap().to_str().unwrap().starts_with("events.out.tfevents."));
        let bytes = fs::read(path).unwrap();
        let (mut rest, mut messages) = (&bytes[..], Vec::new());
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            let check = |at: usize| u32::from_le_bytes(rest[at..at + 4].try_into().unwrap());
            assert_eq!(check(8), masked(&rest[..8]));
            let message = &rest[12..12 + length];
            assert_eq!(check(12 + length), masked(message));
            messages.push(message);
            rest = &rest[16 + length..];
        }
        assert_eq!(messages.len(), 3);
        assert!(messages[0].ends_with(b"\x1a\x0dbrain.Event:2"));
        // Step 301 is 0xad 0x02 as a varint.
        assert_eq!(messages[1][9..], [0x10, 0xad, 0x02, 0x3a, 2, 0x08, 1]);
        assert_eq!(&messages[2][9..12], [0x10, 0xad, 0x02]);
        let scalar = [&b"\x0a\x09loss/mean\x15"[..], &1.5f32.to_le_bytes()].concat();
        assert!(messages[2].windows(scalar.len()).any(|window| window == scalar));
    }
}
