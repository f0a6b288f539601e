//! From nodes to tables: every key read, everything wrong noted.

use super::field::Field;
use super::reference::{Reference, nearest};
use super::refused;
use super::source::{Node, Place, Sources};
use super::table::{Key, Rule, Table, Tag, Walker, one_of};
use crate::error::Problem;
use std::collections::{BTreeMap, BTreeSet};

/// What was found on the way.
#[derive(Debug)]
pub(crate) struct Reader<'a> {
    sources: &'a Sources,
    problems: Vec<(Option<Place>, Problem)>,
    /// Where each key was given.
    given: BTreeMap<String, Place>,
    /// Keys whose value could not be read; they hold their default.
    failed: BTreeSet<String>,
}

impl<'a> Reader<'a> {
    pub fn new(sources: &'a Sources) -> Self {
        Reader { sources, problems: Vec::new(), given: BTreeMap::new(), failed: BTreeSet::new() }
    }

    /// Takes over what another reader of the same sources noted, but for what is noted already.
    pub fn absorb(&mut self, other: Reader<'_>) {
        for problem in other.problems {
            if !self.problems.contains(&problem) {
                self.problems.push(problem);
            }
        }
    }

    /// Notes a problem with the key at `path`.
    pub fn problem(&mut self, at: Place, path: &str, message: String, hint: impl Into<String>) {
        self.failed.insert(path.to_string());
        self.problems.push((Some(at), Problem { place: self.sources.show(at), message, hint: hint.into() }));
    }

    /// Notes that a rule between keys doesn't hold, at the first of them that was given, unless one of them
    /// could not be read.
    pub fn rule(&mut self, holds: bool, keys: &[&str], message: impl FnOnce() -> String, hint: &str) {
        if holds || keys.iter().any(|key| self.failed.contains(*key)) {
            return;
        }
        let at = keys.iter().find_map(|key| self.given.get(*key)).copied();
        let place = at.map(|at| self.sources.show(at)).unwrap_or_default();
        self.problems.push((at, Problem { place, message: message(), hint: hint.into() }));
    }

    /// Notes that `path` wants another type; always `None`.
    pub fn wrong_type<T>(&mut self, node: &Node, path: &str, kind: &str) -> Option<T> {
        let message = format!("`{path}` is {}, wanted {kind}", node.found());
        self.problem(node.place, path, message, "");
        None
    }

    /// Notes that `word` isn't one of the words of `path`.
    pub fn not_one_of(&mut self, at: Place, path: &str, word: &str, words: &[&str]) {
        let message = format!("`{path}` is `{word}`, wanted {}", one_of(words));
        let hint = match refused::value(path, word) {
            Some(reason) => reason.to_string(),
            None => nearest(word, words.iter().copied()).map(did_you_mean).unwrap_or_default(),
        };
        self.problem(at, path, message, hint);
    }

    /// Whether `path` was given.
    pub fn given(&self, path: &str) -> bool {
        self.given.contains_key(path)
    }

    /// Whether `path` could not be read.
    pub fn failed(&self, path: &str) -> bool {
        self.failed.contains(path)
    }

    /// Everything noted, in the order in which it was given.
    pub fn into_problems(mut self) -> Vec<Problem> {
        self.problems.sort_by_key(|(place, _)| (place.is_none(), *place));
        self.problems.into_iter().map(|(_, problem)| problem).collect()
    }

    fn obeys<T: Field>(&mut self, rule: &Rule, value: &T, path: &str, at: Place) -> bool {
        if let Some(number) = value.numbers().into_iter().find(|n| !rule.allows(*n)) {
            self.problem(at, path, format!("`{path}` is {number}, wanted {}", rule.wanted()), "");
            return false;
        }
        let Rule::OneOf(words) = rule else { return true };
        match value.words().into_iter().find(|word| !words.contains(word)) {
            Some(word) => self.not_one_of(at, path, word, words),
            None => return true,
        }
        false
    }
}

/// Keys that are like none of ours are most often another trainer's.
const COMING_FROM: &str = "docs/coming_from.md names those of other trainers";

fn did_you_mean(name: &str) -> String {
    format!("did you mean `{name}`?")
}

/// `section.key`, or `key` at the top.
pub(crate) fn join(section: &str, key: &str) -> String {
    if section.is_empty() { key.to_string() } else { format!("{section}.{key}") }
}

/// Reads the table at `path`; keys that can't be read keep their defaults.
pub(crate) fn read_table<T: Table>(node: &Node, path: &str, reader: &mut Reader) -> Option<T> {
    let Some(entries) = node.entries() else {
        let message = format!("`{path}` is {}, wanted a table", node.found());
        reader.problem(
            node.place,
            path,
            message,
            format!("write `[{path}]` with its keys below, or `--{path}`"),
        );
        return None;
    };
    let mut walk = TableReader { reader, entries, path, known: Vec::new(), chosen: None };
    let mut table = T::default();
    table.walk(&mut walk);
    let TableReader { known, chosen, .. } = walk;
    for (name, node) in entries.iter().filter(|(name, _)| !known.contains(&name.as_str())) {
        reader.unknown_key::<T>(name, node.place, path, &known, chosen);
    }
    Some(table)
}

struct TableReader<'r, 'a, 'n> {
    reader: &'r mut Reader<'a>,
    entries: &'n [(String, Node)],
    path: &'n str,
    known: Vec<&'static str>,
    chosen: Option<&'static str>,
}

