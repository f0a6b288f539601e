//! What can be looked at when a run is over: pictures of its curves, the page about it, the model's answers, and what
//! other programs are told while it trains.
#![cfg(feature = "flex")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::path::Path;

use common::run::RunDir;
use embertune::config;
use embertune::report::{Event, Monitors, Report, RunInfo};
use embertune::train::page::write_page;
use serde_json::Value;

/// The file of rows that `run.toml` trains on.
fn data(dir: &RunDir) -> String {
    let text = dir.text("run.toml");
    let mut names = text.lines().filter_map(|line| line.strip_prefix("name = \""));
    names.next_back().expect("a name").trim_end_matches('"').into()
}

/// A run of six steps with held-out losses.
fn train(dir: &RunDir, out: &str, args: &[&str]) {
    let data = data(dir);
    let base = ["--output-dir", out, "--max-steps", "6", "--val.interval", "2", "--val.data.name", &data];
    dir.sft(&[&base[..], &["--val.data.seq-len", "64", "--val.eval-on-start"], args].concat()).succeeds();
}

/// Rows as a run writes them, of a loss that falls from 5 to 2.
fn write_rows(dir: &RunDir, folder: &str, steps: usize) {
    let row = |step: usize| {
        let noise = (step * 7919 % 13) as f64 / 20.0;
        let loss = 2.0 + 3.0 * (-(step as f64) / 30.0).exp() + noise;
        format!("{{\"step\":{step},\"loss/mean\":{loss},\"optim/lr\":1e-4,\"optim/grad_norm\":{noise}}}\n")
    };
    fs::create_dir_all(dir.path(folder)).unwrap();
    dir.write(&format!("{folder}/metrics.jsonl"), &(1..=steps).map(row).collect::<String>());
}

/// Texts of an SVG, in its order.
fn texts(svg: &str) -> Vec<&str> {
    svg.split("<text ")
        .skip(1)
        .map(|piece| piece.split_once('>').unwrap().1.split("</text>").next().unwrap().trim())
        .collect()
}

/// The places of a colour in a PNG (8 bits of red, green and blue).
fn pixels(png: &[u8], color: [u8; 3]) -> Vec<(usize, usize)> {
    assert_eq!(png[..8], *b"\x89PNG\r\n\x1a\n");
    let word = |at: usize| u32::from_be_bytes(png[at..at + 4].try_into().unwrap());
    assert_eq!(word(16), 1800, "twice as wide as it is meant to be seen");
    assert_eq!((png[24], png[25], png[28]), (8, 2, 0), "8 bits of RGB, not interlaced");
    let (mut at, mut packed) = (8, Vec::new());
    while at < png.len() {
        let length = word(at) as usize;
        if &png[at + 4..at + 8] == b"IDAT" {
            packed.extend(&png[at + 8..at + 8 + length]);
        }
        at += 12 + length;
    }
    let mut bytes = Vec::new();
    flate2::read::ZlibDecoder::new(&packed[..]).read_to_end(&mut bytes).unwrap();
    let stride = 3 * 1800;
    let (mut above, mut found) = (vec![0u8; stride], Vec::new());
    for (y, line) in bytes.chunks(1 + stride).enumerate() {
        let mut row = line[1..].to_vec();
        for i in 0..stride {
            let left = if i < 3 { 0 } else { row[i - 3] };
            let corner = if i < 3 { 0 } else { above[i - 3] };
            row[i] = row[i].wrapping_add(match line[0] {
                0 => 0,
                1 => left,
                2 => above[i],
                3 => ((u16::from(left) + u16::from(above[i])) / 2) as u8,
                _ => paeth(left, above[i], corner),
            });
        }
        let of_color = row.chunks(3).enumerate().filter(|(_, pixel)| **pixel == color);
        found.extend(of_color.map(|(x, _)| (x, y)));
        above = row;
    }
    found
}

fn paeth(left: u8, above: u8, corner: u8) -> u8 {
    let guess = i16::from(left) + i16::from(above) - i16::from(corner);
    let far = |value: u8| (guess - i16::from(value)).abs();
    match (far(left), far(above), far(corner)) {
        (l, a, c) if l <= a && l <= c => left,
        (_, a, c) if a <= c => above,
        _ => corner,
    }
}

const BLUE: [u8; 3] = [0x00, 0x72, 0xB2];
const ORANGE: [u8; 3] = [0xD5, 0x5E, 0x00];

