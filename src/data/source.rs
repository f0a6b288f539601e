//! Data files → rows, one at a time: `.jsonl` and `.json` (by line or one list), `.csv`, `.parquet`; all but
//! the last may be packed by gzip or zstd (`.jsonl.gz`).
//!
//! Lines end at `\n` only (U+2028 and its like may stand in strings), a byte-order mark, `\r` and
//! blank lines are passed over, and each error names file and line.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::sync::Arc;

use flate2::bufread::MultiGzDecoder;
use serde_json::{Map, Value};

use super::csv;
use super::format::TOOL_DEFS;
use super::json_list::Items;
use super::parquet;
use super::row::{Fault, Place, RawRow};
use crate::config::ColumnsConfig;
use crate::error::{Error, Result};
use crate::hub::{DATA_ENDINGS, data_ending};

/// Rows of a file, in order, as they are cut out of it.
pub(super) type Rows = Box<dyn Iterator<Item = Result<Unread>> + Send>;

/// A row that is cut out of its file and not yet looked at: that takes longer, and can be done elsewhere.
pub(super) struct Unread {
    pub place: Place,
    content: Content,
}

enum Content {
    /// JSON.
    Text {
        json: Vec<u8>,
        is_line: bool,
    },
    Columns {
        columns: Map<String, Value>,
        padded_with_nulls: bool,
    },
}

impl Unread {
    /// A row of columns; `padded_with_nulls` as in [`RawRow`].
    pub fn columns(place: Place, columns: Map<String, Value>, padded_with_nulls: bool) -> Self {
        Self { place, content: Content::Columns { columns, padded_with_nulls } }
    }

    /// About what it takes in memory.
    pub fn bytes(&self) -> usize {
        const ROW: usize = 64;
        ROW + match &self.content {
            Content::Text { json, .. } => json.len(),
            Content::Columns { columns, .. } => {
                columns.iter().map(|(name, value)| name.len() + weight(value)).sum()
            }
        }
    }

    /// Looks at it.
    pub fn read(self) -> Result<RawRow> {
        let place = self.place;
        let (columns, padded_with_nulls) = match self.content {
            Content::Text { json, is_line } => {
                (parse(&json, is_line).map_err(|fault| fault.at(&place))?, false)
            }
            Content::Columns { columns, padded_with_nulls } => (columns, padded_with_nulls),
        };
        Ok(RawRow { place, columns, padded_with_nulls })
    }
}

/// About what a value takes in memory.
fn weight(value: &Value) -> usize {
    size_of::<Value>()
        + match value {
            Value::String(text) => text.len(),
            Value::Array(items) => items.iter().map(weight).sum(),
            Value::Object(fields) => fields.iter().map(|(name, value)| name.len() + weight(value)).sum(),
            _ => 0,
        }
}

/// How to mend bytes that aren't UTF-8, by how they begin.
fn not_text(bytes: &[u8]) -> &'static str {
    match bytes {
        [0x1f, 0x8b, ..] => "The file is packed by gzip: give it a name that ends in `.gz`.",
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "The file is packed by zstd: give it a name that ends in `.zst`.",
        [0xff, 0xfe, ..] | [0xfe, 0xff, ..] => {
            "Convert the file, for example with `iconv -f utf-16 -t utf-8`."
        }
        _ => "Convert the file, for example with `iconv -f latin1 -t utf-8`.",
    }
}

fn parse(json: &[u8], is_line: bool) -> Result<Map<String, Value>, Fault> {
    let text = std::str::from_utf8(json).map_err(|error| {
        let of = if is_line { "line" } else { "row" };
        Fault::new(format!("not UTF-8 at byte {} of the {of}", error.valid_up_to() + 1), not_text(json))
    })?;
    object(serde_json::from_str(text).map_err(|error| match is_line {
        true => Fault::new(
            format!("not valid JSON: {}", without_line(&error)),
            match json {
                b"[" => "Each line must hold one whole JSON object; a list over several lines belongs into a `.json` file.",
                _ => "Each line must hold one whole JSON object.",
            },
        ),
        false => Fault::new(format!("not valid JSON: {error} of the row"), ""),
    })?)
}

/// The text of a file, unpacked.
pub(super) type Reader = BufReader<Box<dyn Read + Send>>;

