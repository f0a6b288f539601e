//! Data as a stream: memory, the cache of tokens, several processes, kills, order, resuming.

mod common;

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::goldens::root;
use common::run::{Ran, RunDir};
use embertune::config::{
    ColumnsConfig, LongDocuments, LossMaskConfig, SftDataConfig, StoppingStrategy, TokenizerConfig,
};
use embertune::data::{Batch, ChatTokenizer, Loader, LoaderState};
use serde_json::json;

const VOCAB: usize = 288;
const NOTHING: [PathBuf; 0] = [];

fn tokenizer() -> Arc<ChatTokenizer> {
    static TOKENIZER: OnceLock<Arc<ChatTokenizer>> = OnceLock::new();
    let load = || {
        let template = root().join("chat/template.jinja").to_string_lossy().into_owned();
        let config = TokenizerConfig { chat_template: Some(template), ..Default::default() };
        Arc::new(ChatTokenizer::load(&root().join("tiny_tokenizer"), &config).unwrap())
    };
    TOKENIZER.get_or_init(load).clone()
}

fn load(data: &SftDataConfig, epochs: Option<usize>) -> embertune::Result<Loader> {
    Loader::new(data, tokenizer(), 0, epochs, VOCAB, usize::MAX)
}

/// Every step of a run, and the state before it.
fn steps(loader: &mut Loader) -> Vec<(LoaderState, Option<Vec<Batch>>)> {
    let mut steps = Vec::new();
    loop {
        let state = loader.state();
        let step = loader.next_step().unwrap_or_else(|e| panic!("{e}"));
        let ended = step.is_none();
        steps.push((state, step));
        if ended {
            return steps;
        }
    }
}

fn batches(data: &SftDataConfig) -> Vec<Option<Vec<Batch>>> {
    let mut loader = load(data, Some(1)).unwrap_or_else(|e| panic!("{e}"));
    steps(&mut loader).into_iter().map(|(_, step)| step).collect()
}

/// Row `i`: a conversation of some turns, of uneven length.
fn row(i: usize) -> String {
    let words = ["river", "the", "é", "of", "stone", "日本", "runs", "a", "slowly,", "42"];
    let text = |from: usize, n: usize| {
        (0..n).map(|k| words[(from * 7 + k * k) % words.len()]).collect::<Vec<_>>().join(" ")
    };
    let turn = |role: &str, n: usize| json!({"role": role, "content": text(i + n, 1 + (i * 31 + n) % 17)});
    let turns: Vec<_> =
        (0..1 + i % 3).flat_map(|n| [turn("user", 2 * n), turn("assistant", 2 * n + 1)]).collect();
    json!({ "messages": turns, "number": i }).to_string()
}

fn write_rows(path: &Path, rows: std::ops::Range<usize>) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    let mut out = BufWriter::new(File::create(path).unwrap());
    rows.for_each(|i| writeln!(out, "{}", row(i)).unwrap());
}

/// A folder with a data file and one for the cache.
struct Folder {
    dir: tempfile::TempDir,
    data: SftDataConfig,
}

impl Folder {
    fn new(rows: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("rows.jsonl");
        write_rows(&file, 0..rows);
        let data = SftDataConfig {
            name: file.to_string_lossy().into_owned(),
            seq_len: 256,
            batch_size: 4,
            micro_batch_size: 2,
            cache_dir: Some(dir.path().join("cache")),
            ..Default::default()
        };
        Self { dir, data }
    }

    fn cache(&self) -> PathBuf {
        self.dir.path().join("cache")
    }

    /// Names in the cache by their ending.
    fn kept(&self, ending: &str) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.cache()).into_iter().flatten().flatten().map(|entry| entry.path());
        let mut kept: Vec<_> = entries.filter(|path| path.extension().is_some_and(|e| e == ending)).collect();
        kept.sort();
        kept
    }
}

#[cfg(unix)]
fn inode(path: &Path) -> u64 {
    std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).unwrap())
}

