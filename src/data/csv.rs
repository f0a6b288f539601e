//! Rows of a csv file (RFC 4180, with a header line): every value is a string, an empty one is null.

use std::io::BufRead;
use std::path::Path;
use std::sync::Arc;

use csv_core::ReadRecordResult;
use serde_json::{Map, Value};

use super::row::{Fault, Place};
use super::source::{Reader, Rows, Unread};
use crate::error::{Error, Result};

/// The rows of a csv file; a row's place is the line on which it begins.
pub(super) fn rows(path: &Path, reader: Reader) -> Rows {
    let file = Arc::new(path.to_path_buf());
    let mut records = Records::new(reader);
    let mut header: Option<Vec<String>> = None;
    Box::new(std::iter::from_fn(move || {
        loop {
            let place = Place { file: file.clone(), row: records.line() };
            let fields = match records.next() {
                Ok(Some(record)) => texts(record).and_then(|fields| records.closed().map(|()| fields)),
                Ok(None) => return None,
                Err(error) => return Some(Err(Error::io(file.as_ref(), "read", error))),
            };
            match (fields, &header) {
                (Err(fault), _) => return Some(Err(fault.at(&place))),
                (Ok(names), None) => match twice(&names) {
                    Some(fault) => return Some(Err(fault.at(&place))),
                    None => header = Some(names),
                },
                (Ok(fields), Some(names)) => {
                    let columns = object(names, fields).map_err(|fault| fault.at(&place));
                    return Some(columns.map(|columns| Unread::columns(place, columns, false)));
                }
            }
        }
    }))
}

/// A csv file being read, record by record.
struct Records {
    reader: Reader,
    parser: csv_core::Reader,
    text: Vec<u8>,
    /// Where each field ends in `text`.
    ends: Vec<usize>,
    /// The file ends inside double quotes.
    open: bool,
}

impl Records {
    fn new(reader: Reader) -> Self {
        Self {
            reader,
            parser: csv_core::Reader::new(),
            text: vec![0; 1 << 12],
            ends: vec![0; 16],
            open: false,
        }
    }

    /// The 1-based line on which the next record begins.
    fn line(&mut self) -> usize {
        // The parser leaves the `\n` of `\r\n`, and blank lines, to its next call.
        let waiting = self.reader.fill_buf().unwrap_or_default();
        let ends = waiting.iter().take_while(|byte| b"\r\n".contains(byte));
        self.parser.line() as usize + ends.filter(|&&byte| byte == b'\n').count()
    }

    /// The fields of the next record.
    fn next(&mut self) -> std::io::Result<Option<Vec<&[u8]>>> {
        let (mut text, mut fields, mut begun) = (0, 0, false);
        loop {
            let input = self.reader.fill_buf()?;
            // The parser ends a record with the file, inside quotes too; a line's end it takes as such only outside.
            let last = input.is_empty() && begun && !self.open;
            let given = if last { b"\n" } else { input };
            let (result, read, written, ended) =
                self.parser.read_record(given, &mut self.text[text..], &mut self.ends[fields..]);
            begun |= given[..read].iter().any(|byte| !b"\r\n".contains(byte));
            self.open |= last && matches!(result, ReadRecordResult::InputEmpty);
            if !last {
                self.reader.consume(read);
            }
            text += written;
            fields += ended;
            match result {
                ReadRecordResult::InputEmpty => {}
                ReadRecordResult::OutputFull => self.text.resize(2 * self.text.len(), 0),
                ReadRecordResult::OutputEndsFull => self.ends.resize(2 * self.ends.len(), 0),
                ReadRecordResult::End => return Ok(None),
                ReadRecordResult::Record => {
                    let starts = [0].into_iter().chain(self.ends.iter().copied());
                    let ends = self.ends[..fields].iter();
                    return Ok(Some(starts.zip(ends).map(|(start, &end)| &self.text[start..end]).collect()));
                }
            }
        }
    }
}

impl Records {
    /// Whether the last record had its closing quote.
    fn closed(&self) -> Result<(), Fault> {
        let hint = "Close it, or write a quote that belongs to the text twice (`\"\"`).";
        if self.open { Err(Fault::new("the file ends inside double quotes", hint)) } else { Ok(()) }
    }
}

fn texts(record: Vec<&[u8]>) -> Result<Vec<String>, Fault> {
    let text = |field: &[u8]| {
        std::str::from_utf8(field).map(str::to_string).map_err(|_| {
            Fault::new("not UTF-8", "Convert the file, for example with `iconv -f latin1 -t utf-8`.")
        })
    };
    record.into_iter().map(text).collect()
}

/// Two columns of one name: the second would hide the first.
fn twice(names: &[String]) -> Option<Fault> {
    let (_, name) =
        names.iter().enumerate().find(|(i, name)| !name.is_empty() && names[..*i].contains(name))?;
    Some(Fault::new(format!("the header has `{name}` twice"), "Give each column a name of its own."))
}

fn object(names: &[String], fields: Vec<String>) -> Result<Map<String, Value>, Fault> {
    if fields.len() != names.len() {
        return Err(Fault::new(
            format!("{} values, but the header has {}", fields.len(), names.len()),
            "Values with commas, quotes or line ends stand in double quotes.",
        ));
    }
    let value = |field: String| if field.is_empty() { Value::Null } else { Value::String(field) };
    Ok(names.iter().cloned().zip(fields.into_iter().map(value)).collect())
}

#[cfg(test)]
mod tests {
    use crate::config::ColumnsConfig;
    use serde_json::{Value, json};

    fn rows(text: &[u8]) -> Vec<Result<(usize, Value), String>> {
        let file = tempfile::Builder::new().suffix(".csv").tempfile().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let rows = crate::data::source::open(file.path(), &ColumnsConfig::default()).unwrap();
        let shown = |e: crate::Error| e.to_string().split_once(".csv").unwrap().1.to_string();
        rows.map(|row| {
            row.and_then(|r| r.read()).map(|r| (r.place.row, Value::Object(r.columns))).map_err(shown)
        })
        .collect()
    }

    #[test]
    fn quotes_lines_and_empty_values() {
        let text = "\u{feff}prompt,completion\r\n\"a, \"\"b\"\"\nc\",é\r\nd,\r\n";
        let want = [
            Ok((2, json!({"prompt": "a, \"b\"\nc", "completion": "é"}))),
            Ok((4, json!({"prompt": "d", "completion": null}))),
        ];
        assert_eq!(rows(text.as_bytes()), want);
        assert_eq!(rows(b""), []);
    }

    #[test]
    fn faults_name_the_line() {
        let got = rows(b"a,b\n1,2\n3\n\xff,4\n");
        assert_eq!(got[1], Err(":3: 1 values, but the header has 2".into()));
        assert_eq!(got[2], Err(":4: not UTF-8".into()));
        let got = rows(b"a,b\n1,2\n3,\"4\n5,6\n");
        assert_eq!(got[1..], [Err(":3: the file ends inside double quotes".into())]);
        for whole in ["a,b\n1,2", "a,b\n1,\"2\"", "a,b\r\n1,2\r\n\r\n", "a,b\n1,\"2\"\n\n"] {
            assert_eq!(rows(whole.as_bytes()), [Ok((2, json!({"a": "1", "b": "2"})))], "{whole:?}");
        }
        assert_eq!(rows(b"a,b,a\n1,2,3\n")[0], Err(":1: the header has `a` twice".into()));
    }
}
