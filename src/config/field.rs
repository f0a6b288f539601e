//! How one value is read, written and compared, by its type.

use super::read::{Reader, read_table};
use super::reference::Reference;
use super::source::{Node, Value};
use super::table::Table;
use super::write::{Difference, table_differences, table_value};
use super::{InitLoraWeights, TargetModules};
use std::path::PathBuf;

/// A type that can stand at a key.
pub(crate) trait Field: Clone + PartialEq {
    /// The type in messages: "an integer".
    fn kind() -> String;

    /// Reads what the user wrote at `path`; on `None`, the reader has the problem.
    fn read(node: &Node, path: &str, reader: &mut Reader) -> Option<Self>;

    /// What reads back equal.
    fn write(&self) -> toml::Value;

    /// The value in messages and docs.
    fn shown(&self) -> String {
        show(&self.write())
    }

    /// The numbers in it, for [`Rule`](super::table::Rule).
    fn numbers(&self) -> Vec<f64> {
        Vec::new()
    }

    /// The words in it, for [`Rule`](super::table::Rule).
    fn words(&self) -> Vec<&str> {
        Vec::new()
    }

    /// Notes how it differs from `default`.
    fn differences(&self, default: &Self, path: &str, out: &mut Vec<Difference>) {
        if self != default {
            out.push(Difference::new(path, default.shown(), self.shown()));
        }
    }

    /// Notes that it stands where the default is nothing.
    fn appears(&self, path: &str, out: &mut Vec<Difference>) {
        out.push(Difference::new(path, "None".into(), self.shown()));
    }

    /// Adds the pages of the tables in it; `off` by default or not.
    fn describe(_path: &str, _off: bool, _reference: &mut Reference) {}
}

/// A value in one line, large and small numbers in scientific form.
fn show(value: &toml::Value) -> String {
    match value {
        toml::Value::Float(x) if x.is_finite() && *x != 0.0 && !(1e-3..1e6).contains(&x.abs()) => {
            format!("{x:e}")
        }
        toml::Value::String(text) if text == "None" => text.clone(),
        value => value.to_string(),
    }
}

macro_rules! integers {
    ($($ty:ty, $least:expr);+) => {$(
        impl Field for $ty {
            fn kind() -> String {
                "an integer".into()
            }

            fn read(node: &Node, path: &str, reader: &mut Reader) -> Option<Self> {
                let Some(number) = node.integer() else { return reader.wrong_type(node, path, &Self::kind()) };
                let read = number.try_into().ok();
                if read.is_none() {
                    reader.problem(node.place, path, format!("`{path}` is {number}, wanted {}", $least), "");
                }
                read
            }

            fn write(&self) -> toml::Value {
                // TOML's integers end at i64::MAX, and no key means more than that.
                toml::Value::Integer(i64::try_from(*self).unwrap_or(i64::MAX))
            }

            fn numbers(&self) -> Vec<f64> {
                vec![*self as f64]
            }
        }
    )+};
}
integers!(usize, "at least 0"; u64, "at least 0"; i64, "an integer");

impl Field for f64 {
    fn kind() -> String {
        "a number".into()
    }

    fn read(node: &Node, path: &str, reader: &mut Reader) -> Option<Self> {
        let Some(number) = node.number() else { return reader.wrong_type(node, path, &Self::kind()) };
        if !number.is_finite() {
            reader.problem(
                node.place,
                path,
                format!("`{path}` is {}, wanted a finite number", number.shown()),
                "",
            );
        }
        number.is_finite().then_some(number)
    }

    fn write(&self) -> toml::Value {
        (*self).into()
    }

    fn numbers(&self) -> Vec<f64> {
        vec![*self]
    }
}

impl Field for bool {
    fn kind() -> String {
        "`true` or `false`".into()
    }

    fn read(node: &Node, path: &str, reader: &mut Reader) -> Option<Self> {
        node.boolean().or_else(|| reader.wrong_type(node, path, &Self::kind()))
    }

    fn write(&self) -> toml::Value {
        (*self).into()
    }
}

impl Field for String {
    fn kind() -> String {
        "a string".into()
    }

    fn read(node: &Node, path: &str, reader: &mut Reader) -> Option<Self> {
        node.text().map(str::to_string).or_else(|| reader.wrong_type(node, path, &Self::kind()))
    }

    fn write(&self) -> toml::Value {
        self.as_str().into()
    }

    fn words(&self) -> Vec<&str> {
        vec![self]
    }
}

impl Field for PathBuf {
    fn kind() -> String {
        "a path".into()
    }

    fn read(node: &Node, path: &str, reader: &mut Reader) -> Option<Self> {
        node.text().map(PathBuf::from).or_else(|| reader.wrong_type(node, path, &Self::kind()))
    }

    fn write(&self) -> toml::Value {
        self.to_string_lossy().as_ref().into()
    }
}

/// Off by default or off by the string `None`.
impl<T: Field> Field for Option<T> {
    fn kind() -> String {
        format!("{} or `None`", T::kind())
    }

    fn read(node: &Node, path: &str, reader: &mut Reader) -> Option<Self> {
        if node.is_none() { Some(None) } else { T::read(node, path, reader).map(Some) }
    }

    fn write(&self) -> toml::Value {
        self.as_ref().map_or_else(|| "None".into(), T::write)
    }