#[test]
fn two_runs_are_one_picture() {
    let dir = RunDir::new();
    train(&dir, "lora", &[]);
    train(&dir, "full", &["--model.lora", "None", "--optim.lr", "1e-3"]);
    dir.run(&["plot", "lora", "fine tuning=full", "--out", "pictures/both.png"])
        .succeeds()
        .says(&["both.svg", "both.png"]);
    let svg = dir.text("pictures/both.svg");
    let found = texts(&svg);
    for text in [
        "lora",
        "fine tuning",
        "held out",
        "loss (nats a trained token)",
        "learning rate",
        "gradient norm",
        "tokens/s",
    ] {
        assert_eq!(found.iter().filter(|t| **t == text).count(), 1, "{text} in {found:?}");
    }
    assert_eq!(found.iter().filter(|t| **t == "step").count(), 4, "each panel says what it is over");
    for color in ["#0072B2", "#D55E00"] {
        // Training, held out, three small panels, the legend.
        let of_run =
            |line: &&str| line.starts_with("<polyline") && line.contains(&format!("stroke=\"{color}\""));
        let lines = svg.lines().filter(of_run).count();
        assert_eq!(lines, 6, "{color} in {svg}");
        let is_mark =
            |line: &&str| !line.starts_with("<style") && line.contains(&format!("fill=\"{color}\""));
        let marks = svg.lines().filter(is_mark).count();
        assert_eq!(marks, 5, "a point for each of steps 0, 2, 4, 6, and the legend's");
    }
    let png = dir.bytes("pictures/both.png");
    for color in [BLUE, ORANGE] {
        let count = pixels(&png, color).len();
        assert!(count > 2000, "{count} pixels of {color:?}");
    }
    // A run's own folder is where the picture of it alone goes, as a part of the run.
    dir.run(&["plot", "lora"]).succeeds();
    assert!(dir.text("lora/curves.svg").contains("held out") && dir.path("lora/curves.png").exists());
    train(&dir, "lora", &["--clean-output-dir"]);
    assert!(!dir.path("lora/curves.svg").exists() && !dir.path("lora/curves.png").exists());
}

#[test]
fn sharp_corners_stay_in_their_panel() {
    let dir = RunDir::new();
    write_rows(&dir, "out", 20_000);
    dir.run(&["plot", "out"]).succeeds();
    // The faint blue of noisy training loss; its panel ends 354 pixels from the top, half as many as the PNG has.
    let noise = pixels(&dir.bytes("out/curves.png"), [173, 210, 230]);
    let lowest = noise.iter().map(|place| place.1).max().unwrap();
    assert!(noise.len() > 20_000 && lowest <= 2 * 354 + 2, "{} pixels, down to {lowest}", noise.len());
}

#[test]
fn eight_runs_of_a_job_differ_in_their_looks() {
    let dir = RunDir::new();
    for n in 0..8 {
        write_rows(&dir, &format!("job/runs/run-{n}"), 60);
    }
    fs::create_dir_all(dir.path("job/runs/waits")).unwrap();
    dir.write("job/runs/waits/metrics.jsonl", "");
    dir.run(&["plot", "job"]).succeeds();
    let svg = dir.text("job/curves.svg");
    let names: Vec<&str> = texts(&svg).into_iter().filter(|text| text.starts_with("run-")).collect();
    assert_eq!(names, ["run-0", "run-1", "run-2", "run-3", "run-4", "run-5", "run-6", "run-7"]);
    let color = |line: &str| line.split("stroke=\"").nth(1).and_then(|rest| rest.get(..7)).map(String::from);
    let mut colors: Vec<String> =
        svg.lines().filter(|line| line.starts_with("<polyline")).filter_map(color).collect();
    colors.sort();
    colors.dedup();
    // Those of eight runs, of the grid, of axes and ticks.
    assert_eq!(colors.len(), 10, "{colors:?}");
    // More than eight: dashes.
    let whole = svg.matches("<polyline").count();
    write_rows(&dir, "job/runs/run-8", 60);
    dir.run(&["plot", "job"]).succeeds();
    let dashed = dir.text("job/curves.svg").matches("<polyline").count();
    assert!(dashed > whole + 50, "{whole} → {dashed}");
}

#[test]
fn runs_of_one_name_are_told_apart_and_no_run_is_drawn_twice() {
    let dir = RunDir::new();
    write_rows(&dir, "a/out", 5);
    write_rows(&dir, "b/out", 5);
    dir.run(&["plot", "a/out", "b/out", "a/out/", "a/out/metrics.jsonl", "--out", "x"]).succeeds();
    let svg = dir.text("x.svg");
    let names: Vec<&str> = texts(&svg).into_iter().filter(|text| text.contains("out")).collect();
    assert_eq!(names, ["a/out", "b/out"]);
}

