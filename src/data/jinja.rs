//! Jinja as transformers runs it: the environment, `tojson`, Python's printing and string methods.
//!
//! transformers renders chat templates with `ImmutableSandboxedEnvironment(trim_blocks=True,
//! lstrip_blocks=True)`, loop controls, `raise_exception`, `strftime_now`, and a `tojson` that is
//! `json.dumps(ensure_ascii=False)` (utils/chat_template_utils.py). What minijinja does otherwise is
//! set right here.

use std::fmt::Write as _;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Serde, ValueKind, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use time::OffsetDateTime;

/// Instructions (or 64 bytes of text each) that one rendering may take, so that a template which loops on and on is an
/// error. Qwen3's own takes some 200 a message.
const FUEL: u64 = 50_000_000;

/// An environment without templates.
pub(super) fn environment() -> Environment<'static> {
    let mut env = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    env.set_syntax(syntax.expect("only white space differs from the default"));
    env.set_fuel(Some(FUEL));
    env.set_formatter(|out, _, value| {
        let mut text = String::new();
        python_str(&mut text, value)?;
        out.write_str(&text).map_err(Error::from)
    });
    env.set_unknown_method_callback(method);
    env.add_filter("tojson", tojson);
    env.add_filter("string", |value: Value| -> Result<String, Error> {
        let mut text = String::new();
        python_str(&mut text, &value)?;
        Ok(text)
    });
    env.add_filter("trim", |text: String, chars: Option<String>| strip(&text, chars.as_deref(), true, true));
    // To minijinja none is an empty list; to Python it isn't iterable.
    env.add_test("iterable", |value: Value| !value.is_none() && value.try_iter().is_ok());
    env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, message))
    });
    env.add_function("strftime_now", |format: String| strftime(&format, now()));
    env
}

/// A JSON value for a template; the order of keys stays.
pub(super) fn from_json(value: &serde_json::Value) -> Value {
    Value::from(Serde(value))
}

fn now() -> OffsetDateTime {
    OffsetDateTime::now_local().unwrap_or_else(|_| OffsetDateTime::now_utc())
}

/// The date that `strftime_now` prints.
pub(super) fn today() -> String {
    now().date().to_string()
}

fn strftime(format: &str, when: OffsetDateTime) -> Result<String, Error> {
    let fault = |e: String| Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {e}"));
    let items = time::format_description::parse_strftime_owned(format).map_err(|e| fault(e.to_string()))?;
    when.format(&items).map_err(|e| fault(e.to_string()))
}

