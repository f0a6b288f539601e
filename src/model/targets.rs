//! Which modules an adapter trains, with PEFT's meaning of every key.
//!
//! Rules (PEFT 0.21.2, `tuners/tuners_utils.py` and `utils/other.py`): a list entry names a module
//! that equals it or ends with `.entry`; a string is a regular expression on the whole name;
//! `exclude_modules` works the same and wins, as does `modules_to_save`; a key of `rank_pattern`
//! and `alpha_pattern` is a regular expression on the end of the name, first match in file order.

use std::collections::BTreeSet;

use fancy_regex::Regex;

use super::lora::{AdaptedModule, LoraSpec};
use crate::config::TargetModules;
use crate::error::Problem;

/// The module names of a decoder, as Hugging Face has them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Modules {
    /// Every module that holds parameters, blocks included, in module order.
    pub all: Vec<String>,
    /// Those that are linear layers, the output head included, in module order.
    pub linear: Vec<String>,
}

/// What a [`LoraSpec`] means for a given decoder.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Resolved {
    /// The adapted linear layers, in module order.
    pub modules: Vec<AdaptedModule>,
    /// The modules trained whole (`modules_to_save`), in module order.
    pub saved: Vec<String>,
    /// What the user should know.
    pub warnings: Vec<String>,
}

impl Modules {
    /// From the names of all parameters (`….weight`, `….bias`).
    pub fn from_parameters<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let mut modules = Modules::default();
        for name in names {
            let parts: Vec<&str> = name.split('.').collect();
            for end in 1..parts.len() {
                let module = parts[..end].join(".");
                if !modules.all.contains(&module) {
                    modules.all.push(module);
                }
            }
        }
        if !modules.all.iter().any(|m| m == "lm_head") {
            modules.all.push("lm_head".into()); // a tied head has no weight of its own
        }
        let is_linear = |m: &&String| m.ends_with("_proj") || *m == "lm_head";
        modules.linear = modules.all.iter().filter(is_linear).cloned().collect();
        modules
    }

    fn is_linear(&self, module: &str) -> bool {
        self.linear.iter().any(|m| m == module)
    }

    /// Last name parts of the linear layers, for messages.
    fn suffixes(&self) -> Vec<&str> {
        let mut suffixes = Vec::new();
        for module in &self.linear {
            let last = module.rsplit('.').next().unwrap_or(module);
            if !suffixes.contains(&last) {
                suffixes.push(last);
            }
        }
        suffixes
    }

    /// `"all-linear"` as PEFT resolves and stores it: every linear layer but the output head.
    pub fn all_linear(&self) -> Vec<String> {
        self.linear.iter().filter(|m| *m != "lm_head").cloned().collect()
    }

    /// PEFT's condensed form of a long list: the shortest endings that no other module shares.
    pub fn condense(&self, targets: Vec<String>) -> Vec<String> {
        // PEFT utils/constants.py, MIN_TARGET_MODULES_FOR_OPTIMIZATION.
        if targets.len() < 20 {
            return targets;
        }
        let targeted = |m: &str| targets.iter().any(|t| names(t, m));
        let others: BTreeSet<&str> =
            self.all.iter().filter(|m| !targeted(m)).flat_map(|m| endings(m)).collect();
        let mut short: Vec<String> = Vec::new();
        for target in &targets {
            if short.iter().any(|s| names(s, target)) {
                continue;
            }
            if let Some(ending) = endings(target).rev().find(|e| !others.contains(e)) {
                short.push(ending.to_string());
            }
        }
        if short.len() < targets.len() { short } else { targets }
    }
}

/// The name itself and what follows each of its dots, longest first.
fn endings(name: &str) -> impl DoubleEndedIterator<Item = &str> {
    let starts = std::iter::once(0).chain(name.match_indices('.').map(|(dot, _)| dot + 1));
    starts.map(|start| &name[start..]).collect::<Vec<_>>().into_iter()
}

/// PEFT's rule for list entries: equal, or the end of the name after a dot.
fn names(entry: &str, module: &str) -> bool {
    module == entry || module.strip_suffix(entry).is_some_and(|rest| rest.ends_with('.'))
}