#[test]
fn several_sources_resume_exactly_in_the_middle_of_an_epoch() {
    let dir = tempfile::tempdir().unwrap();
    write_rows(&dir.path().join("en/train.jsonl"), 0..300);
    write_rows(&dir.path().join("de/train.jsonl"), 1000..1500);
    write_rows(&dir.path().join("de/test.jsonl"), 2000..2280);
    let pairs =
        [(vec!["en", "de", "de"], vec!["train", "train", "test"]), (vec!["de", "en"], vec!["test", "train"])];
    for stopping_strategy in [StoppingStrategy::AllExhausted, StoppingStrategy::FirstExhausted] {
        for (subsets, splits) in &pairs {
            for even in [true, false] {
                let list = |names: &[&str]| Some(names.iter().map(|name| name.to_string()).collect());
                let probabilities = [vec![0.6, 0.4], vec![0.2, 0.5, 0.3]][subsets.len() - 2].clone();
                let data = SftDataConfig {
                    name: dir.path().to_string_lossy().into_owned(),
                    subsets: list(subsets),
                    splits: list(splits),
                    probabilities: (!even).then_some(probabilities),
                    stopping_strategy,
                    seq_len: 700,
                    batch_size: 3,
                    micro_batch_size: 2,
                    ..Default::default()
                };
                check_cuts(&data);
            }
        }
    }
}

fn check_cuts(data: &SftDataConfig) {
    let mut whole = load(data, Some(3)).unwrap_or_else(|e| panic!("{e}"));
    let whole = steps(&mut whole);
    let inside = |(state, _): &&(LoaderState, _)| state.epoch == 1 && state.position > 0;
    let cuts: Vec<usize> = (0..whole.len()).filter(|&at| inside(&&whole[at])).collect();
    assert!(cuts.len() > 20, "only {} steps inside the second epoch: {data:?}", cuts.len());
    let mut resumed = load(data, Some(3)).unwrap();
    // Backwards, so that what is restored to is never where the loader already is.
    for &at in cuts.iter().step_by(cuts.len() / 5).chain([&0]).rev() {
        // As a checkpoint stores it.
        let state = serde_json::from_str(&serde_json::to_string(&whole[at].0).unwrap()).unwrap();
        resumed.restore(state).unwrap();
        assert_eq!(resumed.remaining_steps(), Some(whole.len() - 1 - at));
        for (state, want) in &whole[at..] {
            assert_eq!(&resumed.state(), state, "before step {at} of {data:?}");
            assert_eq!(&resumed.next_step().unwrap(), want, "cut before step {at} of {data:?}");
        }
    }
}

#[test]
fn threads_change_neither_tokens_nor_order() {
    let mut folder = Folder::new(700);
    folder.data.cache = false;
    let with = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        pool.install(|| {
            let mut loader = load(&folder.data, Some(1)).unwrap();
            (loader.report().clone(), steps(&mut loader))
        })
    };
    let want = with(1);
    for threads in [2, 3, 16] {
        assert!(with(threads) == want, "{threads} threads");
    }
}

#[test]
fn the_first_of_several_bad_rows_is_reported() {
    let folder = Folder::new(4000);
    let mut text: Vec<String> = (0..4000).map(row).collect();
    for bad in [1500, 1501, 3999] {
        text[bad] = "{\"messages\": 3}".into();
    }
    fs::write(&folder.data.name, text.join("\n")).unwrap();
    for _ in 0..5 {
        let error = load(&folder.data, Some(1)).unwrap_err().to_string();
        assert!(error.contains("rows.jsonl:1501: "), "{error}");
    }
    assert_eq!(folder.kept("tokens"), NOTHING);
    assert_eq!(folder.kept("unfinished"), NOTHING, "a failed build leaves nothing");
}

