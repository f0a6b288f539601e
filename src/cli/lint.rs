//! `embertune lint`: what servers make of an adapter.

use std::path::{Path, PathBuf};

use clap::Args;

use super::{folders, print};
use crate::export::{self, Lint, SERVERS, Server, Verdict};
use crate::{Error, Result};

/// What to look at.
#[derive(Debug, Args)]
pub(super) struct LintArgs {
    /// Folder of the PEFT adapter; or of a run, whose newest is taken.
    #[arg(value_name = "ADAPTER")]
    adapter: PathBuf,
    /// The model it was trained on, a folder or a name as in `model.name`: whether the two fit.
    #[arg(long, value_name = "MODEL")]
    base: Option<String>,
    /// Servers that have to take it as it is: any of peft, vllm, sglang, llama.cpp. One that doesn't is an error.
    #[arg(long = "for", value_name = "SERVER", value_delimiter = ',', value_parser = server)]
    servers: Vec<Server>,
    /// Write an adapter that all servers scale alike, as a new folder.
    #[arg(long, value_name = "OUT")]
    fold_scaling: Option<PathBuf>,
}

fn server(name: &str) -> std::result::Result<Server, String> {
    let known = SERVERS.iter().find(|(known, _)| *known == name);
    known.map(|(_, server)| *server).ok_or_else(|| format!("wanted {}", SERVERS.map(|(n, _)| n).join(", ")))
}

/// Prints a table and what is behind it.
///
/// # Errors
/// No adapter, no base; a server of `--for` doesn't take the adapter as it is; it can't be folded.
pub(super) fn run(args: &LintArgs) -> Result<()> {
    let adapter = &folders::adapter_dir(&args.adapter)?;
    let base = args.base.as_deref().map(|base| folders::model_dir(base, "--base")).transpose()?;
    let lint = export::lint(adapter, base.as_deref())?;
    print(&text(&lint))?;
    if let Some(out) = &args.fold_scaling {
        let rank = export::fold_scaling(adapter, out)?;
        print(&format!("Folded: {} (rank {rank}, scale 1)", out.display()))?;
    }
    refused(&lint, &args.servers, adapter)
}

fn text(lint: &Lint) -> String {
    let mut text = String::new();
    for (name, server) in SERVERS {
        let verdict = match lint.verdict(server) {
            Verdict::Takes => "takes it as it is",
            Verdict::Misreads => "loads it, and computes something else",
            Verdict::Refuses => "refuses it",
        };
        text += &format!("{name:<10} {verdict}\n");
        for finding in lint.findings.iter().filter(|finding| finding.server == server) {
            text += &format!("             {}\n", finding.what);
            if !finding.mend.is_empty() {
                text += &format!("               {}\n", finding.mend);
            }
        }
    }
    lint.notes.iter().for_each(|note| text += &format!("note: {note}\n"));
    text
}

fn refused(lint: &Lint, servers: &[Server], adapter: &Path) -> Result<()> {
    let unfit: Vec<String> =
        servers.iter().filter(|s| lint.verdict(**s) != Verdict::Takes).map(ToString::to_string).collect();
    if unfit.is_empty() {
        return Ok(());
    }
    Err(Error::adapter(adapter, format!("not for {} as it is", unfit.join(", ")), "what it is stands above"))
}