/// Whether the pattern matches; a pattern that needs too much backtracking matches nothing.
fn matches(regex: &Regex, text: &str) -> bool {
    regex.is_match(text).unwrap_or(false)
}

/// `target_modules` or `exclude_modules`, ready to be asked.
enum Rule<'a> {
    List(&'a [String]),
    Regex(Regex),
    AllLinear,
}

impl Rule<'_> {
    fn matches(&self, module: &str, modules: &Modules) -> bool {
        match self {
            Rule::List(entries) => entries.iter().any(|entry| names(entry, module)),
            Rule::Regex(regex) => matches(regex, module),
            Rule::AllLinear => module != "lm_head" && modules.is_linear(module),
        }
    }
}

/// Collects everything that is wrong with one spec.
struct Check<'a> {
    spec: &'a LoraSpec,
    modules: &'a Modules,
    problems: Vec<Problem>,
    warnings: Vec<String>,
}

/// Resolves `spec` against the model's modules.
///
/// # Errors
/// Every problem found: entries that match nothing (with the nearest name), targets that are no
/// linear layers, patterns that aren't regular expressions, ranks of 0, layers that don't exist.
pub(crate) fn resolve(spec: &LoraSpec, modules: &Modules) -> Result<Resolved, Vec<Problem>> {
    let mut check = Check { spec, modules, problems: Vec::new(), warnings: Vec::new() };
    let target = check.rule("target_modules", &spec.target_modules);
    let exclude = spec.exclude_modules.as_ref().map(|rule| check.rule("exclude_modules", rule));
    let saved = check.saved();
    let ranks = check.patterns("rank_pattern", &spec.rank_pattern);
    let alphas = check.patterns("alpha_pattern", &spec.alpha_pattern);
    check.numbers();
    let (Some(target), Some(exclude)) = (target, exclude.map_or(Some(None), |rule| rule.map(Some))) else {
        return Err(check.problems);
    };
    let targets = check.targets(&target, exclude.as_ref());
    if !check.problems.is_empty() {
        return Err(check.problems);
    }
    let modules = targets.into_iter().map(|name| {
        let rank = first_match(&ranks, &name).unwrap_or(spec.rank);
        let alpha = first_match(&alphas, &name).unwrap_or(spec.alpha);
        AdaptedModule { rank, alpha, scale: spec.scale(rank, alpha), name }
    });
    Ok(Resolved { modules: modules.collect(), saved, warnings: check.warnings })
}

fn first_match<T: Copy>(patterns: &[(Regex, T)], module: &str) -> Option<T> {
    patterns.iter().find(|(regex, _)| matches(regex, module)).map(|(_, value)| *value)
}

impl<'a> Check<'a> {
    fn problem(&mut self, message: String, hint: impl Into<String>) {
        self.problems.push(Problem { place: String::new(), message, hint: hint.into() });
    }

    fn regex(&mut self, key: &str, pattern: &str, wrapped: &str) -> Option<Regex> {
        match Regex::new(wrapped) {
            Ok(regex) => Some(regex),
            Err(cause) => {
                let message = format!("`{key}`: `{pattern}` is not a regular expression: {cause}");
                self.problem(message, "escape what is meant literally");
                None
            }
        }
    }

