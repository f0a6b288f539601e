//! `report.html`, the page about a run or a job, made from what lies in its folder: so it can be made anew at any time.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::checkpoint::folder;
use crate::config::{self, Loaded, SftConfig};
use crate::data::DataReport;
use crate::report::{
    Curves, Event, Page, Report, Row, RunFacts, RunLine, Smoothing, duration, is_page, name_of_folder,
    run_folders, shell_quoted, svg, thousands,
};
use crate::{Error, Result};

/// Writes `report.html` of the run or job in `root`, and returns its path.
///
/// # Errors
/// No run has ever been here; what is called `report.html` is no such page; the file can't be written.
pub fn write_page(root: &Path) -> Result<PathBuf> {
    let text = page(root)?.html();
    let path = root.join("report.html");
    if path.exists() && !is_page(&path) {
        let message = "the file is there already, and is no page of a run";
        return Err(Error::checkpoint(
            &path,
            message,
            "rename it; `embertune plot RUN --page` makes the page then",
        ));
    }
    fs::write(&path, text).map_err(|e| Error::io(&path, "write", e))?;
    Ok(path)
}

/// Writes the page and tells of it. That it can't be written doesn't undo the run.
pub(super) fn tell(root: &Path, report: &mut dyn Report) {
    let clock = Instant::now();
    if let Some(path) = warn(report, write_page(root)) {
        let seconds = clock.elapsed().as_secs_f64();
        report.event(&Event::Saved { what: "report", path, seconds });
    }
}

/// An error as a warning.
pub(super) fn warn<T>(report: &mut dyn Report, result: Result<T>) -> Option<T> {
    let told = |error: &Error| {
        let hint = error.hint().map(|hint| format!(" ({hint})")).unwrap_or_default();
        Event::Warning(format!("no report: {error}{hint}"))
    };
    result.inspect_err(|error| report.event(&told(error))).ok()
}

fn page(root: &Path) -> Result<Page> {
    let file = root.join("metrics.jsonl");
    let folders = if file.exists() { Vec::new() } else { run_folders(root)? };
    if folders.is_empty() && !file.exists() {
        let message = "there is no `metrics.jsonl` here, nor in a folder of `runs`";
        return Err(Error::data(root, None, message, "name the `output_dir` of a run"));
    }
    let mut page = Page { title: name_of_folder(root), ..Page::default() };
    let config = add_config(&mut page, root);
    if folders.is_empty() {
        let curves = Curves::read(&file, &page.title);
        add_run(&mut page, root, config.as_ref(), curves.as_ref().ok());
        add_curves(&mut page, curves.map(|curves| vec![curves]));
    } else {
        add_job(&mut page, root, config.as_ref(), &folders);
    }
    Ok(page)
}

/// The configuration that the run wrote, as far as this version understands it.
fn add_config(page: &mut Page, root: &Path) -> Option<SftConfig> {
    let path = root.join("configs").join("sft.toml");
    page.config = fs::read_to_string(&path).ok()?;
    match config::load(&["@".into(), path.display().to_string()]) {
        Ok(Loaded { config, differences, .. }) => {
            page.differences = differences;
            Some(config)
        }
        Err(error) => {
            page.warnings.push(format!("`configs/sft.toml` is of another version: {error}"));
            None
        }
    }
}

fn add_curves(page: &mut Page, curves: Result<Vec<Curves>>) {
    match curves.and_then(|curves| svg(&curves, Smoothing::Auto)) {
        Ok(svg) => page.curves = Some(svg),
        Err(error) => page.no_curves = format!("There are none: {error}."),
    }
}

fn add_run(page: &mut Page, root: &Path, config: Option<&SftConfig>, curves: Option<&Curves>) {
    let facts = RunFacts::read(root);
    let steps = curves.map_or(0, Curves::last_step);
    page.verdict = verdict(steps, facts.as_ref().and_then(|facts| facts.max_steps), curves);
    if let Some(curves) = curves {
        page.numbers = numbers(curves);
        page.warnings.extend(curves.warning());
    }
    page.samples = samples(&root.join("samples.jsonl"));
    add_results(page, root, config, facts.as_ref(), None);
    if page.results.iter().any(|(what, _)| what == "checkpoint") {
        let stopped = facts.as_ref().and_then(|facts| facts.max_steps).is_none_or(|max| steps < max);
        page.commands.extend(go_on(root, config, facts.as_ref(), steps, stopped));
    }
    if let Some(facts) = facts {
        add_facts(page, facts);
    }
}