/// Opens a data file by its ending; other columns than `columns` has needn't be read.
pub(super) fn open(path: &Path, columns: &ColumnsConfig) -> Result<Rows> {
    let mut rows = by_ending(path, columns)?;
    let mut unreadable = false;
    Ok(Box::new(std::iter::from_fn(move || {
        // What can't be read now can't be read later: without an end, a cut file would fail for ever.
        let row = if unreadable { None } else { rows.next() };
        unreadable |= matches!(row, Some(Err(Error::Io { .. })));
        row
    })))
}

fn by_ending(path: &Path, columns: &ColumnsConfig) -> Result<Rows> {
    match data_ending(&path.to_string_lossy()) {
        Some("parquet") => parquet::rows(path, &wanted(columns)),
        Some("csv") => Ok(csv::rows(path, reader(path)?)),
        Some("json") => {
            let mut reader = reader(path)?;
            let is_list = starts_with_list(&mut reader).map_err(|e| Error::io(path, "read", e))?;
            Ok(if is_list { json_list(path, reader) } else { Box::new(Lines::new(path, reader)) })
        }
        Some(_) => Ok(Box::new(Lines::new(path, reader(path)?))),
        None => {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let message = match name.split_once('.') {
                Some((_, ending)) => format!("don't know how to read files that end in `.{ending}`"),
                None => "don't know how to read a file without an ending".to_string(),
            };
            let endings = DATA_ENDINGS.map(|e| format!("`.{e}`")).join(", ");
            let hint =
                format!("Files may end in {endings}, all but parquet also with `.gz` or `.zst` behind.");
            Err(Error::data(path, None, message, hint))
        }
    }
}

fn reader(path: &Path) -> Result<Reader> {
    let file = File::open(path).map_err(|e| Error::io(path, "read", e))?;
    let unpacked: Box<dyn Read + Send> = match path.extension().and_then(|ending| ending.to_str()) {
        Some("gz") => Box::new(MultiGzDecoder::new(BufReader::new(file))),
        Some("zst") => Box::new(zstd::Decoder::new(file).map_err(|e| Error::io(path, "read", e))?),
        _ => Box::new(file),
    };
    Ok(BufReader::with_capacity(1 << 16, unpacked))
}

/// Columns that mean something.
fn wanted(columns: &ColumnsConfig) -> Vec<String> {
    let names = columns.names().into_iter().map(|(_, column)| column);
    names.chain([TOOL_DEFS.to_string()]).collect()
}

/// A jsonl file being read.
struct Lines {
    reader: Reader,
    place: Place,
    buffer: Vec<u8>,
}

impl Lines {
    fn new(path: &Path, reader: Reader) -> Self {
        Self { reader, place: Place { file: Arc::new(path.into()), row: 0 }, buffer: Vec::new() }
    }

    /// The next line that isn't blank, in `buffer`.
    fn advance(&mut self) -> Result<bool> {
        loop {
            self.buffer.clear();
            let read = self.reader.read_until(b'\n', &mut self.buffer);
            if read.map_err(|e| Error::io(self.place.file.as_ref(), "read", e))? == 0 {
                return Ok(false);
            }
            self.place.row += 1;
            if self.place.row == 1 && self.buffer.starts_with(b"\xef\xbb\xbf") {
                self.buffer.drain(..3);
            }
            if !self.buffer.trim_ascii().is_empty() {
                return Ok(true);
            }
        }
    }

    fn take(&mut self) -> Unread {
        // Without its end, so that messages don't speak of a second line.
        let end = self.buffer.trim_ascii_end().len();
        self.buffer.truncate(end);
        let json = std::mem::take(&mut self.buffer);
        Unread { place: self.place.clone(), content: Content::Text { json, is_line: true } }
    }
}

impl Iterator for Lines {
    type Item = Result<Unread>;

    fn next(&mut self) -> Option<Self::Item> {
        match self.advance() {
            Ok(false) => None,
            Ok(true) => Some(Ok(self.take())),
            Err(error) => Some(Err(error)),
        }
    }
}

/// serde_json counts lines from the start of its input, which here is one line.
fn without_line(error: &serde_json::Error) -> String {
    error.to_string().replace(" at line 1 column", " at column")
}

fn object(value: Value) -> Result<Map<String, Value>, Fault> {
    match value {
        Value::Object(columns) => Ok(columns),
        other => {
            let found = match other {
                Value::Array(_) => "a JSON list",
                Value::String(_) => "a JSON string",
                _ => "a JSON value",
            };
            Err(Fault::new(format!("{found}; wanted a JSON object with the row's columns"), ""))
        }
    }
}