#[test]
#[cfg(unix)]
fn kept_tokens_are_those_made_anew_with_their_report() {
    let mut folder = Folder::new(300);
    folder.data.seq_len = 64; // some are cut
    let fresh = SftDataConfig { cache: false, ..folder.data.clone() };
    let (want, report) = (batches(&fresh), load(&fresh, Some(1)).unwrap().report().clone());
    assert!(report.truncated.is_some() && report.dropped_rows() > 0, "{:?}", report.warnings());
    assert_eq!(folder.kept("tokens"), NOTHING, "`cache = false` keeps nothing");
    assert!(batches(&folder.data) == want);
    let [kept] = &folder.kept("tokens")[..] else { panic!("one entry: {:?}", folder.kept("tokens")) };
    let first = inode(kept);
    let loader = load(&folder.data, Some(1)).unwrap();
    assert_eq!(loader.report(), &report);
    assert_eq!(loader.state(), load(&fresh, Some(1)).unwrap().state());
    assert!(batches(&folder.data) == want);
    assert_eq!((folder.kept("tokens").len(), inode(kept)), (1, first), "nothing was made anew");
    assert_eq!(folder.kept("unfinished"), NOTHING);
}

#[test]
fn what_changes_tokens_has_tokens_of_its_own() {
    let folder = Folder::new(30);
    let base = &folder.data;
    let count = |data: &SftDataConfig| {
        load(data, Some(1)).unwrap_or_else(|e| panic!("{e}"));
        folder.kept("tokens").len()
    };
    assert_eq!(count(base), 1);
    let same = [
        SftDataConfig { shuffle: false, seed: 3, batch_size: 1, micro_batch_size: 1, ..base.clone() },
        SftDataConfig { stopping_strategy: StoppingStrategy::FirstExhausted, ..base.clone() },
    ];
    assert!(same.iter().all(|data| count(data) == 1), "these change no token");
    let other = [
        SftDataConfig { seq_len: 128, ..base.clone() },
        SftDataConfig { long_documents: LongDocuments::Tail, ..base.clone() },
        SftDataConfig { loss_mask: LossMaskConfig { user: true, ..Default::default() }, ..base.clone() },
        SftDataConfig {
            columns: ColumnsConfig { system: "number".into(), ..Default::default() },
            ..base.clone()
        },
    ];
    for (i, data) in other.iter().enumerate() {
        // A number is no system message: that one fails and keeps nothing.
        let _ = load(data, Some(1));
        assert_eq!(folder.kept("tokens").len(), 1 + (i + 1).min(3), "{data:?}");
    }
    let template =
        Some("{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}".into());
    let config = TokenizerConfig { chat_template: template, ..Default::default() };
    let plain = ChatTokenizer::load(&root().join("tiny_tokenizer"), &config).unwrap();
    Loader::new(base, Arc::new(plain), 0, None, VOCAB, usize::MAX).unwrap();
    assert_eq!(folder.kept("tokens").len(), 5, "another template");
    write_rows(Path::new(&base.name), 0..31);
    assert_eq!(count(base), 6, "another row");
}

#[test]
fn damaged_tokens_are_made_anew_with_a_warning() {
    let folder = Folder::new(100);
    let want = batches(&folder.data);
    let kept = folder.kept("tokens").pop().unwrap();
    let whole = fs::read(&kept).unwrap();
    let damages: [fn(&mut Vec<u8>); 4] = [
        |bytes| bytes.truncate(bytes.len() / 2),
        |bytes| bytes.clear(),
        |bytes| bytes[10] ^= 4,
        |bytes| bytes.extend([0; 8]),
    ];
    for damage in damages {
        let mut bytes = whole.clone();
        damage(&mut bytes);
        fs::write(&kept, bytes).unwrap();
        let warnings = load(&folder.data, Some(1)).unwrap().report().warnings();
        assert!(warnings.iter().any(|w| w.contains("was damaged: made anew")), "{warnings:?}");
        let warnings = load(&folder.data, Some(1)).unwrap().report().warnings();
        assert!(!warnings.iter().any(|w| w.contains("damaged")), "mended: {warnings:?}");
        assert!(batches(&folder.data) == want);
        assert_eq!(fs::read(&kept).unwrap(), whole);
    }
}