    fn shown(&self) -> String {
        self.as_ref().map_or_else(|| "None".into(), T::shown)
    }

    fn numbers(&self) -> Vec<f64> {
        self.as_ref().map(T::numbers).unwrap_or_default()
    }

    fn words(&self) -> Vec<&str> {
        self.as_ref().map(T::words).unwrap_or_default()
    }

    fn differences(&self, default: &Self, path: &str, out: &mut Vec<Difference>) {
        match (self, default) {
            (Some(value), Some(default)) => value.differences(default, path, out),
            (Some(value), None) => value.appears(path, out),
            (None, Some(_)) => out.push(Difference::new(path, default.shown(), "None".into())),
            (None, None) => {}
        }
    }

    fn describe(path: &str, off: bool, reference: &mut Reference) {
        T::describe(path, off, reference);
    }
}

impl<T: Field> Field for Vec<T> {
    fn kind() -> String {
        let item = T::kind();
        format!("a list of {}s", item.rsplit(' ').next().unwrap_or(&item))
    }

    fn read(node: &Node, path: &str, reader: &mut Reader) -> Option<Self> {
        let Some(items) = node.items() else { return reader.wrong_type(node, path, &Self::kind()) };
        let read = |(i, item)| T::read(item, &format!("{path}[{i}]"), reader);
        // Each item is read, so that each problem is told.
        let read: Vec<Option<T>> = items.iter().enumerate().map(read).collect();
        read.into_iter().collect()
    }

    fn write(&self) -> toml::Value {
        toml::Value::Array(self.iter().map(T::write).collect())
    }

    fn numbers(&self) -> Vec<f64> {
        self.iter().flat_map(T::numbers).collect()
    }

    fn words(&self) -> Vec<&str> {
        self.iter().flat_map(T::words).collect()
    }
}

/// A table whose keys are the user's own, in the user's order.
impl<T: Field> Field for Vec<(String, T)> {
    fn kind() -> String {
        let item = T::kind();
        format!("a table of {}s", item.rsplit(' ').next().unwrap_or(&item))
    }

    fn read(node: &Node, path: &str, reader: &mut Reader) -> Option<Self> {
        let Some(entries) = node.entries() else { return reader.wrong_type(node, path, &Self::kind()) };
        let read = |(name, item): &(String, Node)| {
            Some((name.clone(), T::read(item, &format!("{path}.\"{name}\""), reader)?))
        };
        let read: Vec<Option<(String, T)>> = entries.iter().map(read).collect();
        read.into_iter().collect()
    }

    fn write(&self) -> toml::Value {
        toml::Value::Table(self.iter().map(|(name, value)| (name.clone(), value.write())).collect())
    }

    fn numbers(&self) -> Vec<f64> {
        self.iter().flat_map(|(_, value)| value.numbers()).collect()
    }
}

impl Field for TargetModules {
    fn kind() -> String {
        "a list of module names, a regular expression or `\"all-linear\"`".into()
    }

    fn read(node: &Node, path: &str, reader: &mut Reader) -> Option<Self> {
        let is_name = |word: &str| word.chars().all(|c| c.is_alphanumeric() || c == '_');
        match (&node.value, node.text()) {
            (_, Some("all-linear")) => Some(Self::AllLinear),
            (Value::Text(text), _) => Some(Self::Regex(text.clone())),
            // One word after a flag: a name, a JSON list or a regular expression.
            (_, Some(word)) if !is_name(word) && !word.starts_with("[\"") => Some(Self::Regex(word.into())),
            (Value::List(_) | Value::Words(_), _) => Vec::read(node, path, reader).map(Self::List),
            _ => reader.wrong_type(node, path, &Self::kind()),
        }
    }

    fn write(&self) -> toml::Value {
        match self {
            Self::List(names) => names.write(),
            Self::Regex(regex) => regex.write(),
            Self::AllLinear => "all-linear".into(),
        }
    }
}

impl Field for InitLoraWeights {
    fn kind() -> String {
        "`true` or `\"gaussian\"`".into()
    }

    fn read(node: &Node, path: &str, reader: &mut Reader) -> Option<Self> {
        match (node.boolean(), node.text()) {
            (Some(true), _) => Some(Self::Default),
            (_, Some("gaussian")) => Some(Self::Gaussian),
            _ => reader.wrong_type(node, path, &Self::kind()),
        }
    }

    fn write(&self) -> toml::Value {
        match self {
            Self::Default => true.into(),
            Self::Gaussian => "gaussian".into(),
        }
    }
}

impl<T: Table> Field for T {
    fn kind() -> String {
        "a table".into()
    }

    fn read(node: &Node, path: &str, reader: &mut Reader) -> Option<Self> {
        read_table(node, path, reader)
    }

    fn write(&self) -> toml::Value {
        table_value(self)
    }

    fn shown(&self) -> String {
        "on".into()
    }

    /// A table's own defaults count, whatever stands above it.
    fn differences(&self, _default: &Self, path: &str, out: &mut Vec<Difference>) {
        table_differences(self, path, out);
    }

    fn appears(&self, path: &str, out: &mut Vec<Difference>) {
        out.push(Difference::new(path, "None".into(), self.shown()));
        table_differences(self, path, out);
    }

    fn describe(path: &str, off: bool, reference: &mut Reference) {
        reference.add::<T>(path, off);
    }
}
