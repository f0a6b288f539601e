//! Every key there is: for `docs/config.md` and for suggestions.

use super::SftConfig;
use super::field::{Field, show};
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
    pub optional: bool,
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

impl Reference {
    /// Every section and key.
    pub fn new() -> Self {
        let mut reference = Reference::default();
        reference.add::<SftConfig>("", false);
        reference
    }

    /// Adds a section and the sections in it.
    pub fn add<T: Table>(&mut self, path: &str, optional: bool) {
        let index = self.pages.len();
        self.pages.push(Page { path: path.into(), about: String::new(), optional, rows: Vec::new() });
        let mut page = self.page::<T>(path, optional);
        page.about = text(T::ABOUT);
        self.pages[index] = page;
    }

    /// The keys of a table by itself.
    pub fn page_of<T: Table>() -> Page {
        Reference::default().page::<T>("", false)
    }

    fn page<T: Table>(&mut self, path: &str, optional: bool) -> Page {
        let page = Page { path: path.into(), about: String::new(), optional, rows: Vec::new() };
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

const HEAD: &str = include_str!("reference_head.md");

impl Page {
    pub fn has(&self, name: &str) -> bool {
        self.rows.iter().any(|row| row.name == name)
    }

    /// The types of this section, if it has any.
    fn types(&self) -> &[&'static str] {
        self.rows.iter().find(|row| row.name == "type").map_or(&[], |row| &row.types)
    }

    fn markdown(&self, out: &mut String) {
        let title = if self.path.is_empty() { "Top level".into() } else { format!("`[{}]`", self.path) };
        let off = if self.optional { " Off unless it is named." } else { "" };
        write!(out, "\n## {title}\n\n{}{off}\n\n", self.about).expect("a String takes everything");
        out.push_str("| key | type | default | meaning |\n|---|---|---|---|\n");
        for row in &self.rows {
            let only = match row.types.as_slice() {
                types if row.name == "type" || types.len() == self.types().len() => String::new(),
                types => format!("Only {}. ", one_of(types)),
            };
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
        if let Some(row) = self.page.rows.iter_mut().find(|row| row.name == key.name) {
            // A key of several types of this section: described once.
            row.types.extend(self.kind);
            return;
        }
        let path = join(&self.page.path, key.name);
        let kind = match &key.rule {
            Rule::Any => plain(T::kind()),
            Rule::OneOf(_) => key.rule.wanted(),
            rule => format!("{}, {}", plain(T::kind()), rule.wanted()),
        };
        let pages = self.reference.pages.len();
        T::describe(&path, false, self.reference);
        let (default, doc) = match self.reference.pages.len() > pages {
            true => (on_or_off(&default.write()), format!("{} See `[{path}]`.", text(key.doc))),
            false => (show(&default.write()), text(key.doc)),
        };
        let types = self.kind.into_iter().collect();
        self.page.rows.push(Row { name: key.name, kind, default, doc, types });
    }

    fn tag(&mut self, tags: &[Tag], current: usize) -> usize {
        self.kind = Some(tags[current].name);
        if !self.page.has("type") {
            let doc = tags.iter().map(|tag| format!("`{}`: {}", tag.name, text(tag.doc))).collect::<Vec<_>>();
            let types: Vec<&str> = tags.iter().map(|tag| tag.name).collect();
            let (kind, default) = (one_of(&types), format!("\"{}\"", tags[0].name));
            self.page.rows.insert(0, Row { name: "type", kind, default, doc: doc.join(" "), types });
        }
        current
    }
}

/// A type's name without its article.
fn plain(kind: String) -> String {
    kind.strip_prefix("an ").or(kind.strip_prefix("a ")).unwrap_or(&kind).to_string()
}

fn on_or_off(section: &toml::Value) -> String {
    if section.is_str() { "None".into() } else { "on".into() }
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