/// Looks at what comes without taking it.
fn starts_with_list(reader: &mut Reader) -> std::io::Result<bool> {
    let buffer = reader.fill_buf()?;
    Ok(buffer.iter().find(|b| !b.is_ascii_whitespace() && !b"\xef\xbb\xbf".contains(b)) == Some(&b'['))
}

/// A `.json` file that is one list of objects; a row's place is its number in it.
fn json_list(path: &Path, reader: Reader) -> Rows {
    let mut items = Items::new(reader);
    let mut place = Place { file: Arc::new(path.to_path_buf()), row: 0 };
    Box::new(std::iter::from_fn(move || {
        let item = items.next().map_err(|e| Error::io(place.file.as_ref(), "read", e)).transpose()?;
        place.row += 1;
        let row = item.and_then(|item| {
            let json = item.map_err(|fault| fault.at(&place))?;
            Ok(Unread { place: place.clone(), content: Content::Text { json, is_line: false } })
        });
        Some(row)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(name: &str, bytes: &[u8]) -> Vec<std::result::Result<(usize, Value), String>> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        open(&path, &ColumnsConfig::default())
            .unwrap()
            .map(|row| {
                row.and_then(Unread::read)
                    .map(|row| (row.place.row, Value::Object(row.columns)))
                    .map_err(|e| e.to_string().split_once(name).unwrap().1.to_string())
            })
            .collect()
    }

    #[test]
    fn marks_returns_blanks_and_separators_in_strings_are_no_rows() {
        let text = "\u{feff}{\"a\": 1}\r\n\r\n  \n{\"a\": \"x\u{2028}\u{85}y\"}\r\n{\"a\": 3}";
        let got: Vec<_> = rows("x.jsonl", text.as_bytes()).into_iter().map(Result::unwrap).collect();
        let want = [(1, "1"), (4, "\"x\u{2028}\u{85}y\""), (5, "3")];
        assert_eq!(got.len(), 3);
        for ((row, value), (want_row, want_value)) in got.iter().zip(want) {
            assert_eq!((*row, value["a"].to_string().as_str()), (want_row, want_value));
        }
    }

    #[test]
    fn errors_name_the_line_and_reading_can_go_on() {
        let got = rows("x.jsonl", b"{\"a\": 1}\n{\"a\n[1]\n\"s\xff\"\n{}");
        assert_eq!(got.len(), 5);
        assert!(got[1].as_ref().unwrap_err().starts_with(":2: not valid JSON"), "{got:?}");
        assert!(got[1].as_ref().unwrap_err().contains("at column"), "{got:?}");
        assert_eq!(
            got[2].as_ref().unwrap_err(),
            ":3: a JSON list; wanted a JSON object with the row's columns"
        );
        assert_eq!(got[3].as_ref().unwrap_err(), ":4: not UTF-8 at byte 3 of the line");
        assert_eq!(got[4], Ok((5, serde_json::json!({}))));
    }

    #[test]
    fn json_holds_a_list_or_lines() {
        let want = [Ok((1, serde_json::json!({"a": 1}))), Ok((2, serde_json::json!({"a": 2})))];
        assert_eq!(rows("x.json", b"\xef\xbb\xbf \n[{\"a\": 1},\n {\"a\": 2}]"), want);
        assert_eq!(rows("x.json", b"{\"a\": 1}\n{\"a\": 2}\n"), want);
        assert_eq!(rows("x.json", b""), []);
    }

    #[test]
    fn packed_files_are_read_as_what_they_hold() {
        let text = b"{\"a\": 1}\n{\"a\": 2}\n".repeat(20_000);
        let want = rows("x.jsonl", &text);
        let gz = |part: &[u8]| {
            let mut packer = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            std::io::Write::write_all(&mut packer, part).unwrap();
            packer.finish().unwrap()
        };
        // Files joined by `cat` are several members.
        let (a, b) = text.split_at(text.len() / 2);
        let packed = [gz(a), gz(b)].concat();
        assert_eq!(rows("x.jsonl.gz", &packed), want);
        assert_eq!(rows("x.jsonl.zst", &zstd::encode_all(&text[..], 1).unwrap()), want);
        assert_eq!(rows("x.json.zst", &zstd::encode_all(&b"[{}]"[..], 1).unwrap()).len(), 1);
        let cut = rows("x.jsonl.gz", &packed[..packed.len() - 20]);
        assert!(cut.last().unwrap().is_err(), "a file that was cut is noticed");
        assert_eq!(rows("x.csv.gz", &gz(b"a\n1\n")), [Ok((2, serde_json::json!({"a": "1"})))]);
    }
}