    fn rule(&mut self, key: &str, rule: &'a TargetModules) -> Option<Rule<'a>> {
        match rule {
            TargetModules::List(entries) => Some(Rule::List(entries)),
            TargetModules::AllLinear => Some(Rule::AllLinear),
            TargetModules::Regex(pattern) => {
                self.regex(key, pattern, &format!(r"\A(?:{pattern})\z")).map(Rule::Regex)
            }
        }
    }

    fn patterns<T: Copy>(&mut self, key: &str, patterns: &[(String, T)]) -> Vec<(Regex, T)> {
        let mut compiled = Vec::new();
        for (pattern, value) in patterns {
            let Some(regex) = self.regex(key, pattern, &format!(r"\A(?:.*\.)?(?:{pattern})\z")) else {
                continue;
            };
            if !self.modules.linear.iter().any(|m| matches(&regex, m)) {
                self.warnings.push(format!("`{key}`: `{pattern}` matches no linear layer"));
            }
            compiled.push((regex, *value));
        }
        compiled
    }

    /// Ranks, alpha, dropout and layer numbers that cannot be meant.
    fn numbers(&mut self) {
        let spec = self.spec;
        let zero = spec.rank_pattern.iter().find(|(_, rank)| *rank == 0);
        if spec.rank == 0 || zero.is_some() {
            let place = zero.map(|(key, _)| format!(" in `rank_pattern` for `{key}`")).unwrap_or_default();
            self.problem(format!("`rank` is 0{place}: an adapter of rank 0 trains nothing"), "");
        }
        if !(0.0..1.0).contains(&spec.dropout) {
            self.problem(format!("`dropout` is {}, wanted from 0 to below 1", spec.dropout), "");
        }
        let Some(layers) = &spec.layers_to_transform else { return };
        if !matches!(spec.target_modules, TargetModules::List(_)) {
            let message = "`layers_to_transform` works with a list in `target_modules` only (as in PEFT)";
            self.problem(message.into(), "name the layers in the regular expression instead");
        }
        let known: BTreeSet<usize> = self.modules.linear.iter().filter_map(|m| layer_of(m, &[])).collect();
        for layer in layers.iter().filter(|layer| !known.contains(layer)) {
            let last = known.last().copied().unwrap_or(0);
            let message =
                format!("`layers_to_transform` names layer {layer}, the model has layers 0 to {last}");
            self.problem(message, "");
        }
    }

    /// The modules trained whole: PEFT's `_set_trainable` takes every name that ends with an entry.
    fn saved(&mut self) -> Vec<String> {
        let mut saved = Vec::new();
        for entry in &self.spec.modules_to_save {
            let found: Vec<&String> =
                self.modules.all.iter().filter(|m| m.ends_with(entry.as_str())).collect();
            if found.is_empty() {
                let message = format!("`modules_to_save` entry `{entry}` matches no module of the model");
                self.problem(
                    message,
                    "modules trained whole are for example `embed_tokens`, `lm_head`, `norm`",
                );
            }
            for module in found {
                let inner = format!("{module}.");
                if self.modules.all.iter().any(|m| m.starts_with(&inner)) {
                    let message =
                        format!("`modules_to_save` entry `{entry}` names `{module}`, a block of layers");
                    self.problem(message, "name the layers that are to be trained whole");
                } else {
                    saved.push(module.clone());
                }
            }
        }
        self.modules.all.iter().filter(|m| saved.contains(m)).cloned().collect()
    }

    fn targets(&mut self, target: &Rule, exclude: Option<&Rule>) -> Vec<String> {
        let modules = self.modules;
        let matched = |m: &&String| target.matches(m, modules);
        let all: Vec<&String> = modules.all.iter().filter(matched).collect();
        self.entries_match_something(target);
        let kept: Vec<&String> =
            all.iter().copied().filter(|m| !self.excluded(m, exclude) && self.in_chosen_layers(m)).collect();
        self.are_linear(&kept);
        if kept.is_empty() && self.problems.is_empty() {
            let (why, hint) = match all.len() {
                0 => ("matches no module of the model", self.meant_by_rule()),
                _ => ("matches only modules that other keys exclude", String::new()),
            };
            self.problem(format!("`target_modules` {why}"), hint);
        }
        kept.into_iter().cloned().collect()
    }

    fn existing(&self) -> String {
        format!("the model has {}", self.modules.suffixes().join(", "))
    }

    fn entries_match_something(&mut self, target: &Rule) {
        let Rule::List(entries) = target else { return };
        if entries.is_empty() {
            self.problem("`target_modules` is empty".into(), self.existing());
        }
        let lost = |entry: &&String| !self.modules.all.iter().any(|m| names(entry, m));
        let lost: Vec<&String> = entries.iter().filter(lost).collect();
        if lost.is_empty() {
            return;
        }
        let guesses = lost.iter().filter_map(|entry| self.guess(entry)).collect::<Vec<_>>();
        let (entry, matches) = if lost.len() == 1 { ("entry", "matches") } else { ("entries", "match") };
        let message =
            format!("`target_modules` {entry} {} {matches} no module of the model", quoted(&lost).join(", "));
        self.problem(message, format!("{}{}", guesses.concat(), self.existing()));
    }

    /// What a target that matches nothing may have been meant to be.
    fn guess(&self, target: &str) -> Option<String> {
        if target.to_lowercase().replace(['_', ' ', '.'], "-") == "all-linear" {
            return Some("did you mean `\"all-linear\"` (a hyphen, and no list)? ".into());
        }
        let last = target.rsplit('.').next().unwrap_or(target);
        let near = self.modules.suffixes().into_iter().map(|s| (strsim::jaro_winkler(s, last), s));
        let near = near.filter(|(score, _)| *score > 0.75).max_by(|a, b| a.0.total_cmp(&b.0));
        near.map(|(_, s)| format!("did you mean `{s}`? "))
    }

    /// The hint where `target_modules` as a whole matches nothing.
    fn meant_by_rule(&self) -> String {
        let TargetModules::Regex(pattern) = &self.spec.target_modules else { return self.existing() };
        let guess = match self.modules.suffixes().contains(&pattern.as_str()) {
            true => Some(format!(
                "a string is a regular expression of whole paths; the list is `[\"{pattern}\"]`; "
            )),
            false => self.guess(pattern),
        };
        guess.unwrap_or_default() + &self.existing()
    }

    fn excluded(&self, module: &str, exclude: Option<&Rule>) -> bool {
        let saved = |entry: &String| {
            let regex = Regex::new(&format!(r"\A(?:|.*\.)(?:{entry})(?:\z|\.)"));
            regex.is_ok_and(|regex| matches(&regex, module))
        };
        exclude.is_some_and(|rule| rule.matches(module, self.modules))
            || self.spec.modules_to_save.iter().any(saved)
    }

    /// `layers_to_transform`: only for modules that a list names by their ending, as in PEFT.
    fn in_chosen_layers(&self, module: &str) -> bool {
        let (Some(layers), TargetModules::List(entries)) =
            (&self.spec.layers_to_transform, &self.spec.target_modules)
        else {
            return true;
        };
        entries.iter().any(|entry| entry == module)
            || layer_of(module, &self.spec.layers_pattern).is_some_and(|layer| layers.contains(&layer))
    }

    fn are_linear(&mut self, targets: &[&String]) {
        let other = |m: &&&String| !self.modules.is_linear(m);
        let embeds = |m: &&String| m.rsplit('.').next() == Some("embed_tokens");
        let (embedding, other): (Vec<&String>, Vec<&String>) =
            targets.iter().filter(other).copied().partition(embeds);
        if !embedding.is_empty() {
            let message = "`target_modules` names `embed_tokens`: LoRA on an embedding is not supported";
            self.problem(message.into(), "train it whole with `modules_to_save = [\"embed_tokens\"]`");
        }
        let shown = quoted(&other[..other.len().min(3)]).join(", ");
        let message = match other.len() {
            0 => return,
            1 => format!("`target_modules` matches {shown}, which is not a linear layer"),
            2 | 3 => format!("`target_modules` matches {shown}, which are not linear layers"),
            n => format!("`target_modules` matches {shown} and {} more, which are not linear layers", n - 3),
        };
        self.problem(message, self.existing());
    }
}

fn quoted(names: &[&String]) -> Vec<String> {
    names.iter().map(|name| format!("`{name}`")).collect()
}

/// The layer number of a module: the first number after `pattern.`, or after any name.
fn layer_of(module: &str, patterns: &[String]) -> Option<usize> {
    let parts: Vec<&str> = module.split('.').collect();
    let (before, after): (usize, usize) = if patterns.is_empty() { (2, 1) } else { (1, 1) };
    (before..parts.len().saturating_sub(after)).find_map(|i| {
        let named = patterns.is_empty() || patterns.iter().any(|p| names(p, &parts[..i].join(".")));
        parts[i].parse().ok().filter(|_| named)
    })
}

#[cfg(test)]
mod tests;