/// What the run came to.
fn verdict(steps: usize, max_steps: Option<usize>, curves: Option<&Curves>) -> String {
    let done = match max_steps {
        Some(max) if steps < max => format!("Stopped after step {steps} of {max}"),
        _ => format!("Finished after {steps} step{}", if steps == 1 { "" } else { "s" }),
    };
    match curves.map(|curves| curves.rows.values().filter(|row| row.skipped).count()) {
        Some(skipped) if skipped > 0 => format!("{done}; {skipped} of them skipped."),
        _ => format!("{done}."),
    }
}

fn numbers(curves: &Curves) -> Vec<(String, String)> {
    let values = |value: fn(&Row) -> Option<f64>| -> Vec<f64> {
        curves.points(value).into_iter().map(|point| point.1).collect()
    };
    let from_to = |values: Vec<f64>| match values[..] {
        [] => None,
        [only] => Some(format!("{only:.4}")),
        [first, .., last] => Some(format!("{first:.4} → {last:.4}")),
    };
    let best = curves.points(|row| row.val_loss).into_iter().min_by(|a, b| a.1.total_cmp(&b.1));
    let mut speeds = values(|row| row.throughput.filter(|_| !row.skipped));
    speeds.sort_by(f64::total_cmp);
    let middle = speeds.get(speeds.len() / 2).map(|speed| thousands(speed.round() as usize));
    let seconds: f64 = values(|row| row.seconds).iter().sum();
    let largest = |value: fn(&Row) -> Option<f64>| values(value).into_iter().reduce(f64::max);
    let gib = |value: Option<f64>| value.map(|value| format!("{value:.2} GiB"));
    let tokens = values(|row| row.trained_tokens).last().map(|&tokens| thousands(tokens as usize));
    let all = [
        ("training loss", from_to(values(|row| row.loss))),
        ("held-out loss", from_to(values(|row| row.val_loss))),
        ("best held-out loss", best.map(|(step, loss)| format!("{loss:.4} at step {step}"))),
        ("trained tokens", tokens),
        ("tokens/s (median step)", middle),
        ("time in steps", (seconds > 0.0).then(|| duration(seconds))),
        ("peak memory", gib(largest(|row| row.peak_memory))),
        ("device memory", gib(largest(|row| row.device_memory))),
    ];
    all.into_iter().filter_map(|(name, value)| Some((name.into(), value?))).collect()
}

/// The answers of `samples.jsonl`, by prompt in the order of the first time; a later answer of a step replaces an
/// earlier one. Rows that can't be read are left out.
fn samples(path: &Path) -> Vec<(String, Vec<(usize, String)>)> {
    let mut all: Vec<(String, Vec<(usize, String)>)> = Vec::new();
    for line in fs::read_to_string(path).unwrap_or_default().lines() {
        let Ok(row) = serde_json::from_str::<serde_json::Value>(line) else { continue };
        let (Some(step), Some(prompt), Some(text)) =
            (row["step"].as_u64(), row["prompt"].as_str(), row["text"].as_str())
        else {
            continue;
        };
        let at = all.iter().position(|(known, _)| known == prompt).unwrap_or_else(|| {
            all.push((prompt.into(), Vec::new()));
            all.len() - 1
        });
        let answers = &mut all[at].1;
        answers.retain(|(known, _)| *known != step as usize);
        answers.push((step as usize, text.into()));
    }
    all
}