impl<'n> TableReader<'_, '_, 'n> {
    /// The node of a key, which is known from now on.
    fn take(&mut self, name: &'static str) -> Option<(&'n Node, String)> {
        // A section whose kinds have a `type` of their own asks for it twice.
        if !self.known.contains(&name) {
            self.known.push(name);
        }
        let (_, node) = self.entries.iter().find(|(n, _)| n == name)?;
        let path = join(self.path, name);
        self.reader.given.insert(path.clone(), node.place);
        Some((node, path))
    }
}

impl Walker for TableReader<'_, '_, '_> {
    fn key<T: Field>(&mut self, key: &Key, value: &mut T, _default: T) {
        let Some((node, path)) = self.take(key.name) else { return };
        match T::read(node, &path, self.reader) {
            Some(read) if self.reader.obeys(&key.rule, &read, &path, node.place) => *value = read,
            _ => {
                self.reader.failed.insert(path);
            }
        }
    }

    fn tag(&mut self, tags: &[Tag], current: usize) -> usize {
        let mut index = current;
        if let Some((node, path)) = self.take("type")
            && !self.reader.failed(&path)
            && let Some(word) = String::read(node, &path, self.reader)
        {
            let words: Vec<&str> = tags.iter().map(|t| t.name).collect();
            match words.iter().position(|w| *w == word) {
                Some(found) => index = found,
                None => self.reader.not_one_of(node.place, &path, &word, &words),
            }
        }
        self.chosen = Some(tags[index].name);
        index
    }
}

impl Reader<'_> {
    fn unknown_key<T: Table>(
        &mut self,
        name: &str,
        at: Place,
        section: &str,
        known: &[&'static str],
        chosen: Option<&str>,
    ) {
        let path = join(section, name);
        if let Some(refused) = refused::key(&path) {
            self.problem(
                at,
                &path,
                format!("`{path}` is not supported: {}", refused.reason),
                refused.instead,
            );
            return;
        }
        if let (Some(chosen), Some(types)) = (chosen, types_with::<T>(name)) {
            let key = join(section, "type");
            // A later file or flag that changes the type leaves the keys of the earlier one behind. With a type
            // that is unreadable, nobody knows which keys it has.
            let left_behind = self.given.get(&key).is_some_and(|changed| at.is_before(*changed));
            if !left_behind && !self.failed(&key) {
                let message =
                    format!("`{path}` is a key of `type = {types}`, and this is `type = \"{chosen}\"`");
                self.problem(at, &path, message, format!("take it out, or change `{key}`"));
            }
            return;
        }
        let hint = match meant(name, section, known) {
            Meant::Here(key) => {
                // What was meant for this key is not known, so no rule may judge it.
                self.failed.insert(join(section, key));
                did_you_mean(key)
            }
            Meant::Else(hint) => hint,
        };
        self.problem(at, &path, format!("unknown key `{path}`"), hint);
    }
}

/// The types of this table that have the key: `"linear" or "cosine"`.
fn types_with<T: Table>(name: &str) -> Option<String> {
    let page = Reference::page_of::<T>();
    let rows = page.rows.iter().filter(|row| row.name == name);
    let types: Vec<String> = rows.flat_map(|row| &row.types).map(|t| format!("\"{t}\"")).collect();
    (!types.is_empty()).then(|| types.join(" or "))
}

/// What was meant by a key that isn't there.
enum Meant {
    /// A key of the same section.
    Here(&'static str),
    /// Whatever the sentence says.
    Else(String),
}

/// The same name or one with hyphens; the name that a key has elsewhere; the sections that have a key of this
/// name; at last the nearest key of the section, of those other names, of any section.
fn meant(name: &str, section: &str, known: &[&'static str]) -> Meant {
    let name = name.replace('-', "_");
    if let Some(key) = known.iter().find(|key| **key == name) {
        return Meant::Here(key);
    }
    if let Some(ours) = refused::other_name(|other| other == name) {
        return meant_by(ours, known);
    }
    let reference = Reference::new();
    match reference
        .pages
        .iter()
        .filter(|page| page.has(&name))
        .map(|page| page.path.as_str())
        .collect::<Vec<_>>()
    {
        homes if homes.is_empty() => {}
        homes if homes == [""] => {
            return Meant::Else(format!("`{name}` belongs at the top of the file, before the first section"));
        }
        homes => {
            let homes: Vec<String> = homes.iter().map(|home| format!("[{home}]")).collect();
            return Meant::Else(format!("`{name}` belongs in {}", one_of(&homes)));
        }
    }
    let near_other = || refused::other_name(|other| nearest(&name, [other].into_iter()).is_some());
    if let Some(ours) = nearest(&name, known.iter().copied()).or_else(near_other) {
        return meant_by(ours, known);
    }
    let all = reference.pages.iter().flat_map(|page| page.rows.iter().map(|row| row.name));
    Meant::Else(match nearest(&name, all) {
        Some(key) => did_you_mean(&reference.path_of(key)),
        None if section.is_empty() => format!("docs/config.md lists every key; {COMING_FROM}"),
        None => {
            let keys = one_of(known).replace(" or ", " and ");
            format!("`[{section}]` has {keys}; {COMING_FROM}")
        }
    })
}

fn meant_by(ours: &str, known: &[&'static str]) -> Meant {
    known
        .iter()
        .find(|key| **key == ours)
        .map_or_else(|| Meant::Else(did_you_mean(ours)), |key| Meant::Here(key))
}
