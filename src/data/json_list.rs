//! A `.json` file that is one list: its items, cut out one at a time.
//!
//! Items are found by their brackets and strings alone; whether one is JSON is for its reader to see.

use std::io::{self, BufRead};

use super::row::Fault;
use super::source::Reader;

/// The items of a list.
pub(super) struct Items {
    reader: Reader,
    state: State,
}

#[derive(Clone, Copy, PartialEq)]
enum State {
    Start,
    /// At an item: the first, or one behind a comma.
    Item {
        first: bool,
    },
    /// Behind the list.
    After,
    End,
}

/// Where a scan of an item is.
#[derive(Default)]
struct Scan {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

/// What ended an item.
enum End {
    Comma,
    List,
    File,
}

impl Items {
    pub fn new(reader: Reader) -> Self {
        Self { reader, state: State::Start }
    }

    /// The text of the next item; the inner error is one of the list itself.
    pub fn next(&mut self) -> io::Result<Option<Result<Vec<u8>, Fault>>> {
        if self.state == State::Start {
            // A byte-order mark and white space; that a list begins was seen before.
            self.reader.read_until(b'[', &mut Vec::new())?;
            self.state = State::Item { first: true };
        }
        if let State::Item { first } = self.state {
            let mut item = Vec::new();
            let end = self.item(&mut item)?;
            self.state = match end {
                End::Comma => State::Item { first: false },
                End::List => State::After,
                End::File => State::End,
            };
            match (end, item.trim_ascii().is_empty()) {
                (End::File, _) => return Ok(Some(Err(unfinished()))),
                (_, false) => return Ok(Some(Ok(item))),
                // `[]`
                (End::List, true) if first => {}
                _ => return Ok(Some(Err(Fault::new("not valid JSON: a comma without a row", "")))),
            }
        }
        let after = std::mem::replace(&mut self.state, State::End) == State::After;
        if after && self.something_follows()? {
            let hint = "A `.json` file holds one list, or an object on each line.";
            return Ok(Some(Err(Fault::new("not valid JSON: something follows the list", hint))));
        }
        Ok(None)
    }

    /// Reads up to what ends the item, and over it.
    fn item(&mut self, item: &mut Vec<u8>) -> io::Result<End> {
        let mut scan = Scan::default();
        loop {
            let buffer = self.reader.fill_buf()?;
            if buffer.is_empty() {
                return Ok(End::File);
            }
            let end = buffer.iter().position(|&byte| scan.ends_at(byte));
            let taken = end.unwrap_or(buffer.len());
            item.extend_from_slice(&buffer[..taken]);
            let comma = end.map(|at| buffer[at] == b',');
            self.reader.consume(taken + usize::from(end.is_some()));
            match comma {
                Some(true) => return Ok(End::Comma),
                Some(false) => return Ok(End::List),
                None => {}
            }
        }
    }

    fn something_follows(&mut self) -> io::Result<bool> {
        loop {
            let buffer = self.reader.fill_buf()?;
            if buffer.is_empty() || !buffer.trim_ascii().is_empty() {
                return Ok(!buffer.is_empty());
            }
            let taken = buffer.len();
            self.reader.consume(taken);
        }
    }
}

impl Scan {
    /// Whether the item ends before this byte.
    fn ends_at(&mut self, byte: u8) -> bool {
        if self.in_string {
            let escaped = std::mem::take(&mut self.escaped);
            match byte {
                b'\\' if !escaped => self.escaped = true,
                b'"' if !escaped => self.in_string = false,
                _ => {}
            }
            return false;
        }
        match byte {
            b'"' => self.in_string = true,
            b'{' | b'[' => self.depth += 1,
            b',' | b']' | b'}' if self.depth == 0 => return byte != b'}',
            b'}' | b']' => self.depth -= 1,
            _ => {}
        }
        false
    }
}

fn unfinished() -> Fault {
    Fault::new(
        "not valid JSON: the file ends inside the list",
        "If a download was cut, fetch the file again.",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Items as text, faults as their messages, read through a buffer of a few bytes.
    fn items(text: &str) -> Vec<String> {
        let reader: Box<dyn io::Read + Send> = Box::new(io::Cursor::new(text.as_bytes().to_vec()));
        let mut items = Items::new(io::BufReader::with_capacity(5, reader));
        let mut got = Vec::new();
        while let Some(item) = items.next().unwrap() {
            got.push(match item {
                Ok(item) => String::from_utf8(item).unwrap().trim().to_string(),
                Err(fault) => fault.at_file("x".as_ref()).to_string(),
            });
        }
        got
    }

    #[test]
    fn items_end_at_their_own_commas() {
        assert_eq!(items("\u{feff} [ ]\n"), [""; 0]);
        assert_eq!(items("[{}]"), ["{}"]);
        let text = r#" [{"a": [1, {"b": "],}\"\\"}]},"x,]", 3 , [[],[]] ]  "#;
        assert_eq!(items(text), [r#"{"a": [1, {"b": "],}\"\\"}]}"#, r#""x,]""#, "3", "[[],[]]"]);
    }

    #[test]
    fn lists_that_are_none_are_faults() {
        let last = |text| items(text).pop().unwrap();
        for cut in [r#"[{"a": "#, "[{},", "[{}, {", "["] {
            assert!(last(cut).contains("ends inside the list"), "{cut}");
        }
        for comma in ["[{},]", "[,{}]", "[{},,{}]"] {
            assert!(items(comma).iter().any(|item| item.contains("a comma without a row")), "{comma}");
        }
        assert!(last("[{}] {}").contains("something follows the list"));
    }
}
