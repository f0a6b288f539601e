//! Which part of a rendered chat came from which message: marks put into the template's source.
//!
//! Each `{% for NAME in … %}` of a template gets a mark before its body and one after it. When the
//! loop runs over messages, the marks say which message the text between them belongs to; over
//! anything else they are silent. `{% generation %}` blocks are marked alike. Marks are a private-use
//! character that the conversation doesn't hold, with a number in between; they are taken out of the
//! rendered text again. Nothing is ever searched for in the words of a message.

use std::ops::Range;

/// Names of the functions that print marks; the renderer provides them.
pub(super) const BEGIN: &str = "__embertune_begin";
/// After a loop's body.
pub(super) const END: &str = "__embertune_end";
/// At both ends of a `{% generation %}` block.
pub(super) const GENERATION: &str = "__embertune_generation";

/// A template's source with marks, and without (but with `{% generation %}` made harmless).
#[derive(Debug, PartialEq)]
pub(super) struct Traced {
    pub plain: String,
    pub marked: String,
    /// There are `{% generation %}` blocks.
    pub has_generation: bool,
}

/// Puts marks into a template's source.
pub(super) fn trace(source: &str) -> Traced {
    let mut traced = Traced { plain: String::new(), marked: String::new(), has_generation: false };
    // Open loops: the number of a marked one, `None` for others.
    let mut loops: Vec<Option<usize>> = Vec::new();
    let mut count = 0;
    let mut rest = source;
    while let Some(tag) = next_tag(rest) {
        let (before, from_tag) = rest.split_at(tag.start);
        let (raw, after) = from_tag.split_at(tag.end - tag.start);
        rest = after;
        traced.both(before);
        let block = Block::parse(raw);
        match block.as_ref().map_or("", |b| b.keyword) {
            "for" => {
                let block = block.as_ref().expect("it has a keyword");
                let name = loop_name(block.body);
                traced.both(raw);
                loops.push(name.map(|_| count));
                if let Some(name) = name {
                    // A block of its own at the end, so that newlines are trimmed as they were.
                    let call =
                        format!("{{{{ {BEGIN}({count}, {name}) }}}}{}", block.nothing("", block.right));
                    traced.marked.push_str(&call);
                    count += 1;
                }
            }
            "endfor" => {
                let block = block.as_ref().expect("it has a keyword");
                if let Some(Some(number)) = loops.pop() {
                    let call = format!("{}{{{{ {END}({number}) }}}}", block.nothing(block.left, ""));
                    traced.marked.push_str(&call);
                }
                traced.both(raw);
            }
            keyword @ ("generation" | "endgeneration") => {
                let block = block.as_ref().expect("it has a keyword");
                let call = format!("{{{{ {GENERATION}({}) }}}}", keyword == "generation");
                traced.marked.push_str(&block.nothing(block.left, ""));
                traced.marked.push_str(&call);
                traced.marked.push_str(&block.nothing("", block.right));
                traced.plain.push_str(&block.nothing(block.left, block.right));
                traced.has_generation = true;
            }
            "raw" => {
                let end = end_of_raw(rest);
                traced.both(raw);
                traced.both(&rest[..end]);
                rest = &rest[end..];
            }
            _ => traced.both(raw),
        }
    }
    traced.both(rest);
    traced
}

impl Traced {
    fn both(&mut self, text: &str) {
        self.plain.push_str(text);
        self.marked.push_str(text);
    }
}

/// A `{% … %}` tag.
struct Block<'a> {
    left: &'a str,
    right: &'a str,
    keyword: &'a str,
    /// What follows the keyword.
    body: &'a str,
}