#[test]
fn a_broken_line_is_named_and_the_rest_is_drawn() {
    let dir = RunDir::new();
    write_rows(&dir, "out", 40);
    let rows = dir.text("out/metrics.jsonl").replace("{\"step\":7,", "{\"step\":seven,");
    dir.write("out/metrics.jsonl", &rows);
    dir.run(&["plot", "out"])
        .succeeds()
        .says(&["out/metrics.jsonl:7: this is no row with a `step`; it is left out"]);
    assert!(dir.text("out/curves.svg").contains("polyline"));
    // And in the page.
    dir.run(&["plot", "out", "--page"]).succeeds().says(&["out/report.html"]);
    let page = dir.text("out/report.html");
    assert!(page.contains("out/metrics.jsonl:7: this is no row with a `step`; it is left out"), "{page}");
    // A file without a row at all, a folder without a file, no path at all.
    dir.write("notes.txt", "a note\n");
    dir.run(&["plot", "notes.txt"]).fails(1).says(&["notes.txt:1: this is no row with a `step`"]);
    dir.run(&["plot", "out/configs-of-old"]).fails(1).says(&["out/configs-of-old"]);
    fs::create_dir(dir.path("empty")).unwrap();
    dir.run(&["plot", "empty"]).fails(1).says(&["there is no `metrics.jsonl` here", "hint: "]);
    dir.write("rows.jsonl", "{\"step\": 1}\n");
    dir.run(&["plot", "rows.jsonl"]).fails(1).says(&["there is nothing to draw", "`loss/mean`"]);
}

#[test]
fn only_a_picture_of_ours_is_drawn_anew() {
    let dir = RunDir::new();
    write_rows(&dir, "out", 5);
    for file in ["mine.svg", "mine.png"] {
        let before = "<svg>not ours</svg>";
        dir.write(file, before);
        dir.run(&["plot", "out", "--out", "mine"]).fails(2).says(&[file, "`--out`"]);
        assert_eq!(dir.text(file), before);
        fs::remove_file(dir.path(file)).unwrap();
        assert!(!dir.path("mine.png").exists(), "nothing is left half written");
    }
    dir.run(&["plot", "out", "--out", "mine"]).succeeds();
    let first = dir.text("mine.svg");
    write_rows(&dir, "out", 9);
    dir.run(&["plot", "out", "--out", "mine.svg"]).succeeds();
    assert_ne!(dir.text("mine.svg"), first);
}

#[test]
fn a_page_or_picture_that_a_user_made_is_left_alone() {
    let dir = RunDir::new();
    fs::create_dir(dir.path("out")).unwrap();
    for file in ["report.html", "curves.png", "run.json"] {
        dir.write(&format!("out/{file}"), "mine");
    }
    dir.write("out/samples.jsonl", "{\"answer\": \"mine\"}\n");
    dir.sft(&[]).succeeds().says(&["no report: out/report.html", "is no page of a run"]);
    assert!(dir.listing().contains("samples.jsonl.old"), "{}", dir.listing());
    dir.sft(&["--ckpt.resume-step", "-1", "--max-steps", "3"]).succeeds();
    dir.sft(&["--clean-output-dir"]).succeeds();
    for file in ["report.html", "curves.png", "run.json"] {
        assert_eq!(dir.text(&format!("out/{file}")), "mine", "{file}");
    }
}

/// Holds that a page needs nothing else: it loads, runs and sends nothing.
fn assert_self_contained(page: &str) {
    for word in [
        "<script",
        "<img",
        "<iframe",
        "<object",
        "<base",
        "@import",
        "url(",
        "src=",
        "http-equiv=\"refresh\"",
    ] {
        assert!(!page.contains(word), "`{word}` in {page}");
    }
    let links = page.split("href=\"").skip(1).map(|rest| rest.split('"').next().unwrap());
    for link in links {
        assert!(link == "data:," || link.starts_with("runs/"), "a link to {link}");
    }
    assert!(page.contains("default-src 'none'"));
    assert!(page.starts_with("<!DOCTYPE html>") && page.trim_end().ends_with("</html>"));
}

