//! `embertune push`: an adapter or a model to the hub.

use std::path::PathBuf;

use clap::Args;
use tracing::Level;

use super::{print, print_after};
use crate::checkpoint::find_export;
use crate::export::AdapterConfig;
use crate::hub::{self, Destination, Upload};
use crate::report::LineFormat;
use crate::report::log;
use crate::{Error, Result};

/// What to push, and where to.
#[derive(Debug, Args)]
pub(super) struct PushArgs {
    /// Folder of an adapter or a model; or of a run, whose newest weights are taken.
    #[arg(value_name = "DIR")]
    dir: PathBuf,
    /// The repository on the hub; it is made if it isn't there.
    #[arg(long, value_name = "OWNER/NAME")]
    repo: String,
    /// Make it private; one that is there and public is refused.
    #[arg(long)]
    private: bool,
    /// A branch; it is made if it isn't there.
    #[arg(long, value_name = "BRANCH")]
    revision: Option<String>,
    /// What the commit is called.
    #[arg(long, value_name = "TEXT", default_value = "Upload by embertune")]
    message: String,
    /// Send these too: a path inside the folder, `*` for any part of it. As often as needed.
    #[arg(long, value_name = "PATTERN")]
    include: Vec<String>,
    /// Only say what would be sent; the hub isn't asked.
    #[arg(long)]
    dry_run: bool,
}

/// Says what goes and what stays, and sends it.
///
/// # Errors
/// A name that no repository can have, nothing there to push, something that looks like a secret, or what the hub says.
pub(super) fn run(args: &PushArgs) -> Result<()> {
    log::init(Level::INFO, LineFormat::Text, None);
    let to = Destination {
        repo: args.repo.clone(),
        private: args.private,
        revision: args.revision.clone(),
        message: args.message.clone(),
    };
    // A dry run is to find what the push would stumble over.
    to.check()?;
    if !args.dir.is_dir() {
        return Err(Error::model(&args.dir, "there is no such folder", "name an adapter, a model or a run"));
    }
    let upload = Upload::of(&find_export(&args.dir)?, &args.include)?;
    print(&listing(&upload, args))?;
    local_base(&upload).into_iter().for_each(|warning| tracing::warn!("{warning}"));
    if args.dry_run {
        return print("dry run: nothing was sent");
    }
    let pushed = hub::push(&upload, &to)?;
    let sent = mib(pushed.sent);
    print_after(&format!("Pushed: {} (commit {}, {sent} of large files sent)", pushed.url, pushed.commit));
    Ok(())
}

fn listing(upload: &Upload, args: &PushArgs) -> String {
    let branch = args.revision.as_deref().map_or(String::new(), |branch| format!(" at `{branch}`"));
    let mut text = format!(
        "{} to {}{branch}: {} files, {}\n",
        upload.dir.display(),
        args.repo,
        upload.files.len(),
        mib(upload.bytes())
    );
    for file in &upload.files {
        text += &format!("  {:<40} {:>12}\n", file.path, mib(file.bytes));
    }
    for (path, why) in &upload.left {
        text += &format!("  {path:<40} stays here: {why}\n");
    }
    text
}

fn mib(bytes: u64) -> String {
    format!("{:.2} MiB", bytes as f64 / f64::from(1 << 20))
}

/// An adapter whose base is a folder of this machine loads nowhere else.
fn local_base(upload: &Upload) -> Option<String> {
    let base = AdapterConfig::load(&upload.dir).ok()?.base_model_name_or_path?;
    let is_path = base.starts_with(['/', '.', '~']) || std::path::Path::new(&base).exists();
    is_path.then(|| {
        format!(
            "`adapter_config.json` names the folder `{base}` as the base model: others won't find it; put the \
             model's name on the hub there"
        )
    })
}
