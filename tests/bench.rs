//! `bench`: what it prints and writes, and another trainer beside it.
#![cfg(feature = "flex")]

mod common;

use common::run::RunDir;
use serde_json::Value;

const BENCH: [&str; 7] = ["bench", "@", "run.toml", "--steps", "2", "--warmup", "1"];

#[test]
fn a_step_is_measured_and_nothing_is_left_behind() {
    let dir = RunDir::new();
    let ran = dir.run(&[&BENCH[..], &["--json", "bench.json"]].concat()).succeeds();
    ran.says(&["tokens a second", "phases alone, ms", "start to first step"]);
    assert!(!dir.path("out").exists(), "{}", dir.listing());
    let found: Value = serde_json::from_str(&dir.text("bench.json")).unwrap();
    let ms = found["ms_per_step"]["all"].as_array().unwrap();
    assert_eq!(ms.len(), 2);
    assert_eq!(found["tokens_per_step"], 4 * 64);
    assert!(found["trained_tokens_per_step"].as_u64().is_some_and(|n| n > 0 && n < 4 * 64));
    for phase in ["data", "forward", "backward", "optimizer"] {
        assert!(found["phases_ms"][phase].is_number(), "{phase} in {found}");
    }
    assert_eq!(found["peer"], Value::Null);
}

#[test]
#[cfg(unix)]
fn a_peer_gets_the_work_and_stands_beside() {
    let dir = RunDir::new();
    dir.write(
        "peer.sh",
        "cp \"$1\" work.json; echo started; echo '{\"name\": \"a peer\", \"ms\": [4000, 8000, 6000]}'\n",
    );
    let ran = dir.run(&[&BENCH[..], &["--json", "bench.json", "--peer", "sh peer.sh"]].concat()).succeeds();
    ran.says(&["a peer, on the same step", "6000.0 ms (3 steps)", "embertune's, times that"]);
    let found: Value = serde_json::from_str(&dir.text("bench.json")).unwrap();
    assert_eq!(found["peer"]["ms_per_step"]["median"], 6000.0);

    let work: Value = serde_json::from_str(&dir.text("work.json")).unwrap();
    assert_eq!((&work["lora"]["r"], &work["lora"]["lora_alpha"]), (&4.into(), &8.0.into()));
    assert_eq!((&work["warmup"], &work["steps"], &work["device"]), (&1.into(), &2.into(), &"cpu".into()));
    let batches = work["micro_batches"].as_array().unwrap();
    assert_eq!(batches.len(), 2, "four rows, two at a time");
    let documents = || batches.iter().flat_map(|batch| batch.as_array().unwrap());
    let sum = |key: &str, of: fn(&Value) -> u64| -> u64 {
        documents().flat_map(|document| document[key].as_array().unwrap()).map(of).sum()
    };
    assert_eq!(sum("ids", |_| 1), found["tokens_per_step"].as_u64().unwrap());
    assert_eq!(sum("trained", |t| t.as_u64().unwrap()), found["trained_tokens_per_step"].as_u64().unwrap());

    let with = |peer: &str| dir.run(&[&BENCH[..], &["--peer", peer]].concat()).fails(2);
    with("false").says(&["`--peer`: `false` ended with", "hint: see what it printed"]);
    with("echo hello #").says(&["printed `hello` last"]);
    let two = dir.run(&[&BENCH[..], &["--peer", "true", "--device", "flex:0,1"]].concat()).fails(2);
    two.says(&["a peer is measured on one device", "--device"]);
}