/// What was saved, and what to do with it: of a run alone, or of one of a job by its name.
fn add_results(
    page: &mut Page,
    root: &Path,
    config: Option<&SftConfig>,
    facts: Option<&RunFacts>,
    name: Option<&str>,
) {
    let root = &if is_here(facts) { root.into() } else { fs::canonicalize(root).unwrap_or(root.into()) };
    let saves = match config.and_then(|config| config.ckpt.as_ref()?.output_dir.as_ref()) {
        Some(saves) if is_here(facts) => saves.clone(),
        Some(saves) => facts.map_or(saves.clone(), |facts| facts.folder.join(saves)),
        None => root.clone(),
    };
    let newest = |kind: &str| {
        let parent = saves.join(kind);
        let step = folder::steps(&parent).ok()?.into_iter().next_back()?;
        Some(parent.join(format!("step_{step}")))
    };
    let quoted = |path: &Path| shell_quoted(&path.display().to_string());
    let base = facts.map(|facts| quoted(&facts.base)).unwrap_or_else(|| "BASE".into());
    let of = name.map(|name| format!(" of {name}")).unwrap_or_default();
    let mut result = |what: &str, path: &Path| {
        page.results.push((format!("{what}{of}"), path.display().to_string()));
    };
    let mut commands = Vec::new();
    let adapter = newest("weights").map(|step| step.join("lora_adapters")).filter(|path| path.exists());
    match (adapter, newest("weights")) {
        (Some(adapter), _) => {
            result("adapter", &adapter);
            let (from, to) = (quoted(&adapter), quoted(&root.join("merged")));
            commands.push(("Ask it:", format!("embertune generate --model {base} --adapter {from}")));
            let merge = format!("embertune merge --base {base} --adapter {from} --out {to}");
            commands.push(("Merge it into the base model:", merge));
            let lint = format!("embertune lint {from} --base {base}");
            commands.push(("See which servers take it as it is:", lint));
        }
        (None, Some(weights)) => {
            result("weights", &weights);
            commands.push(("Ask them:", format!("embertune generate --model {}", quoted(&weights))));
        }
        (None, None) => {}
    }
    if let Some(checkpoint) = newest("checkpoints") {
        result("checkpoint", &checkpoint);
    }
    page.commands.extend(commands.into_iter().map(|(what, command)| (what.into(), command)));
}

/// Whether paths are the same here as where the run was started.
fn is_here(facts: Option<&RunFacts>) -> bool {
    facts.is_none_or(|facts| std::env::current_dir().is_ok_and(|here| here == facts.folder))
}

/// The command that goes on from the newest checkpoint, with the file that the run wrote.
fn go_on(
    root: &Path,
    config: Option<&SftConfig>,
    facts: Option<&RunFacts>,
    steps: usize,
    stopped: bool,
) -> Option<(String, String)> {
    let file = root.join("configs").join("sft.toml");
    let file = if is_here(facts) { file } else { fs::canonicalize(&file).unwrap_or(file) };
    let file = shell_quoted(&file.display().to_string());
    let mut command = format!("embertune sft @ {file} --ckpt.resume-step -1");
    if config?.clean_output_dir {
        command += " --no-clean-output-dir";
    }
    if stopped {
        return Some(("Go on where it stopped:".into(), command));
    }
    command += &match (config?.num_epochs, config?.max_steps) {
        (Some(epochs), None) => format!(" --num-epochs {}", 2 * epochs),
        _ => format!(" --max-steps {}", 2 * steps),
    };
    Some(("Go on training, to twice the length:".into(), command))
}

fn add_facts(page: &mut Page, facts: RunFacts) {
    page.about = format!("{} on {} in {} · {}", facts.model, facts.device, facts.dtype, facts.started);
    page.folder = facts.folder.display().to_string();
    page.warnings.extend(facts.warnings);
    page.data = data(&facts.data);
    let ranks = if facts.ranks > 1 { format!(", {} ranks", facts.ranks) } else { String::new() };
    let share = 100.0 * facts.trainable as f64 / facts.parameters.max(1) as f64;
    let resumed = facts.resumed_step.map(|step| format!("resumed after step {step}, "));
    let rows = [
        ("model", format!("{} ({})", facts.model, facts.base.display())),
        ("parameters", thousands(facts.parameters)),
        ("trained", format!("{} ({share:.2} %)", thousands(facts.trainable))),
        ("device", format!("{}{ranks}", facts.device)),
        ("computed in", facts.dtype),
        ("machine", format!("{}, {} threads", facts.system, facts.cores)),
        ("program", format!("embertune {} ({})", facts.embertune, facts.features.join(", "))),
        ("started", format!("{}{}", resumed.unwrap_or_default(), facts.started)),
    ];
    page.environment = rows.map(|(name, value)| (name.into(), value)).into();
}