impl<'a> Block<'a> {
    fn parse(raw: &'a str) -> Option<Self> {
        let inner = raw.strip_prefix("{%")?.strip_suffix("%}")?;
        let (left, inner) = inner.split_at(inner.starts_with(['-', '+']).into());
        let (inner, right) = inner.split_at(inner.len() - usize::from(inner.ends_with(['-', '+'])));
        let inner = inner.trim();
        let end = inner.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(inner.len());
        let (keyword, body) = inner.split_at(end);
        Some(Self { left, right, keyword, body })
    }

    /// A block that does nothing but trim white space as this one does.
    fn nothing(&self, left: &str, right: &str) -> String {
        format!("{{%{left} set __embertune = 0 {right}%}}")
    }
}

/// The loop variable of `for NAME in …`; `None` for several names and for recursive loops.
fn loop_name(body: &str) -> Option<&str> {
    let (name, rest) = body.split_once(" in ")?;
    let name = name.trim();
    let is_name = !name.is_empty() && name.chars().all(|c| c.is_alphanumeric() || c == '_');
    (is_name && !rest.trim_end().ends_with("recursive")).then_some(name)
}

/// The next `{{ … }}`, `{% … %}` or `{# … #}` in `text`.
fn next_tag(text: &str) -> Option<Range<usize>> {
    let bytes = text.as_bytes();
    let start = (0..bytes.len().saturating_sub(1))
        .find(|&i| bytes[i] == b'{' && matches!(bytes[i + 1], b'{' | b'%' | b'#'))?;
    let end = match bytes[start + 1] {
        b'#' => text[start..].find("#}").map(|i| start + i + 2),
        b'%' => end_of_tag(bytes, start + 2, b"%}"),
        _ => end_of_tag(bytes, start + 2, b"}}"),
    };
    // An unclosed tag is the renderer's to report.
    Some(start..end.unwrap_or(text.len()))
}

/// Past the closing `end`, outside of strings and brackets.
fn end_of_tag(bytes: &[u8], from: usize, end: &[u8; 2]) -> Option<usize> {
    let mut depth = 0usize;
    let mut quote = None;
    let mut i = from;
    while i < bytes.len() {
        match (quote, bytes[i]) {
            (Some(_), b'\\') => i += 1,
            (Some(q), b) if b == q => quote = None,
            (Some(_), _) => {}
            (None, b @ (b'"' | b'\'')) => quote = Some(b),
            (None, _) if depth == 0 && bytes[i..].starts_with(end) => return Some(i + 2),
            (None, b'{' | b'[' | b'(') => depth += 1,
            (None, b'}' | b']' | b')') => depth = depth.saturating_sub(1),
            _ => {}
        }
        i += 1;
    }
    None
}

/// Where the `{% endraw %}` begins.
fn end_of_raw(text: &str) -> usize {
    let mut from = 0;
    while let Some(i) = text[from..].find("{%") {
        let start = from + i;
        let inner = text[start + 2..].trim_start_matches(['-', '+']).trim_start();
        if inner.starts_with("endraw") {
            return start;
        }
        from = start + 2;
    }
    text.len()
}

/// A private-use character that occurs in no `text`.
pub(super) fn free_character(text: &str) -> char {
    ('\u{f0000}'..='\u{ffffd}').find(|&c| !text.contains(c)).unwrap_or('\u{10fffd}')
}

/// The text that one pass through a loop over messages printed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Region {
    pub message: usize,
    pub range: Range<usize>,
}

/// A rendered text without its marks, and what they say.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Unmarked {
    pub text: String,
    pub regions: Vec<Region>,
    /// Insides of `{% generation %}` blocks.
    pub generations: Vec<Range<usize>>,
}

/// Prints the mark that begins the part of message `message` in loop `number`.
pub(super) fn begin_mark(mark: char, number: usize, message: usize) -> String {
    format!("{mark}b{number}:{message}{mark}")
}

/// Prints the mark that ends a pass through loop `number`.
pub(super) fn end_mark(mark: char, number: usize) -> String {
    format!("{mark}e{number}{mark}")
}