#[test]
fn a_run_ends_with_a_page_that_needs_nothing_else() {
    let dir = RunDir::new();
    train(&dir, "out", &[]);
    let page = dir.text("out/report.html");
    assert_self_contained(&page);
    let rows = dir.rows("out");
    let last = |key: &str| rows.iter().filter_map(|row| row[key].as_f64()).next_back().unwrap();
    let adapter = Path::new("out/weights/step_6/lora_adapters");
    assert!(dir.path(adapter.to_str().unwrap()).exists());
    for text in [
        "Finished after 6 steps.",
        "<svg ",
        "held out",
        &format!("{:.4}", last("loss/mean")),
        &format!(
            "{:.4} at step",
            rows.iter().filter_map(|row| row["val/loss"].as_f64()).fold(f64::MAX, f64::min)
        ),
        "out/weights/step_6/lora_adapters",
        "embertune merge --base ",
        "<code>optim.lr</code></td><td><code>0.01",
        "weight_decay",
        "train.jsonl",
        "threads",
        "flex",
        env!("CARGO_PKG_VERSION"),
    ] {
        assert!(page.contains(text), "`{text}` in {page}");
    }
    // Full fine-tuning has weights, no adapter.
    train(&dir, "full", &["--model.lora", "None"]);
    let page = dir.text("full/report.html");
    assert!(page.contains("full/weights/step_6") && !page.contains("lora_adapters"), "{page}");
}

#[cfg(unix)]
#[test]
fn an_interrupted_run_has_its_page_and_says_how_to_go_on() {
    let dir = RunDir::new();
    let mut child = dir.spawn(&["--max-steps", "100000", "--ckpt.interval", "50000"]);
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().contains("Step 3 ")));
    let pid = child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-INT", &pid]).status().unwrap().success());
    let rest: Vec<String> = lines.map(|line| line.unwrap()).collect();
    assert_eq!(child.wait().unwrap().code(), Some(130), "{rest:?}");
    let page = dir.text("out/report.html");
    assert_self_contained(&page);
    let steps = dir.rows("out").len();
    assert!(page.contains(&format!("Stopped after step {steps} of 100000.")), "{page}");
    assert!(page.contains("Go on where it stopped:") && page.contains("--ckpt.resume-step -1"), "{page}");
    assert!(page.contains(&format!("out/weights/step_{steps}/lora_adapters")), "{page}");
}

#[test]
fn a_job_has_a_page_of_its_own_that_leads_to_those_of_its_runs() {
    let dir = RunDir::new();
    let runs = "[[runs]]\nname = \"low\"\noptim.lr = 1e-3\n[[runs]]\nname = \"high\"\noptim.lr = 1e-2\n";
    dir.write("job.toml", &format!("{}\n{runs}", dir.text("run.toml")));
    dir.run(&["sft", "@", "job.toml"]).succeeds();
    let page = dir.text("out/report.html");
    assert_self_contained(&page);
    let links: Vec<&str> =
        page.split("href=\"runs/").skip(1).map(|rest| rest.split('"').next().unwrap()).collect();
    assert_eq!(links.len(), 2);
    for link in links {
        let page = dir.text(&format!("out/runs/{link}"));
        assert_self_contained(&page);
        assert!(page.contains("lora_adapters"));
    }
    for text in ["adapter of ", "All of them. Go on training", "embertune merge --base "] {
        assert!(page.contains(text), "{text} in {page}");
    }
    let names = texts(&page);
    assert!(names.contains(&"low") && names.contains(&"high"), "{names:?}");
    dir.run(&["plot", "out"]).succeeds();
    assert!(texts(&dir.text("out/curves.svg")).contains(&"high"));
}

/// The configuration of `run.toml` with these flags, as a program of its own reads it.
fn loaded(dir: &RunDir, args: &[&str]) -> config::SftConfig {
    let file = dir.path("run.toml").display().to_string();
    let out = dir.path("out").display().to_string();
    let all = [&["@", &file, "--output-dir", &out][..], args].concat();
    config::load(&all.iter().map(ToString::to_string).collect::<Vec<_>>()).unwrap().config
}