#[test]
fn a_folder_that_is_none_costs_a_warning() {
    let mut folder = Folder::new(50);
    let want = batches(&SftDataConfig { cache: false, ..folder.data.clone() });
    folder.data.cache_dir = Some(Path::new(&folder.data.name).join("below_a_file"));
    let warnings = load(&folder.data, Some(1)).unwrap().report().warnings();
    let warned = |w: &String| w.contains("can't be kept in") && w.contains("cache_dir");
    assert!(warnings.iter().any(warned), "{warnings:?}");
    assert!(batches(&folder.data) == want);
}

#[test]
fn what_nobody_used_for_long_is_removed() {
    let folder = Folder::new(20);
    load(&folder.data, Some(1)).unwrap();
    let old = folder.kept("tokens").pop().unwrap();
    let age = |path: &Path, days: u64| {
        let then = std::time::SystemTime::now() - Duration::from_secs(days * 24 * 3600);
        File::options().append(true).open(path).unwrap().set_modified(then).unwrap();
    };
    age(&old, 40);
    load(&folder.data, Some(1)).unwrap();
    load(&SftDataConfig { seq_len: 100, ..folder.data.clone() }, Some(1)).unwrap();
    assert!(old.exists(), "it was used just now");
    age(&old, 40);
    let stranger = folder.cache().join("notes.txt");
    fs::write(&stranger, "").unwrap();
    age(&stranger, 400);
    load(&SftDataConfig { seq_len: 110, ..folder.data.clone() }, Some(1)).unwrap();
    assert!(!old.exists() && stranger.exists());
    assert_eq!(folder.kept("tokens").len(), 2);
}

#[test]
fn small_data_pass_several_epochs_in_a_step() {
    let mut folder = Folder::new(5);
    (folder.data.cache, folder.data.seq_len) = (false, 4096);
    let mut loader = load(&folder.data, Some(10)).unwrap();
    let report = loader.report().clone();
    assert_eq!((report.packed_rows, report.steps_per_epoch()), (1, 1));
    assert_eq!(report.fill, report.tokens as f64 / 4096.0, "the only row isn't left apart");
    let steps_in_all = loader.remaining_steps().unwrap();
    assert!(steps_in_all < 10, "{steps_in_all} steps for ten epochs of less than a step");
    let mut documents = 0;
    while let Some(step) = loader.next_step().unwrap() {
        // Padding is a document whose tokens are all 0.
        let of = |b: &Batch| {
            let bounds = b.cu_seqlens.windows(2).map(|w| w[0] as usize..w[1] as usize);
            bounds.filter(|range| b.input_ids[range.clone()].iter().any(|&id| id != 0)).count()
        };
        documents += step.iter().map(of).sum::<usize>();
        assert_eq!(loader.epoch(), documents / 5);
    }
    assert_eq!((loader.epoch(), documents), (10, 50));
    assert_eq!(report.epochs(1), 4.0);
}

#[test]
fn rows_are_at_least_98_percent_full() {
    let name = "embertune/reverse-text".to_string();
    let data = SftDataConfig { name, seq_len: 2048, ..Default::default() };
    let dir = embertune::hub::tokenizer_dir("embertune/tiny").unwrap();
    let tokenizer = ChatTokenizer::load(&dir, &TokenizerConfig::default()).unwrap();
    let vocab = tokenizer.vocab_size();
    let loader = Loader::new(&data, Arc::new(tokenizer), 0, Some(1), vocab, 2048).unwrap();
    assert!(loader.report().packed_rows > 20 && loader.report().fill > 0.98, "{:?}", loader.report());
}

// ---- the command: several processes, kills, memory ----