/// Prints the mark at an end of a `{% generation %}` block.
pub(super) fn generation_mark(mark: char, begins: bool) -> String {
    format!("{mark}{}{mark}", if begins { "g" } else { "h" })
}

/// Takes the marks out of a rendered text.
pub(super) fn unmark(marked: &str, mark: char) -> Unmarked {
    let mut out = Unmarked::default();
    // Open passes: loop, message, start.
    let mut open: Vec<(usize, usize, usize)> = Vec::new();
    let mut generation = None;
    for (i, part) in marked.split(mark).enumerate() {
        let at = out.text.len();
        if i % 2 == 0 {
            out.text.push_str(part);
            continue;
        }
        let (kind, numbers) = part.split_at(part.len().min(1));
        match kind {
            "b" => {
                let (number, message) = numbers.split_once(':').unwrap_or_default();
                let (number, message) = (parse(number), parse(message));
                // `continue` and `break` leave passes open: the next of the same loop closes them.
                close(&mut open, &mut out.regions, number, at);
                open.push((number, message, at));
            }
            "e" => close(&mut open, &mut out.regions, parse(numbers), at),
            "g" => generation = Some(at),
            _ => out.generations.extend(generation.take().map(|start| start..at)),
        }
    }
    let end = out.text.len();
    out.regions.extend(open.into_iter().map(|(_, message, start)| Region { message, range: start..end }));
    out
}

fn parse(number: &str) -> usize {
    number.parse().expect("marks are ours and hold numbers")
}

fn close(open: &mut Vec<(usize, usize, usize)>, regions: &mut Vec<Region>, number: usize, at: usize) {
    if let Some(first) = open.iter().position(|&(n, ..)| n == number) {
        regions.extend(open.drain(first..).map(|(_, message, start)| Region { message, range: start..at }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_stand_inside_loops_and_trim_as_the_tags_do() {
        let traced = trace("{%- for m in messages -%}\n{{ m['%}'] }}{# for #}\n{%- endfor %}\nx");
        assert_eq!(traced.plain, "{%- for m in messages -%}\n{{ m['%}'] }}{# for #}\n{%- endfor %}\nx");
        assert_eq!(
            traced.marked,
            "{%- for m in messages -%}{{ __embertune_begin(0, m) }}{% set __embertune = 0 -%}\n\
             {{ m['%}'] }}{# for #}\n\
             {%- set __embertune = 0 %}{{ __embertune_end(0) }}{%- endfor %}\nx"
        );
        for untouched in [
            "{% for k, v in d %}{% endfor %}",
            "{% for x in t recursive %}{% endfor %}",
            "{% raw %}{% for x in y %}{% endraw %}{{ {'a': {'b': 1}} }}",
            "{{ 'a }} {% for' }}",
            "plain",
            "{% for unclosed in",
        ] {
            assert_eq!(trace(untouched).marked, untouched);
        }
    }

    #[test]
    fn generation_tags_become_marks() {
        let traced = trace("a{% generation -%} b {%- endgeneration %}c");
        assert!(traced.has_generation);
        assert_eq!(traced.plain, "a{% set __embertune = 0 -%} b {%- set __embertune = 0 %}c");
    }

    #[test]
    fn passes_left_by_continue_end_where_the_next_begins() {
        let mark = '\u{f0000}';
        let text = [
            begin_mark(mark, 0, 0),
            "a".into(),
            begin_mark(mark, 0, 1),
            begin_mark(mark, 1, 7),
            "b".into(),
            end_mark(mark, 0),
            "c".into(),
            begin_mark(mark, 0, 2),
            "d".into(),
        ]
        .concat();
        let got = unmark(&text, mark);
        assert_eq!(got.text, "abcd");
        let regions: Vec<_> = got.regions.into_iter().map(|r| (r.message, r.range)).collect();
        assert_eq!(regions, [(0, 0..1), (1, 1..2), (7, 1..2), (2, 3..4)]);
    }
}