#[test]
fn answers_are_kept_and_shown() {
    let dir = RunDir::new();
    train(&dir, "out", &[]);
    let mut monitors = Monitors::new(&loaded(&dir, &[]));
    monitors.start(&RunInfo::default());
    let sample = |run: Option<&str>, step, prompt: &str, text: &str| Event::Sample {
        run: run.map(String::from),
        step,
        prompt: prompt.into(),
        text: text.into(),
    };
    monitors.event(&sample(None, 2, "What is <a>\n\"tide\"?", "water"));
    monitors.event(&sample(None, 4, "What is <a>\n\"tide\"?", "the sea & the moon"));
    fs::create_dir_all(dir.path("out/runs/one")).unwrap();
    monitors.event(&sample(Some("one"), 2, "Hi", "Ho"));
    let rows: Vec<Value> =
        dir.text("out/samples.jsonl").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(rows.len(), 2);
    assert_eq!(
        rows[1],
        serde_json::json!({ "step": 4, "prompt": "What is <a>\n\"tide\"?", "text": "the sea & the moon" })
    );
    let row: Value = serde_json::from_str(dir.text("out/runs/one/samples.jsonl").trim()).unwrap();
    assert_eq!(row, serde_json::json!({ "run": "one", "step": 2, "prompt": "Hi", "text": "Ho" }));
    let page = fs::read_to_string(write_page(&dir.path("out")).unwrap()).unwrap();
    assert_self_contained(&page);
    for text in
        ["What is &lt;a&gt;\n&quot;tide&quot;?", "the sea &amp; the moon", "Earlier answers (1)", "water"]
    {
        assert!(page.contains(text), "{text} in {page}");
    }
    // Going on from an earlier step takes back what later ones answered.
    dir.sft(&["--ckpt.resume-step", "2", "--max-steps", "3"]).succeeds();
    assert_eq!(dir.text("out/samples.jsonl").lines().count(), 1);
    // And a run that begins anew has none.
    dir.sft(&["--clean-output-dir"]).succeeds();
    assert!(!dir.path("out/samples.jsonl").exists());
}

/// Scalars of TensorBoard's files in a folder: by name, step and value. Written after the format's description alone,
/// with another way to the checksum than the program's.
fn scalars(folder: &Path) -> Vec<(String, u64, f32)> {
    let table: Vec<u32> = (0..256u32)
        .map(|n| (0..8).fold(n, |crc, _| if crc % 2 == 1 { (crc >> 1) ^ 0x82f6_3b78 } else { crc >> 1 }))
        .collect();
    let crc = |bytes: &[u8]| {
        let crc =
            !bytes.iter().fold(!0u32, |crc, b| (crc >> 8) ^ table[((crc ^ u32::from(*b)) & 255) as usize]);
        crc.rotate_right(15).wrapping_add(0xa282_ead8)
    };
    let word = |bytes: &[u8]| u32::from_le_bytes(bytes[..4].try_into().unwrap());
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.sort();
    let mut found = Vec::new();
    for file in files {
        let bytes = fs::read(file).unwrap();
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
            let message = &rest[12..12 + length];
            assert_eq!((word(&rest[8..]), word(&rest[12 + length..])), (crc(&rest[..8]), crc(message)));
            rest = &rest[16 + length..];
            let event = fields(message);
            let step = event.iter().find(|field| field.0 == 2).map_or(0, |field| field.1);
            for (_, _, summary) in event.iter().filter(|field| field.0 == 5) {
                for (_, _, value) in fields(summary) {
                    let inner = fields(&value);
                    let name = String::from_utf8(inner[0].2.clone()).unwrap();
                    found.push((name, step, f32::from_bits(inner[1].1 as u32)));
                }
            }
        }
    }
    found
}

/// Fields of a protobuf message: number, value if it is one, bytes if it has some.
fn fields(mut bytes: &[u8]) -> Vec<(u64, u64, Vec<u8>)> {
    fn varint(bytes: &mut &[u8]) -> u64 {
        let length = bytes.iter().position(|b| b & 128 == 0).unwrap() + 1;
        let value = bytes[..length].iter().rev().fold(0, |value, b| value << 7 | u64::from(b & 127));
        *bytes = &bytes[length..];
        value
    }
    let mut found = Vec::new();
    while !bytes.is_empty() {
        let tag = varint(&mut bytes);
        let (value, length) = match tag & 7 {
            0 => (varint(&mut bytes), 0),
            1 => (u64::from_le_bytes(bytes[..8].try_into().unwrap()), 8),
            2 => (0, varint(&mut bytes) as usize),
            5 => (u64::from(u32::from_le_bytes(bytes[..4].try_into().unwrap())), 4),
            wire => panic!("wire type {wire}"),
        };
        found.push((tag >> 3, value, bytes[..length].to_vec()));
        bytes = &bytes[length..];
    }
    found
}

