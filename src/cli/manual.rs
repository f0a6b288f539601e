//! `embertune man`: the manual pages, made from the command line's own help and the reference of keys.

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, Args, Command};
use clap_mangen::Man;

use super::{completions, print};
use crate::config::{self, FlagKey};
use crate::{Error, Result};

#[derive(Debug, Args)]
pub(super) struct ManArgs {
    /// The command to print the page of; without one, that of `embertune` itself.
    #[arg(value_name = "COMMAND")]
    command: Option<String>,
    /// Write a page for each command into this folder (`~/.local/share/man/man1`, for example).
    #[arg(long, value_name = "DIR", conflicts_with = "command")]
    out: Option<PathBuf>,
}

/// Every page begins its title like this.
const TITLE: &str = ".TH embertune";
const EXIT_STATUS: &str = ".SH \"EXIT STATUS\"\n0: done. 1: failed. 2: the command line or the configuration is wrong. \
     130: interrupted, with a checkpoint if there was a step to save.\n";

/// One page: `embertune-sft` and its text.
struct Page {
    name: String,
    text: String,
}

pub(super) fn run(command: Command, args: &ManArgs) -> Result<()> {
    let pages = pages(command);
    if let Some(folder) = &args.out {
        return write(&pages, folder);
    }
    let wanted = args.command.as_ref().map_or("embertune".into(), |name| format!("embertune-{name}"));
    match pages.iter().find(|page| page.name == wanted) {
        Some(page) => print(&page.text),
        None => {
            let names: Vec<&str> =
                pages.iter().filter_map(|page| page.name.strip_prefix("embertune-")).collect();
            Err(Error::Usage {
                message: format!("there is no command `{}`", args.command.as_deref().unwrap_or_default()),
                hint: format!("there are {}", names.join(", ")),
            })
        }
    }
}

/// The page of the whole, then one for each command.
fn pages(command: Command) -> Vec<Page> {
    let command = completions::where_keys_are_read(command, with_keys);
    let mut command = command.disable_help_subcommand(true);
    command.build();
    let commands: Vec<Command> = command.get_subcommands().cloned().collect();
    std::iter::once(command).chain(commands).map(page).collect()
}

fn page(command: Command) -> Page {
    let name = command.get_display_name().unwrap_or(command.get_name()).to_string();
    let mut text = Vec::new();
    let man = Man::new(command).source(concat!("embertune ", env!("CARGO_PKG_VERSION")));
    man.render(&mut text).expect("a Vec takes everything");
    Page { name, text: String::from_utf8_lossy(&text).into_owned() + EXIT_STATUS }
}

/// The flags that a command reads by itself; every key on the page of `sft`.
fn with_keys(command: Command) -> Command {
    let name = command.get_name().to_string();
    let own = completions::own_flags(&command);
    let own_usage: String =
        own.iter().map(|(flag, value)| format!(" [--{flag}{}]", spaced(value.as_deref()))).collect();
    let mut usage = format!("embertune {name}{own_usage} [@ FILE]... [--SECTION.KEY VALUE]...");
    let mut flags: Vec<Arg> = own.iter().map(|(name, value)| own_flag(name, value.as_deref())).collect();
    match name.as_str() {
        "sft" => flags.extend(key_flags()),
        "launch" => usage = "embertune launch --ranks N -- sft [@ FILE]... [--SECTION.KEY VALUE]...".into(),
        _ => {}
    }
    command.override_usage(usage).args(flags)
}

fn spaced(value: Option<&str>) -> String {
    value.map(|value| format!(" {value}")).unwrap_or_default()
}

fn own_flag(name: &str, value: Option<&str>) -> Arg {
    let arg = Arg::new(name.to_string()).long(name.to_string());
    match value {
        Some(value) => arg.value_name(value.to_string()),
        None => arg.action(ArgAction::SetTrue),
    }
}

/// All keys; one that several types of a section have is one flag, with all that it means.
fn key_flags() -> Vec<Arg> {
    let mut flags: Vec<(FlagKey, String)> = Vec::new();
    for key in config::keys() {
        let meaning = format!("{} Default: {}.", key.doc, key.default);
        match flags.iter_mut().find(|(other, _)| other.flag == key.flag) {
            Some((_, meanings)) => *meanings += &format!(" {meaning}"),
            None => flags.push((key, meaning)),
        }
    }
    flags.into_iter().map(|(key, meaning)| key_flag(key, meaning)).collect()
}

fn key_flag(key: FlagKey, meaning: String) -> Arg {
    let heading = match key.section.as_str() {
        "" => "Keys at the top".into(),
        section => format!("Keys of [{section}]"),
    };
    Arg::new(key.flag.clone()).long(key.flag).value_name(key.kind).help(meaning).help_heading(heading)
}

/// Writes the pages, over earlier ones of ours alone.
fn write(pages: &[Page], folder: &Path) -> Result<()> {
    fs::create_dir_all(folder).map_err(|source| Error::io(folder, "create", source))?;
    let paths: Vec<PathBuf> = pages.iter().map(|page| folder.join(format!("{}.1", page.name))).collect();
    for path in paths.iter().filter(|path| path.exists()) {
        let there = fs::read_to_string(path).map_err(|source| Error::io(path, "read", source))?;
        if !there.contains(TITLE) {
            return Err(Error::Usage {
                message: format!(
                    "`{}` is there and is no page of embertune's: nothing is overwritten",
                    path.display()
                ),
                hint: "name another folder with `--out`".into(),
            });
        }
    }
    for (path, page) in paths.iter().zip(pages) {
        fs::write(path, &page.text).map_err(|source| Error::io(path, "write", source))?;
    }
    print(&format!("{} manual pages in `{}`", pages.len(), folder.display()))
}