/// What `check` says of the data.
fn data_of(ran: &Ran) -> Vec<String> {
    let lines = ran.stdout.lines().skip_while(|line| !line.starts_with("Data: "));
    lines.filter(|line| !line.starts_with("Memory")).map(String::from).collect()
}

/// Arguments of `embertune check` on a file.
fn check<'a>(data: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    [&["check", "@", "run.toml", "--data.name", data], more].concat()
}

#[test]
fn of_several_processes_one_makes_the_tokens_and_the_others_wait() {
    let (run, folder) = (RunDir::new(), Folder::new(3000));
    let (cache, data) = (folder.cache(), folder.data.name.as_str());
    let args = check(data, &["--data.cache-dir", cache.to_str().unwrap()]);
    let start = || {
        let mut command = run.command(&args);
        command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    };
    let starts: Vec<_> = (0..4).map(|_| start()).collect();
    let said: Vec<Ran> = starts.into_iter().map(|child| Ran::of(child.wait_with_output().unwrap())).collect();
    for ran in &said {
        assert_eq!((ran.code, data_of(ran)), (Some(0), data_of(&said[0])), "{}", ran.all());
        assert!(!ran.all().contains("warning: the kept tokens"), "{}", ran.all());
    }
    let kept = folder.kept("tokens");
    assert_eq!((kept.len(), folder.kept("unfinished").len()), (1, 0));

    // Someone who holds the lock is waited for, and what they made is taken.
    let hidden = kept[0].with_extension("hidden");
    fs::rename(&kept[0], &hidden).unwrap();
    let lock = File::create(kept[0].with_extension("lock")).unwrap();
    lock.lock().unwrap();
    let mut waiting = start();
    sleep(Duration::from_millis(700));
    assert!(waiting.try_wait().unwrap().is_none(), "it waits");
    fs::rename(&hidden, &kept[0]).unwrap();
    let want = fs::metadata(&kept[0]).unwrap().len();
    drop(lock);
    let ran = Ran::of(waiting.wait_with_output().unwrap()).succeeds();
    assert_eq!(data_of(&ran), data_of(&said[0]));
    assert_eq!(fs::metadata(&kept[0]).unwrap().len(), want);
    assert_eq!(fs::read_dir(folder.cache()).unwrap().count(), 1, "no lock is left behind");
}

#[test]
fn killed_at_any_moment_nothing_broken_is_taken() {
    let (run, folder) = (RunDir::new(), Folder::new(6000));
    let (cache, data) = (folder.cache(), folder.data.name.as_str());
    let args = check(data, &["--data.cache-dir", cache.to_str().unwrap()]);
    let clock = Instant::now();
    let want = run.run(&check(data, &["--no-data.cache"])).succeeds();
    let whole = clock.elapsed();
    let mut left = 0;
    for i in 0..12u32 {
        let mut child = run.command(&args).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // Over the whole time, in an order of its own.
        sleep(whole * (1 + i * 5 % 12) / 12);
        child.kill().unwrap();
        child.wait().unwrap();
        left += folder.kept("unfinished").len();
        let kept = folder.kept("tokens");
        if kept.len() == 1 && i % 2 == 0 {
            // It was faster than the kill: once more.
            fs::remove_file(&kept[0]).unwrap();
        }
    }
    assert!(left > 0, "no kill came while tokens were written");
    let ran = run.run(&args).succeeds();
    assert_eq!(data_of(&ran), data_of(&want));
    assert!(!ran.all().contains("damaged"), "{}", ran.all());
    assert_eq!((folder.kept("tokens").len(), folder.kept("unfinished").len()), (1, 0));
}