fn data(report: &DataReport) -> Vec<(String, String)> {
    if report.rows == 0 {
        return vec![("rows".into(), "made-up tokens".into())];
    }
    let files = match &report.files[..] {
        [] => String::new(),
        [one] => one.display().to_string(),
        [first, .., last] => {
            format!("{} files: {} … {}", report.files.len(), first.display(), last.display())
        }
    };
    let percent = |part: usize, whole: usize| 100.0 * part as f64 / whole.max(1) as f64;
    let packed = format!(
        "{} of {} tokens an epoch, {:.0} % full",
        thousands(report.packed_rows),
        report.seq_len,
        100.0 * report.fill
    );
    let rows = [
        ("files", files),
        ("rows", format!("{} ({})", thousands(report.rows), report.formats())),
        ("left out", thousands(report.dropped_rows())),
        ("cut", thousands(report.truncated.as_ref().map_or(0, |cut| cut.rows))),
        ("documents", format!("{}, the longest has {} tokens", thousands(report.documents), report.longest)),
        ("tokens", thousands(report.tokens)),
        (
            "trained tokens",
            format!("{} ({:.1} %)", thousands(report.trained), percent(report.trained, report.tokens)),
        ),
        ("packed rows", packed),
    ];
    rows.map(|(name, value)| (name.into(), value)).into()
}

/// The table of a job's runs, the best first, the curves of all of them, and the result of the best.
fn add_job(page: &mut Page, root: &Path, config: Option<&SftConfig>, folders: &[PathBuf]) {
    let (mut all, mut stopped) = (Vec::new(), false);
    for path in folders {
        let (line, curves) = run_line(path);
        let end = RunFacts::read(path).and_then(|facts| facts.max_steps);
        stopped |= end.is_none_or(|end| line.steps < end);
        page.runs.push(line);
        all.extend(curves);
    }
    let steps = page.runs.iter().map(|run| run.steps).max().unwrap_or(0);
    let key = |run: &RunLine| run.val_loss.or(run.loss).unwrap_or(f64::INFINITY);
    page.runs.sort_by(|a, b| key(a).total_cmp(&key(b)));
    page.verdict = format!("{} runs.", folders.len());
    let mut facts = None;
    if let Some(name) = page.runs.first().filter(|run| key(run).is_finite()).map(|run| run.name.clone()) {
        page.verdict = format!("{} runs, of which {name} is the best.", folders.len());
        let best = root.join("runs").join(&name);
        facts = RunFacts::read(&best);
        add_results(
            page,
            &best,
            add_config(&mut Page::default(), &best).as_ref(),
            facts.as_ref(),
            Some(&name),
        );
    }
    let saved = |run: &PathBuf| folder::steps(&run.join("checkpoints")).is_ok_and(|steps| !steps.is_empty());
    if folders.iter().any(saved) {
        let next = go_on(root, config, facts.as_ref(), steps, stopped);
        page.commands.extend(next.map(|(what, command)| (format!("All of them. {what}"), command)));
    }
    if let Some(facts) = facts {
        add_facts(page, RunFacts { warnings: Vec::new(), ..facts });
        // These are each run's own.
        page.data.clear();
        page.environment.retain(|(name, _)| name != "trained" && name != "parameters");
    }
    let curves = if all.is_empty() { Err(Error::train("no run has a row yet", "")) } else { Ok(all) };
    add_curves(page, curves);
}

/// What the table says of a run, and its curves where it has any.
fn run_line(path: &Path) -> (RunLine, Option<Curves>) {
    let name = name_of_folder(path);
    let curves = Curves::read(&path.join("metrics.jsonl"), &name).ok();
    let last = |value: fn(&Row) -> Option<f64>| Some(curves.as_ref()?.points(value).last()?.1);
    let line = RunLine {
        link: format!("runs/{}/report.html", url_encoded(&name)),
        name,
        steps: curves.as_ref().map_or(0, Curves::last_step),
        loss: last(|row| row.loss),
        val_loss: last(|row| row.val_loss),
    };
    (line, curves)
}

/// A name in a link: what isn't a letter or digit of ASCII, by its bytes.
fn url_encoded(name: &str) -> String {
    let plain = |byte: &u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(byte);
    let encoded = |byte: u8| if plain(&byte) { (byte as char).to_string() } else { format!("%{byte:02X}") };
    name.bytes().map(encoded).collect()
}
