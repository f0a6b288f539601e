//! `embertune plot`: the curves of runs as a picture, and the page about a run made anew.

use std::fs;
use std::path::{Path, PathBuf};

use clap::Args;
use tracing::Level;

use super::print;
use crate::report::{Curves, LineFormat, Smoothing, distinct_names, is_picture, log, svg, write_png};
use crate::train::page::write_page;
use crate::{Error, Result};

/// What to draw.
#[derive(Debug, Args)]
pub(super) struct PlotArgs {
    /// Folders of runs, of jobs with several, or files of rows; `NAME=RUN` gives it a name in the picture.
    #[arg(value_name = "RUN", required = true)]
    runs: Vec<String>,
    /// Where to: `x` writes `x.svg` and `x.png`. Default: `curves` in the folder of the only one, else here.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Smooth training loss over so many steps; 1 is not at all. Default: as far as it is noisy.
    #[arg(long, value_name = "STEPS", value_parser = clap::value_parser!(u32).range(1..))]
    smooth: Option<u32>,
    /// Make `report.html` of each folder anew too, as at the end of a run: after one that was killed.
    #[arg(long)]
    page: bool,
}

/// Writes both pictures and says where.
///
/// # Errors
/// A run can't be read or none has a number to draw; a file of that name is no such picture; it can't be written.
pub(super) fn run(args: &PlotArgs) -> Result<()> {
    log::init(Level::INFO, LineFormat::Text, None);
    let named: Vec<(Option<&str>, PathBuf)> = args.runs.iter().map(|run| name_and_path(run)).collect();
    let curves = read(&named)?;
    let smoothing = args.smooth.map_or(Smoothing::Auto, |steps| Smoothing::Steps(steps as usize));
    let [vector, pixels] = &out_files(args.out.as_deref(), &named);
    assert_free(vector, pixels)?;
    let text = svg(&curves, smoothing)?;
    if let Some(folder) = vector.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        fs::create_dir_all(folder).map_err(|e| Error::io(folder, "create", e))?;
    }
    fs::write(vector, text).map_err(|e| Error::io(vector, "write", e))?;
    write_png(&curves, smoothing, pixels)?;
    print(&format!("Curves: {}\n        {}", vector.display(), pixels.display()))?;
    if args.page {
        for (_, path) in named.iter().filter(|(_, path)| path.is_dir()) {
            print(&format!("Report: {}", write_page(path)?.display()))?;
        }
    }
    Ok(())
}

/// `NAME=RUN`, or a path, which may hold a `=` itself.
fn name_and_path(text: &str) -> (Option<&str>, PathBuf) {
    match text.split_once('=') {
        Some((name, path)) if !Path::new(text).exists() => (Some(name), path.into()),
        _ => (None, text.into()),
    }
}

/// The curves of all of them, each once, with names that tell them apart.
fn read(named: &[(Option<&str>, PathBuf)]) -> Result<Vec<Curves>> {
    let mut all: Vec<Curves> = Vec::new();
    for (name, path) in named {
        let mut found = Curves::find(path)?;
        for curves in &mut found {
            curves.file = fs::canonicalize(&curves.file).unwrap_or(std::mem::take(&mut curves.file));
        }
        // A job's runs keep their names behind the one that is given.
        let only = found.len() == 1;
        for curves in found {
            if all.iter().any(|known| known.file == curves.file) {
                continue;
            }
            if let Some(text) = curves.warning() {
                tracing::warn!("{text}");
            }
            all.push(match name {
                Some(name) if only => Curves { name: name.to_string(), ..curves },
                Some(name) => Curves { name: format!("{name}/{}", curves.name), ..curves },
                None => curves,
            });
        }
    }
    distinct_names(&mut all);
    Ok(all)
}

/// The SVG and the PNG.
fn out_files(out: Option<&Path>, named: &[(Option<&str>, PathBuf)]) -> [PathBuf; 2] {
    let stem = match (out, named) {
        (Some(out), _) => match out.extension().and_then(|ending| ending.to_str()) {
            Some("svg" | "png") => out.with_extension(""),
            _ => out.into(),
        },
        (None, [(_, only)]) if only.is_dir() => only.join("curves"),
        (None, _) => "curves".into(),
    };
    ["svg", "png"].map(|ending| {
        let mut file = stem.clone().into_os_string();
        file.push(".");
        file.push(ending);
        file.into()
    })
}

/// Earlier pictures are drawn anew; anything else is left alone. The PNG is known by the SVG beside it.
fn assert_free(vector: &Path, pixels: &Path) -> Result<()> {
    let taken = match vector.exists() {
        true => (!is_picture(vector)).then_some(vector),
        false => pixels.exists().then_some(pixels),
    };
    let Some(file) = taken else { return Ok(()) };
    Err(Error::Usage {
        message: format!("{} is there already, and `embertune plot` didn't draw it", file.display()),
        hint: "name another file with `--out`, or delete this one".into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_paths() {
        assert_eq!(name_and_path("full=a/b"), (Some("full"), "a/b".into()));
        assert_eq!(name_and_path("a/b"), (None, "a/b".into()));
        let folder = tempfile::tempdir().unwrap();
        let run = folder.path().join("lr=1e-4");
        fs::create_dir(&run).unwrap();
        assert_eq!(name_and_path(run.to_str().unwrap()), (None, run.clone()));
    }

    #[test]
    fn both_files_have_one_stem() {
        let files = |out: &str| out_files(Some(Path::new(out)), &[]).map(|file| file.display().to_string());
        assert_eq!(files("a/lr=1e-4.5"), ["a/lr=1e-4.5.svg", "a/lr=1e-4.5.png"]);
        assert_eq!(files("x.png"), ["x.svg", "x.png"]);
        let named = [(None, PathBuf::from("no/folder")), (None, PathBuf::from("b"))];
        assert_eq!(out_files(None, &named), [PathBuf::from("curves.svg"), "curves.png".into()]);
    }
}