#[test]
#[cfg(target_os = "linux")]
fn reading_is_stopped_by_ctrl_c() {
    let (run, folder) = (RunDir::new(), Folder::new(150_000));
    let cache = folder.cache();
    let args = [
        "sft",
        "@",
        "run.toml",
        "--data.name",
        &folder.data.name,
        "--data.cache-dir",
        cache.to_str().unwrap(),
    ];
    let child = run.command(&args).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // Into the middle of it.
    let clock = Instant::now();
    while folder.kept("unfinished").is_empty() {
        assert!(clock.elapsed() < Duration::from_secs(60), "it never began to read");
        sleep(Duration::from_millis(5));
    }
    assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
    let asked = Instant::now();
    let ran = Ran::of(child.wait_with_output().unwrap()).fails(130).says(&["before the first step"]);
    assert!(
        asked.elapsed() < Duration::from_secs(5),
        "{:?} until it stopped: {}",
        asked.elapsed(),
        ran.all()
    );
    assert_eq!(folder.kept("unfinished").len() + folder.kept("tokens").len(), 0);
}

/// The most memory that a process had, in MiB.
#[cfg(target_os = "linux")]
fn peak_mib(mut command: Command) -> f64 {
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let status = format!("/proc/{}/status", child.id());
    let mut peak = 0.0f64;
    while child.try_wait().unwrap().is_none() {
        let text = fs::read_to_string(&status).unwrap_or_default();
        let line = text.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kib = line.and_then(|line| line.trim().trim_end_matches(" kB").parse::<f64>().ok());
        peak = peak.max(kib.unwrap_or(0.0) / 1024.0);
        sleep(Duration::from_millis(5));
    }
    Ran::of(child.wait_with_output().unwrap()).succeeds();
    peak
}

/// One column `text`, in row groups of 64 MiB.
#[cfg(target_os = "linux")]
fn write_parquet(path: &Path, rows: &[String], bytes: usize) -> String {
    use parquet::basic::Compression;
    use parquet::data_type::{ByteArray, ByteArrayType};
    use parquet::file::{properties::WriterProperties, writer::SerializedFileWriter};
    let schema =
        parquet::schema::parser::parse_message_type("message rows { REQUIRED BYTE_ARRAY text (UTF8); }");
    let properties = WriterProperties::builder().set_compression(Compression::SNAPPY).build();
    let file = File::create(path).unwrap();
    let mut writer =
        SerializedFileWriter::new(file, Arc::new(schema.unwrap()), Arc::new(properties)).unwrap();
    let (mut rows, mut left) = (rows.iter().cycle(), bytes);
    while left > 0 {
        let mut group = writer.next_row_group().unwrap();
        let mut column = group.next_column().unwrap().unwrap();
        let mut room = left.min(64 << 20);
        while room > 0 {
            let some: Vec<ByteArray> = rows.by_ref().take(100).map(|row| row.as_str().into()).collect();
            let written: usize = some.iter().map(ByteArray::len).sum();
            column.typed::<ByteArrayType>().write_batch(&some, None, None).unwrap();
            (room, left) = (room.saturating_sub(written), left.saturating_sub(written));
        }
        column.close().unwrap();
        group.close().unwrap();
    }
    writer.close().unwrap();
    path.file_name().unwrap().to_string_lossy().into_owned()
}