/// `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
fn tojson(value: Value, positional: Rest<Value>, options: Kwargs) -> Result<Value, Error> {
    let ascii = match positional.first() {
        Some(value) => value.is_true(),
        None => options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    let indent = match options.get::<Option<Value>>("indent")? {
        Some(value) if value.is_none() => None,
        Some(value) => Some(match value.as_str() {
            Some(text) => text.to_string(),
            None => " ".repeat(value.as_usize().unwrap_or(0)),
        }),
        None => None,
    };
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    let (item, key) = match separators.as_deref() {
        Some([item, key]) => (item.clone(), key.clone()),
        _ if indent.is_some() => (",".to_string(), ": ".to_string()),
        _ => (", ".to_string(), ": ".to_string()),
    };
    let mut json = Json { out: String::new(), ascii, indent, item, key, sort_keys };
    json.value(&value, 0)?;
    Ok(Value::from_safe_string(json.out))
}

/// Python's `json.dumps`.
struct Json {
    out: String,
    ascii: bool,
    indent: Option<String>,
    item: String,
    key: String,
    sort_keys: bool,
}

impl Json {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self.out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.out.push_str(&number(value, ["NaN", "Infinity", "-Infinity"])),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Map => {
                let mut pairs = Vec::new();
                for key in value.try_iter()?.checked() {
                    let key = key?;
                    pairs.push((key_text(&key), value.get_item(&key)?));
                }
                if self.sort_keys {
                    pairs.sort_by(|a, b| a.0.cmp(&b.0));
                }
                self.container('{', '}', depth, pairs.into_iter(), |json, (key, item)| {
                    json.string(&key);
                    let separator = json.key.clone();
                    json.out.push_str(&separator);
                    json.value(&item, depth + 1)
                })?;
            }
            ValueKind::Seq | ValueKind::Iterable => {
                let items = value.try_iter()?.checked().collect::<Result<Vec<_>, _>>()?;
                self.container('[', ']', depth, items.into_iter(), |json, item| {
                    json.value(&item, depth + 1)
                })?;
            }
            kind => {
                let message = format!("tojson: a value of type {kind} is not JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    fn container<T>(
        &mut self,
        open: char,
        close: char,
        depth: usize,
        items: impl ExactSizeIterator<Item = T>,
        mut write: impl FnMut(&mut Self, T) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        let empty = items.len() == 0;
        for (i, item) in items.enumerate() {
            if i > 0 {
                let separator = self.item.clone();
                self.out.push_str(&separator);
            }
            self.new_line(depth + 1);
            write(self, item)?;
        }
        if !empty {
            self.new_line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out.push_str(&indent.repeat(depth));
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ascii && c > '~') => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        self.out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

fn key_text(key: &Value) -> String {
    match key.kind() {
        ValueKind::None => "null".into(),
        ValueKind::Bool => if key.is_true() { "true" } else { "false" }.into(),
        ValueKind::Number => number(key, ["NaN", "Infinity", "-Infinity"]),
        _ => key.to_string(),
    }
}

/// A number as Python prints it; `odd` are the names of NaN and the infinities.
fn number(value: &Value, odd: [&str; 3]) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let x = f64::try_from(value.clone()).unwrap_or(f64::NAN);
    if x.is_nan() {
        return odd[0].into();
    }
    if x.is_infinite() {
        return odd[if x > 0.0 { 1 } else { 2 }].into();
    }
    // Shortest digits that read back equal, as in Python; an exponent below 1e-4 and from 1e16 on.
    let scientific = format!("{x:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if x != 0.0 && !(-4..16).contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        return format!("{digits}e{sign}{:02}", exponent.abs());
    }
    let plain = format!("{x}");
    if plain.contains('.') { plain } else { plain + ".0" }
}

/// Python's `str(value)`.
fn python_str(out: &mut String, value: &Value) -> Result<(), Error> {
    match value.as_str() {
        Some(text) => out.push_str(text),
        None if value.is_undefined() => {}
        None => python_repr(out, value)?,
    }
    Ok(())
}

/// Python's `repr(value)`.
fn python_repr(out: &mut String, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value, ["nan", "inf", "-inf"])),
        ValueKind::String => string_repr(out, value.as_str().unwrap_or_default()),
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter()?.checked().enumerate() {
                let key = key?;
                out.push_str(if i > 0 { ", " } else { "" });
                python_repr(out, &key)?;
                out.push_str(": ");
                python_repr(out, &value.get_item(&key)?)?;
            }
            out.push('}');
        }
        ValueKind::Seq => {
            let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
            out.push(open);
            for (i, item) in value.try_iter()?.checked().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                python_repr(out, &item?)?;
            }
            out.push_str(if value.is_tuple() && value.len() == Some(1) { "," } else { "" });
            out.push(close);
        }
        _ => write!(out, "{value}")?,
    }
    Ok(())
}

fn string_repr(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if !is_printable(c) => out.push_str(&match c as u32 {
                code @ ..=0xff => format!("\\x{code:02x}"),
                code @ ..=0xffff => format!("\\u{code:04x}"),
                code => format!("\\U{code:08x}"),
            }),
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// Python's `str.isprintable`, as far as assigned characters go.
fn is_printable(c: char) -> bool {
    let invisible = matches!(c,
        '\u{ad}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
        | '\u{e000}'..='\u{f8ff}' | '\u{e0000}'..='\u{e0fff}' | '\u{f0000}'..);
    c == ' ' || !(c.is_control() || c.is_whitespace() || invisible)
}

/// What Python's `str.isspace` takes for white space beyond Unicode's White_Space.
fn is_python_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

fn strip(text: &str, chars: Option<&str>, left: bool, right: bool) -> String {
    let gone = |c: char| chars.map_or_else(|| is_python_space(c), |set| set.contains(c));
    let text = if left { text.trim_start_matches(gone) } else { text };
    (if right { text.trim_end_matches(gone) } else { text }).to_string()
}

/// Python's methods: those that minijinja-contrib lacks or does differently, then its own.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    if let Some(text) = value.as_str() {
        match name {
            "strip" | "lstrip" | "rstrip" => {
                let (chars,): (Option<&str>,) = from_args(args)?;
                return Ok(strip(text, chars, name != "rstrip", name != "lstrip").into());
            }
            "split" | "rsplit" => return split(text, args, name == "rsplit"),
            "splitlines" => return splitlines(text, args),
            "removeprefix" => {
                let (prefix,): (&str,) = from_args(args)?;
                return Ok(text.strip_prefix(prefix).unwrap_or(text).into());
            }
            "removesuffix" => {
                let (suffix,): (&str,) = from_args(args)?;
                return Ok(text.strip_suffix(suffix).unwrap_or(text).into());
            }
            "partition" | "rpartition" => {
                let (separator,): (&str,) = from_args(args)?;
                return Ok(partition(text, separator, name == "rpartition")
                    .into_iter()
                    .map(Value::from)
                    .collect());
            }
            _ => {}
        }
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args)
}

