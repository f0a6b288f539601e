//! `@ a.toml @ b.toml --section.key value` → one tree → [`SftConfig`].

use super::SftConfig;
use super::check;
use super::flags::{Arguments, Given, parse as parse_arguments};
use super::read::{Reader, read_table};
use super::runs::{self, RunConfig};
use super::source::{Node, Sources, Value, parse as parse_text};
use super::write::Difference;
use crate::error::{Error, Problem, Result};
use std::path::{Path, PathBuf};

/// What runs without a file: the embedded model on the embedded data.
const DEFAULT: &str = include_str!("../../configs/default.toml");

/// A configuration, and what in it isn't a default.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    /// The whole configuration.
    pub config: SftConfig,
    /// The runs of `[[runs]]`, each with its whole configuration; none is one run, `config` itself.
    pub runs: Vec<RunConfig>,
    /// The keys whose values aren't the built-in defaults, in the order of the file format.
    pub differences: Vec<Difference>,
}

/// Reads the arguments after `sft`: files merge from left to right (tables key by key, lists replaced),
/// and flags win over files. Without `@ file`, the flags lie on top of the embedded `configs/default.toml`.
///
/// # Errors
/// [`Error::Config`] with everything that is wrong, in the order in which it was given.
pub fn load(args: &[String]) -> Result<Loaded> {
    let mut loader = Loader::default();
    let arguments = parse_arguments(args, &mut loader.problems);
    let root = loader.merge(&arguments);
    let (config, runs) = loader.finish(root)?;
    Ok(Loaded { differences: config.differences(), config, runs })
}

pub(super) fn from_toml(text: &str, name: &str) -> Result<SftConfig> {
    let mut loader = Loader::default();
    let root = parse_text(text, name, &mut loader.sources, &mut loader.problems);
    let (config, runs) = loader.finish(root)?;
    if runs.is_empty() {
        return Ok(config);
    }
    let message = format!("`{name}` has `[[runs]]`, wanted the configuration of one run");
    let hint = "read it with `config::load`".into();
    Err(Error::Config(vec![Problem { place: name.into(), message, hint }]))
}

/// One more run of a job: the text of its entry of `[[runs]]`, without a name.
///
/// # Errors
/// [`Error::Config`] with everything that is wrong.
pub fn load_run(job: &SftConfig, name: &str, text: &str) -> Result<RunConfig> {
    let mut loader = Loader::default();
    let mut root = parse_text(&job.to_toml(), "the job", &mut loader.sources, &mut loader.problems);
    let mut entry = parse_text(text, &format!("{name}.toml"), &mut loader.sources, &mut loader.problems);
    if let Value::Table(keys) = &mut entry.value {
        keys.retain(|(key, _)| key != "name");
        keys.push(("name".into(), Node { value: Value::Text(name.into()), place: entry.place }));
    }
    let runs = Node { value: Value::List(vec![entry]), ..root };
    root.merge(Node { value: Value::Table(vec![("runs".into(), runs)]), place: root.place });
    let (_, mut runs) = loader.finish(root)?;
    Ok(runs.remove(0))
}

#[derive(Default)]
struct Loader {
    sources: Sources,
    problems: Vec<Problem>,
}

impl Loader {
    fn merge(&mut self, arguments: &Arguments) -> Node {
        let mut root = Node::table(self.sources.add("the defaults"));
        if arguments.files.is_empty() {
            root.merge(parse_text(DEFAULT, "built-in default.toml", &mut self.sources, &mut self.problems));
        }
        for file in &arguments.files {
            self.file(file).into_iter().for_each(|node| root.merge(node));
        }
        for flag in &arguments.flags {
            match &flag.given {
                Given::Value(value) => root.merge(flag.node(value, &mut self.sources)),
                Given::File(file) => {
                    self.file(file).into_iter().for_each(|node| root.merge(node.nested(&flag.path)));
                }
            }
        }
        root
    }

    fn file(&mut self, file: &Path) -> Option<Node> {
        let name = file.display().to_string();
        match std::fs::read_to_string(file) {
            Ok(text) => Some(parse_text(&text, &name, &mut self.sources, &mut self.problems)),
            Err(error) => {
                let message = format!("cannot read this file: {error}");
                let hint = nearest_sibling(file).map(|near| format!("did you mean `{}`?", near.display()));
                self.problems.push(Problem { place: name, message, hint: hint.unwrap_or_default() });
                None
            }
        }
    }

    /// Reads and checks; what could not be read as text at all is told first and alone.
    fn finish(self, mut root: Node) -> Result<(SftConfig, Vec<RunConfig>)> {
        if !self.problems.is_empty() {
            return Err(Error::Config(self.problems));
        }
        let entries = runs::take(&mut root);
        let mut reader = Reader::new(&self.sources);
        let config = read_table::<SftConfig>(&root, "", &mut reader).expect("the root is a table");
        check::rules(&config, &mut reader);
        let mut all = Vec::new();
        for (number, entry) in entries.iter().enumerate() {
            let Some((name, start_step, own)) = runs::own(entry, number, &mut reader) else { continue };
            let mut tree = root.clone();
            runs::lay_over(&mut tree, own);
            let mut inner = Reader::new(&self.sources);
            let mut config = read_table::<SftConfig>(&tree, "", &mut inner).expect("the root is a table");
            check::rules(&config, &mut inner);
            reader.absorb(inner);
            runs::place(&mut config, &name);
            all.push(RunConfig { name, start_step, config });
        }
        runs::rules(&all, &mut reader);
        match reader.into_problems() {
            problems if problems.is_empty() => Ok((config, all)),
            problems => Err(Error::Config(problems)),
        }
    }
}

/// The entry of the folder of `path` that is spelled most like it; nothing where `path` is there.
pub(crate) fn nearest_sibling(path: &Path) -> Option<PathBuf> {
    // A link that leads nowhere is called what it should be.
    if path.symlink_metadata().is_ok() {
        return None;
    }
    let wanted = path.file_name()?.to_string_lossy();
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let named = |entry: std::fs::DirEntry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        (strsim::damerau_levenshtein(&wanted, &name), name)
    };
    let near = std::fs::read_dir(parent).ok()?.flatten().map(named);
    let near = near.filter(|(distance, _)| *distance <= 3.min(wanted.chars().count() / 2)).min();
    near.map(|(_, name)| path.with_file_name(name))
}
