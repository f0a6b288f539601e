//! Every key there is: for `docs/config.md` and for suggestions.

use super::SftConfig;
use super::field::Field;
use super::read::join;
use super::table::{Key, Rule, Table, Tag, Walker, one_of};
use std::fmt::Write;

/// The pages of the reference, a section each.
#[derive(Debug, Default)]
pub(crate) struct Reference {
    pub pages: Vec<Page>,
}

/// One section of the file.
#[derive(Debug)]
pub(crate) struct Page {
    pub path: String,
    pub about: String,
    /// Off by default.
    pub off: bool,
    pub rows: Vec<Row>,
}

/// One key.
#[derive(Debug)]
pub(crate) struct Row {
    pub name: &'static str,
    pub kind: String,
    pub default: String,
    pub doc: String,
    /// The types of the section that have this key; empty if it has no types.
    pub types: Vec<&'static str>,
}

impl Row {
    /// Whether both say the same, if of different types.
    fn says(&self, other: &Row) -> bool {
        (self.name, &self.kind, &self.default, &self.doc)
            == (other.name, &other.kind, &other.default, &other.doc)
    }
}

impl Reference {
    /// Every section and key.
    pub fn new() -> Self {
        let mut reference = Reference::default();
        reference.add::<SftConfig>("", false);
        reference
    }

    /// Adds a section and the sections in it.
    pub fn add<T: Table>(&mut self, path: &str, off: bool) {
        let index = self.pages.len();
        self.pages.push(Page { path: path.into(), about: String::new(), off, rows: Vec::new() });
        let mut page = self.page::<T>(path, off);
        page.about = text(T::ABOUT);
        self.pages[index] = page;
    }

    /// The keys of a table by itself.
    pub fn page_of<T: Table>() -> Page {
        Reference::default().page::<T>("", false)
    }

    fn page<T: Table>(&mut self, path: &str, off: bool) -> Page {
        let page = Page { path: path.into(), about: String::new(), off, rows: Vec::new() };
        let mut describer = Describer { reference: self, page, kind: None };
        for mut table in T::every() {
            table.walk(&mut describer);
        }
        describer.page
    }

    /// Whether `path` is a section.
    pub fn is_section(&self, path: &str) -> bool {
        self.pages.iter().any(|page| page.path == path)
    }

    /// Whether the key at `path` takes text, or a list of texts.
    pub fn takes_text(&self, path: &str) -> bool {
        let rows = self.pages.iter().flat_map(|page| page.rows.iter().map(move |row| (&page.path, row)));
        let mut named = rows.filter(|(section, row)| join(section, row.name) == path);
        named.any(|(_, row)| ["string", "path"].iter().any(|kind| row.kind.contains(kind)))
    }

    /// The key with its section.
    pub fn path_of(&self, name: &str) -> String {
        let page = self.pages.iter().find(|page| page.has(name));
        join(page.map_or("", |page| &page.path), name)
    }

    /// `docs/config.md`.
    pub fn markdown(&self) -> String {
        let mut out = String::from(HEAD);
        for page in &self.pages {
            page.markdown(&mut out);
        }
        out
    }
}

impl Reference {
    /// The keys as flags, for `--help`.
    pub fn flags(&self) -> String {
        let keys = self.keys().into_iter().filter(|key| !key.is_section);
        keys.map(|key| format!("  --{} <{}>  [{}]\n        {}\n", key.flag, key.kind, key.default, key.doc))
            .collect()
    }

    /// The keys, and the sections that are off by default; one that several types of a section have, for each.
    pub fn keys(&self) -> Vec<FlagKey> {
        let mut keys = Vec::new();
        for page in &self.pages {
            for row in &page.rows {
                let path = join(&page.path, row.name);
                if self.is_section(&path) && row.default != "None" {
                    continue;
                }
                keys.push(FlagKey {
                    flag: path.replace('_', "-"),
                    is_section: self.is_section(&path),
                    section: page.path.clone(),
                    kind: row.kind.clone(),
                    default: row.default.clone(),
                    doc: page.only(row) + &row.doc,
                });
            }
        }
        keys
    }
}

/// A key as the command line has it.
#[derive(Debug, Clone)]
pub(crate) struct FlagKey {
    /// `optim.max-norm`.
    pub flag: String,
    /// Whether it is a section, off by default.
    pub is_section: bool,
    /// The section it stands in; empty at the top.
    pub section: String,
    /// The type, in words.
    pub kind: String,
    pub default: String,
    pub doc: String,
}