/// `str.split` and `str.rsplit`.
fn split(text: &str, args: &[Value], from_right: bool) -> Result<Value, Error> {
    let (separator, limit, options): (Option<Value>, Option<i64>, Kwargs) = from_args(args)?;
    let separator = separator.or(options.get::<Option<Value>>("sep")?).filter(|v| !v.is_none());
    let limit = limit.or(options.get::<Option<i64>>("maxsplit")?).unwrap_or(-1);
    options.assert_all_used()?;
    let limit = usize::try_from(limit).map_or(usize::MAX, |n| n.saturating_add(1));
    let Some(separator) = separator else {
        return Ok(split_at_space(text, limit, from_right).into());
    };
    let separator = separator.as_str().filter(|s| !s.is_empty());
    let separator = separator.ok_or_else(|| {
        Error::new(ErrorKind::InvalidOperation, "split: the separator is no string, or empty")
    })?;
    let mut parts: Vec<&str> = if from_right {
        text.rsplitn(limit, separator).collect()
    } else {
        text.splitn(limit, separator).collect()
    };
    if from_right {
        parts.reverse();
    }
    Ok(parts.into_iter().map(Value::from).collect())
}

/// `str.split(None, limit - 1)`: at runs of white space, none at the ends.
fn split_at_space(text: &str, limit: usize, from_right: bool) -> Vec<Value> {
    let mut parts = Vec::new();
    let mut rest = text.trim_matches(is_python_space);
    while !rest.is_empty() {
        let cut = if from_right { rest.rfind(is_python_space) } else { rest.find(is_python_space) };
        let (Some(cut), true) = (cut, parts.len() + 1 < limit) else {
            parts.push(Value::from(rest));
            break;
        };
        let (left, right) = rest.split_at(cut);
        if from_right {
            parts.push(right.trim_start_matches(is_python_space).into());
            rest = left.trim_end_matches(is_python_space);
        } else {
            parts.push(left.into());
            rest = right.trim_start_matches(is_python_space);
        }
    }
    if from_right {
        parts.reverse();
    }
    parts
}

/// `str.splitlines`: also at the separators that Rust's `lines` doesn't know.
fn splitlines(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (keep, options): (Option<bool>, Kwargs) = from_args(args)?;
    let keep = keep.or(options.get::<Option<bool>>("keepends")?).unwrap_or(false);
    let ends = ['\n', '\r', '\u{b}', '\u{c}', '\u{1c}', '\u{1d}', '\u{1e}', '\u{85}', '\u{2028}', '\u{2029}'];
    let mut lines = Vec::new();
    let mut rest = text;
    while let Some(at) = rest.find(ends) {
        let end = &rest[at..];
        let width = if end.starts_with("\r\n") { 2 } else { end.chars().next().map_or(1, char::len_utf8) };
        lines.push(Value::from(if keep { &rest[..at + width] } else { &rest[..at] }));
        rest = &rest[at + width..];
    }
    if !rest.is_empty() {
        lines.push(rest.into());
    }
    Ok(lines.into())
}

fn partition<'a>(text: &'a str, separator: &'a str, from_right: bool) -> [&'a str; 3] {
    let split = if from_right { text.rsplit_once(separator) } else { text.split_once(separator) };
    match split {
        Some((left, right)) => [left, separator, right],
        None if from_right => ["", "", text],
        None => [text, "", ""],
    }
}

#[cfg(test)]
mod tests;
