//! From tables back to text, and to the list of what differs from the defaults.

use super::field::Field;
use super::read::join;
use super::table::{Key, Table, Tag, Walker};

/// A key whose value is not its default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The key with its sections: `optim.lr`.
    pub key: String,
    /// The default, as it would stand in a file.
    pub default: String,
    /// The value; `on` for a section that is off by default.
    pub value: String,
}

impl Difference {
    pub(crate) fn new(key: &str, default: String, value: String) -> Self {
        Difference { key: key.to_string(), default, value }
    }
}

/// Every key of a table, those that are switched off as the string `None`.
pub(crate) fn table_value<T: Table>(table: &T) -> toml::Value {
    let mut writer = Writer(toml::Table::new());
    table.clone().walk(&mut writer);
    toml::Value::Table(writer.0)
}

struct Writer(toml::Table);

impl Walker for Writer {
    fn key<T: Field>(&mut self, key: &Key, value: &mut T, _default: T) {
        self.0.insert(key.name.into(), value.write());
    }

    fn tag(&mut self, tags: &[Tag], current: usize) -> usize {
        self.0.insert("type".into(), tags[current].name.into());
        current
    }
}

/// Notes each key of a table that isn't at its default.
pub(crate) fn table_differences<T: Table>(table: &T, path: &str, out: &mut Vec<Difference>) {
    table.clone().walk(&mut Comparer { path, out });
}

struct Comparer<'a> {
    path: &'a str,
    out: &'a mut Vec<Difference>,
}

impl Walker for Comparer<'_> {
    fn key<T: Field>(&mut self, key: &Key, value: &mut T, default: T) {
        value.differences(&default, &join(self.path, key.name), self.out);
    }

    fn tag(&mut self, tags: &[Tag], current: usize) -> usize {
        if current != 0 {
            let quote = |tag: &Tag| format!("\"{}\"", tag.name);
            let key = join(self.path, "type");
            self.out.push(Difference::new(&key, quote(&tags[0]), quote(&tags[current])));
        }
        current
    }
}