#[test]
fn tensorboard_has_the_numbers_of_every_row() {
    let dir = RunDir::new();
    train(&dir, "out", &["--monitors.tensorboard"]);
    let found = scalars(&dir.path("out/tensorboard"));
    let mut wanted = Vec::new();
    for row in dir.rows("out") {
        let numbers = row.as_object().unwrap().iter().filter(|(name, _)| *name != "step");
        let step = row["step"].as_u64().unwrap();
        wanted.extend(numbers.filter_map(|(name, value)| Some((name.clone(), step, value.as_f64()? as f32))));
    }
    assert!(wanted.iter().any(|(name, step, _)| name == "val/loss" && *step == 0));
    assert_eq!(found, wanted);
    // A run that goes on writes a file of its own beside.
    dir.sft(&["--monitors.tensorboard", "--ckpt.resume-step", "-1", "--max-steps", "7", "--val", "None"])
        .succeeds();
    let found = scalars(&dir.path("out/tensorboard"));
    assert_eq!(found.iter().filter(|(name, _, _)| name == "loss/mean").count(), 7);
    assert_eq!(fs::read_dir(dir.path("out/tensorboard")).unwrap().count(), 2);
}

#[test]
fn a_command_is_told_every_row() {
    let dir = RunDir::new();
    let command = r#"["sh", "-c", "cat > rows.txt; echo $EMBERTUNE_OUTPUT_DIR"]"#;
    train(&dir, "out", &["--monitors.command", command]);
    let told: Vec<Value> =
        dir.text("rows.txt").lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let numbers = |rows: &[Value]| -> Vec<BTreeMap<String, String>> {
        let of_row =
            |row: &Value| row.as_object().unwrap().iter().map(|(k, v)| (k.clone(), v.to_string())).collect();
        rows.iter().map(of_row).collect()
    };
    assert_eq!(numbers(&told), numbers(&dir.rows("out")));
    let log = dir.text("out/logs/monitor.log");
    assert_eq!(Path::new(log.trim()), fs::canonicalize(dir.path("out")).unwrap());
}

#[cfg(feature = "hub")]
#[test]
fn a_heartbeat_is_a_request_after_each_step() {
    use std::io::Write;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};

    let dir = RunDir::new();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/ping/abc", server.local_addr().unwrap());
    let beats = Arc::new(AtomicUsize::new(0));
    let counted = beats.clone();
    std::thread::spawn(move || {
        for stream in server.incoming() {
            let mut reader = BufReader::new(stream.unwrap());
            // One connection may carry several.
            loop {
                let mut line = String::new();
                if reader.read_line(&mut line).unwrap_or(0) == 0 {
                    break;
                }
                if line.starts_with("GET /ping/abc ") {
                    counted.fetch_add(1, Ordering::SeqCst);
                }
                if line == "\r\n" {
                    let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";
                    reader.get_mut().write_all(answer).unwrap();
                }
            }
        }
    });
    dir.sft(&["--max-steps", "8", "--heartbeat.url", &url]).succeeds();
    let heard = beats.load(Ordering::SeqCst);
    // Those that come while one is under way fall together.
    assert!((2..=8).contains(&heard), "{heard} of 8");
}

#[test]
fn what_cannot_be_told_is_said_once_and_stops_nothing() {
    let dir = RunDir::new();
    // In the place of a folder a file; a program that isn't there; a server that is gone; answers that can't be kept.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let url = format!("http://{address}/");
    let command = r#"["no-such-program"]"#;
    let trained = |args: &[&str]| {
        let ran = dir.sft(&[&["--max-steps", "8", "--clean-output-dir"][..], args].concat()).succeeds();
        assert_eq!(dir.rows("out").len(), 8);
        ran.stderr.lines().filter(|line| line.starts_with("warning: ")).map(String::from).collect::<Vec<_>>()
    };
    let said = trained(&["--monitors.command", command]);
    assert!(said.len() == 1 && said[0].contains("cannot start `no-such-program`"), "{said:?}");
    let said = trained(&["--monitors.command", r#"["sh", "-c", "exit 3"]"#]);
    let ends = said.iter().filter(|line| line.contains("`monitors.command` failed (exit status: 3)")).count();
    assert!(ends == 1 && said.len() <= 2, "{said:?}");
    if cfg!(feature = "hub") {
        let said = trained(&["--heartbeat.url", &url]);
        assert!(said.len() == 1 && said[0].contains("`heartbeat.url`"), "{said:?}");
    }
    dir.write("out/tensorboard", "a file");
    let said = trained(&["--monitors.tensorboard"]);
    assert!(said.len() == 1 && said[0].contains("TensorBoard's file is left out"), "{said:?}");
    assert_eq!(dir.text("out/tensorboard"), "a file");
}