/// `EMBERTUNE_LARGE_DATA_MB=2048` and `EMBERTUNE_LARGE_DATA_ROWS=FILE.jsonl` make it the large case, with real chats.
#[test]
#[cfg(target_os = "linux")]
fn the_size_of_a_file_never_shows_in_memory() {
    let megabytes = std::env::var("EMBERTUNE_LARGE_DATA_MB").map_or(24, |mb| mb.parse().unwrap());
    let rows = std::env::var("EMBERTUNE_LARGE_DATA_ROWS").map_or_else(
        |_| (0..2000).map(row).collect(),
        |file| fs::read_to_string(file).unwrap().lines().map(String::from).collect::<Vec<_>>(),
    );
    let run = RunDir::new();
    let peak = |file: &str| peak_mib(run.command(&check(file, &["--no-data.cache"])));
    let write = |name: &str, bytes: usize| {
        let (path, mut written) = (run.path(name), 0);
        let list = name.ends_with("json");
        let out: Box<dyn Write> = match name.ends_with("zst") {
            true => Box::new(zstd::Encoder::new(File::create(&path).unwrap(), 1).unwrap().auto_finish()),
            false => Box::new(File::create(&path).unwrap()),
        };
        let mut out = BufWriter::new(out);
        out.write_all(if list { b"[" } else { b"" }).unwrap();
        for row in rows.iter().cycle() {
            out.write_all(row.as_bytes()).unwrap();
            written += row.len() + 2;
            if written >= bytes {
                break;
            }
            out.write_all(if list { b",\n" } else { b"\n" }).unwrap();
        }
        out.write_all(if list { b"]" } else { b"" }).unwrap();
        name.to_string()
    };
    let small = peak(&write("small.jsonl", 100_000));
    for name in ["large.jsonl", "large.json", "large.jsonl.zst", "large.parquet"] {
        let file = match name.ends_with("parquet") {
            true => write_parquet(&run.path(name), &rows, megabytes << 20),
            false => write(name, megabytes << 20),
        };
        let clock = Instant::now();
        let large = peak(&file);
        let seconds = clock.elapsed().as_secs_f64();
        println!(
            "{name}: {megabytes} MiB in {seconds:.1} s, {large:.0} MiB at most, {small:.0} with little data"
        );
        let cap = if megabytes > 100 { 100.0 } else { 0.8 * megabytes as f64 };
        assert!(large - small < cap, "{name}: {large:.0} MiB, {small:.0} with little data");
        fs::remove_file(run.path(name)).unwrap();
    }
}

/// Tokens a second of reading, tokenising and packing: `EMBERTUNE_SPEED_DATA` with the real Qwen3 tokenizer;
/// with `EMBERTUNE_SPEED_CACHE`, a folder, tokens are kept there.
#[test]
#[ignore = "a measurement"]
#[cfg(target_os = "linux")]
fn speed() {
    let dir = std::env::var("EMBERTUNE_QWEN3_TOKENIZER").expect("EMBERTUNE_QWEN3_TOKENIZER");
    let name = std::env::var("EMBERTUNE_SPEED_DATA").expect("EMBERTUNE_SPEED_DATA");
    let tokenizer = Arc::new(ChatTokenizer::load(Path::new(&dir), &TokenizerConfig::default()).unwrap());
    let cache_dir = std::env::var_os("EMBERTUNE_SPEED_CACHE").map(PathBuf::from);
    let cache = cache_dir.is_some();
    let data = SftDataConfig { name, seq_len: 4096, batch_size: 8, cache, cache_dir, ..Default::default() };
    let vocab = tokenizer.vocab_size();
    let (clock, cpu) = (Instant::now(), cpu_seconds());
    let mut loader = Loader::new(&data, tokenizer, 0, Some(1), vocab, 4096).unwrap();
    let (read, read_cpu) = (clock.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    while loader.next_step().unwrap().is_some() {}
    let (all, all_cpu) = (clock.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    let report = loader.report();
    let millions = report.tokens as f64 / 1e6;
    println!(
        "{} rows, {millions:.2} M tokens, rows {:.2} % full\n\
         tokenised: {read:.2} s, {read_cpu:.2} s of processor: {:.2} M tokens/s, {:.2} M a processor second\n\
         and packed: {all:.2} s, {all_cpu:.2} s of processor: {:.2} M tokens/s, {:.2} M a processor second",
        report.rows,
        100.0 * report.fill,
        millions / read,
        millions / read_cpu,
        millions / all,
        millions / all_cpu,
    );
}

/// User and system time of this process.
#[cfg(target_os = "linux")]
fn cpu_seconds() -> f64 {
    let stat = fs::read_to_string("/proc/self/stat").expect("Linux");
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    (fields[11].parse::<f64>().unwrap() + fields[12].parse::<f64>().unwrap()) / 100.0
}
