//! `configs/run.json`: what a run is, beside its configuration and its rows: model, device, data, and the machine that it
//! trained on. The page about a run is made from it.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use time::OffsetDateTime;
use time::macros::format_description;

use super::RunInfo;
use crate::data::DataReport;
use crate::{Error, Result};

/// What is known of a run once it is set up.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct RunFacts {
    /// Version of the program.
    pub embertune: String,
    /// Features that it was built with.
    pub features: Vec<String>,
    /// The model as the configuration names it.
    pub model: String,
    /// The folder of the base model.
    pub base: PathBuf,
    /// The device, with the hardware's name where it has one.
    pub device: String,
    /// The type that layers compute in.
    pub dtype: String,
    /// Ranks that share each step.
    pub ranks: usize,
    /// All parameters.
    pub parameters: usize,
    /// Those that are trained.
    pub trainable: usize,
    /// The step that the run ends at.
    pub max_steps: Option<usize>,
    /// Steps that earlier processes had done.
    pub resumed_step: Option<usize>,
    /// Operating system and processor family.
    pub system: String,
    /// Threads that the processor runs at once.
    pub cores: usize,
    /// When the process was set up, in the machine's time.
    pub started: String,
    /// The folder that the program ran in: paths of the configuration start here.
    pub folder: PathBuf,
    /// What was read; no rows where the data are made up.
    pub data: DataReport,
    /// What there was to warn of in the data.
    pub warnings: Vec<String>,
}

impl RunFacts {
    /// Those of a run on this machine, now.
    pub fn new(info: &RunInfo, ranks: usize, base: &Path, data: &DataReport) -> Self {
        Self {
            embertune: env!("CARGO_PKG_VERSION").into(),
            features: features(),
            model: info.model.clone(),
            base: base.into(),
            device: info.device.clone(),
            dtype: info.dtype.clone(),
            ranks,
            parameters: info.parameters,
            trainable: info.trainable,
            max_steps: info.max_steps,
            resumed_step: info.resumed_step,
            system: format!("{} on {}", system(), std::env::consts::ARCH),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            started: now(),
            folder: std::env::current_dir().unwrap_or_default(),
            warnings: data.warnings(),
            data: data.clone(),
        }
    }

    /// Writes them to a run's folder.
    ///
    /// # Errors
    /// The file can't be written.
    pub fn write(&self, root: &Path) -> Result<()> {
        let path = root.join(Self::FILE);
        let text = serde_json::to_string_pretty(self).expect("facts are plain data");
        std::fs::write(&path, text + "\n").map_err(|e| Error::io(&path, "write", e))
    }

    /// Those of a run's folder, where there are any.
    pub fn read(root: &Path) -> Option<Self> {
        serde_json::from_slice(&std::fs::read(root.join(Self::FILE)).ok()?).ok()
    }

    /// The file in a run's folder.
    pub const FILE: &'static str = "configs/run.json";
}

/// `Debian GNU/Linux 12`, where the system says; else `linux`.
fn system() -> String {
    let text = std::fs::read_to_string("/etc/os-release").unwrap_or_default();
    let name = text.lines().find_map(|line| line.strip_prefix("PRETTY_NAME="));
    name.map_or(std::env::consts::OS.into(), |name| name.trim_matches('"').to_string())
}

fn now() -> String {
    let now = OffsetDateTime::now_local().unwrap_or_else(|_| OffsetDateTime::now_utc());
    let format = format_description!(
        "[year]-[month]-[day] [hour]:[minute] UTC[offset_hour sign:mandatory]:[offset_minute]"
    );
    now.format(format).unwrap_or_default()
}

fn features() -> Vec<String> {
    let all = [
        ("flex", cfg!(feature = "flex")),
        ("wgpu", cfg!(feature = "wgpu")),
        ("vulkan", cfg!(feature = "vulkan")),
        ("cuda", cfg!(feature = "cuda")),
        ("mpi", cfg!(feature = "mpi")),
        ("tui", cfg!(feature = "tui")),
        ("hub", cfg!(feature = "hub")),
    ];
    all.into_iter().filter(|(_, on)| *on).map(|(name, _)| name.into()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_read_back_equal_and_old_files_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let info = RunInfo { model: "a/b".into(), max_steps: Some(3), ..RunInfo::default() };
        let facts = RunFacts::new(&info, 1, Path::new("base"), &DataReport::default());
        std::fs::create_dir(folder.path().join("configs")).unwrap();
        facts.write(folder.path()).unwrap();
        assert_eq!(RunFacts::read(folder.path()).unwrap(), facts);
        std::fs::write(folder.path().join(RunFacts::FILE), "{\"model\": \"x\", \"of_a_later_version\": 1}")
            .unwrap();
        assert_eq!(RunFacts::read(folder.path()).unwrap().model, "x");
        std::fs::write(folder.path().join(RunFacts::FILE), "{").unwrap();
        assert_eq!(RunFacts::read(folder.path()), None);
    }
}
