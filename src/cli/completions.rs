//! `embertune completions`: what a shell needs to complete commands, flags, and every key of the configuration.

use clap::builder::PossibleValuesParser;
use clap::{Arg, ArgAction, Command, ValueHint};
use clap_complete::Shell;

use crate::config::{self, FlagKey};

/// The script for `shell`.
pub(super) fn script(command: Command, shell: Shell) -> String {
    let keys = config::keys();
    let mut command = where_keys_are_read(command, |subcommand| with_keys(subcommand, &keys));
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command, "embertune", &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// The command, with those of its subcommands changed that take keys and files, which they read by themselves.
pub(super) fn where_keys_are_read(command: Command, change: impl Fn(Command) -> Command) -> Command {
    let reading = command.get_subcommands().filter(|subcommand| reads_keys(subcommand));
    let names: Vec<String> = reading.map(|subcommand| subcommand.get_name().to_string()).collect();
    names.iter().fold(command, |command, name| command.mut_subcommand(name, &change))
}

fn reads_keys(command: &Command) -> bool {
    command.get_arguments().any(|arg| arg.get_id() == "args")
}

/// The flags of its own that such a command reads, from the help of its arguments: `--row N` there is
/// `("row", Some("N"))`.
pub(super) fn own_flags(command: &Command) -> Vec<(String, Option<String>)> {
    let args = command.get_arguments().find(|arg| arg.get_id() == "args");
    let help = args.and_then(Arg::get_help).map(ToString::to_string).unwrap_or_default();
    let quoted = help.split('`').skip(1).step_by(2);
    let flags =
        quoted.filter_map(|text| text.strip_prefix("--")).filter(|flag| !flag.starts_with("section."));
    flags
        .map(|flag| match flag.split_once(' ') {
            Some((name, value)) => (name.to_string(), Some(value.to_string())),
            None => (flag.to_string(), None),
        })
        .collect()
}

fn with_keys(command: Command, keys: &[FlagKey]) -> Command {
    let mut flags: Vec<Arg> = own_flags(&command).into_iter().map(own_flag).collect();
    for key in keys {
        flags.push(key_flag(key));
        if key.is_switch() || key.is_section {
            flags.push(flag(&format!("no-{}", key.flag)).action(ArgAction::SetTrue));
        }
    }
    let mut known = Vec::new();
    flags.retain(|flag| {
        let new = !known.contains(flag.get_id());
        known.push(flag.get_id().clone());
        new
    });
    command.mut_arg("args", |arg| arg.value_hint(ValueHint::AnyPath)).args(flags)
}

fn flag(name: &str) -> Arg {
    Arg::new(name.to_string()).long(name.to_string())
}

fn own_flag((name, value): (String, Option<String>)) -> Arg {
    let arg = flag(&name);
    match value {
        Some(value) => arg.value_name(value),
        None => arg.action(ArgAction::SetTrue),
    }
}

fn key_flag(key: &FlagKey) -> Arg {
    let arg = flag(&key.flag).help(first_sentence(&key.doc)).num_args(0..=1);
    let words: Vec<String> = key.words().into_iter().map(String::from).collect();
    match words.is_empty() || key.kind.starts_with("path") {
        true => arg.value_hint(ValueHint::AnyPath),
        false => arg.value_parser(PossibleValuesParser::new(words)),
    }
}

fn first_sentence(doc: &str) -> String {
    // "Only `sft`." stands before what the key means.
    let start =
        doc.strip_prefix("Only ").and_then(|rest| rest.split_once(". ")).map_or(doc, |(_, rest)| rest);
    start.split_once(". ").map_or(start, |(first, _)| first).trim_end_matches('.').to_string()
}
