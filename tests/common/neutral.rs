//! The `bad/` cases of the goldens: faults in files of a neutral schema, and what the message about each must mention.
#![allow(dead_code)] // each test program uses a part

use super::goldens;
use serde_json::Value;
use std::path::PathBuf;

/// The neutral schema's keys that have another name here. All others are the same.
const KEYS: &[(&str, &[&str])] = &[("betas", &["betas1", "betas2"])];

/// One case of `bad/cases.json`.
pub struct Case(Value);

impl Case {
    /// The cases of an area (`config`, `data`, `model`, `adapter`, `checkpoint`).
    pub fn of_area(area: &str) -> Vec<Case> {
        let all = goldens::json(&goldens::root().join("bad/cases.json"));
        let all = all.as_array().expect("a list of cases").iter().cloned().map(Case);
        all.filter(|case| case.0["area"] == area).collect()
    }

    pub fn name(&self) -> &str {
        self.0["name"].as_str().expect("each case has a name")
    }

    /// The case's own file of this kind (`config`, `data`, `model`, …), else the one of `_ok`.
    pub fn file(&self, kind: &str, ok: &str) -> PathBuf {
        let own = self.0["files"][kind].as_str();
        goldens::root().join("bad").join(own.unwrap_or(ok))
    }

    /// `error`, `warning`, `error_or_warning`, `error_or_support` or `ok`.
    pub fn expected(&self) -> &str {
        self.0["expected_kind"].as_str().expect("each case has a kind")
    }

    /// The 1-based line that the message must name, if any.
    pub fn line(&self) -> Option<u64> {
        self.0["line"].as_u64()
    }

    /// What the message must mention and doesn't: each entry, or one word of an entry that is a list.
    pub fn missing_from(&self, message: &str) -> Vec<String> {
        let unmentioned = |must: &Value| missing(message, must);
        match &self.0["alternative_mention"] {
            Value::Array(_) if unmentioned(&self.0["alternative_mention"]).is_empty() => Vec::new(),
            _ => unmentioned(&self.0["message_must_mention"]),
        }
    }
}

fn missing(message: &str, must: &Value) -> Vec<String> {
    let message = message.to_lowercase();
    let has = |word: &Value| message.contains(&word.as_str().expect("a word").to_lowercase());
    let holds = |entry: &&Value| !entry.as_array().map_or_else(|| has(entry), |words| words.iter().any(has));
    must.as_array().into_iter().flatten().filter(holds).map(Value::to_string).collect()
}

/// A file of the neutral schema with our keys, every line where it was: a list that is two keys here
/// becomes the first of them, and the second takes the section's closing blank line.
pub fn ours(neutral: &str) -> String {
    let mut held = Vec::new();
    let mut out = String::new();
    for line in neutral.lines() {
        let key = line.split('=').next().unwrap_or("").trim();
        match KEYS.iter().find(|(name, _)| *name == key) {
            Some((_, [first, second])) => {
                let items = line
                    .split_once('[')
                    .and_then(|(_, list)| list.trim_end().trim_end_matches(']').split_once(','));
                let (a, b) = items.expect("a list of two");
                out += &format!("{first} = {}\n", a.trim());
                held.push(format!("{second} = {}", b.trim()));
            }
            Some((_, names)) => panic!("no rule for {names:?}"),
            None if line.trim().is_empty() => out += &(held.pop().unwrap_or_default() + "\n"),
            None => out += &format!("{line}\n"),
        }
    }
    assert!(held.is_empty(), "no blank line after {held:?}");
    out
}