impl FlagKey {
    /// The words that can stand as its value, as far as they are known.
    pub fn words(&self) -> Vec<&str> {
        self.kind.split('`').skip(1).step_by(2).map(|word| word.trim_matches('"')).collect()
    }

    /// Whether it is `true` or `false` and nothing else.
    pub fn is_switch(&self) -> bool {
        self.kind == <bool as Field>::kind()
    }
}

const HEAD: &str = include_str!("reference_head.md");

impl Page {
    pub fn has(&self, name: &str) -> bool {
        self.rows.iter().any(|row| row.name == name)
    }

    /// The types of this section, if it has any.
    fn types(&self) -> &[&'static str] {
        self.rows.iter().find(|row| row.name == "type").map_or(&[], |row| &row.types)
    }

    /// "Only `adamw`.", for a key that not all types have.
    fn only(&self, row: &Row) -> String {
        match row.types.as_slice() {
            types if row.name == "type" || types.len() == self.types().len() => String::new(),
            types => format!("Only {}. ", one_of(types)),
        }
    }

    fn markdown(&self, out: &mut String) {
        let title = if self.path.is_empty() { "Top level".into() } else { format!("`[{}]`", self.path) };
        let off = if self.off { " Off unless it is named." } else { "" };
        write!(out, "\n## {title}\n\n{}{off}\n\n", self.about).expect("a String takes everything");
        out.push_str("| key | type | default | meaning |\n|---|---|---|---|\n");
        for row in &self.rows {
            let only = self.only(row);
            let cell = |text: &str| text.replace('|', "\\|");
            writeln!(
                out,
                "| `{}` | {} | `{}` | {only}{} |",
                row.name,
                cell(&row.kind),
                cell(&row.default),
                cell(&row.doc)
            )
            .expect("a String takes everything");
        }
    }
}

struct Describer<'a> {
    reference: &'a mut Reference,
    page: Page,
    kind: Option<&'static str>,
}

impl Walker for Describer<'_> {
    fn key<T: Field>(&mut self, key: &Key, _value: &mut T, default: T) {
        let path = join(&self.page.path, key.name);
        let default = default.shown();
        let pages = self.reference.pages.len();
        T::describe(&path, default == "None", self.reference);
        let mut doc = text(key.doc);
        if self.reference.pages.len() > pages {
            doc += &format!(" See `[{path}]`.");
        }
        let kind = match &key.rule {
            Rule::Any => plain(T::kind()),
            Rule::OneOf(_) => key.rule.wanted(),
            rule => format!("{}, {}", plain(T::kind()), rule.wanted()),
        };
        let row = Row { name: key.name, kind, default, doc, types: self.kind.into_iter().collect() };
        match self.page.rows.iter_mut().find(|other| other.says(&row)) {
            // A key that several types of the section have is described once.
            Some(other) => {
                other.types.extend(self.kind);
                self.reference.pages.truncate(pages);
            }
            None => self.page.rows.push(row),
        }
    }

    fn tag(&mut self, tags: &[Tag], current: usize) -> usize {
        self.kind = Some(tags[current].name);
        if !self.page.has("type") {
            let types: Vec<&str> = tags.iter().map(|tag| tag.name).collect();
            let doc = match tags {
                [_] => "There is no other.".into(),
                tags => tags
                    .iter()
                    .map(|tag| format!("`{}`: {}", tag.name, text(tag.doc)))
                    .collect::<Vec<_>>()
                    .join(" "),
            };
            let (kind, default) = (one_of(&types), format!("\"{}\"", tags[0].name));
            self.page.rows.insert(0, Row { name: "type", kind, default, doc, types });
        }
        current
    }
}

/// A type's name without its article.
fn plain(kind: String) -> String {
    kind.strip_prefix("an ").or(kind.strip_prefix("a ")).unwrap_or(&kind).to_string()
}

/// The lines of a doc comment as one paragraph.
fn text(lines: &[&str]) -> String {
    lines.iter().map(|line| line.trim()).collect::<Vec<_>>().join(" ")
}

/// The candidate that differs from `name` by a typing mistake, if there is one.
pub(crate) fn nearest<'a>(name: &str, candidates: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let limit = (name.len() / 3).clamp(1, 3);
    let distance = |candidate: &'a str| (strsim::osa_distance(name, candidate), candidate);
    candidates.map(distance).filter(|(d, _)| *d <= limit).min_by_key(|(d, _)| *d).map(|(_, name)| name)
}
