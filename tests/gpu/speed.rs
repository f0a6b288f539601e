//! A whole run, as `embertune sft` does it, from the arguments in `EMBERTUNE_SPEED`.

use embertune::ops::cuda::Gpu;
use embertune::ops::cuda::trace::{self, Launches};
use embertune::report::Plain;
use embertune::train::SftLearner;
use embertune::train::bench::{Amount, bench as measure};

use super::card;

/// `embertune bench` of each of the configurations in `EMBERTUNE_BENCH`, separated by `;`.
#[test]
#[ignore = "measures the configurations in EMBERTUNE_BENCH"]
fn bench() {
    let Some(_) = card() else { return };
    let arguments = std::env::var("EMBERTUNE_BENCH").expect("EMBERTUNE_BENCH holds the arguments of `bench`");
    for arguments in arguments.split(';') {
        let arguments: Vec<String> = arguments.split_whitespace().map(String::from).collect();
        let loaded = embertune::config::load(&arguments).unwrap_or_else(|e| panic!("{e}: {:?}", e.hint()));
        let steps = std::env::var("EMBERTUNE_BENCH_STEPS").ok().and_then(|steps| steps.parse().ok());
        let amount = Amount { warmup: 3, steps: steps.unwrap_or(9) };
        let found = measure(&loaded.config, amount, None, &mut Plain::stderr());
        let found = found.unwrap_or_else(|e| panic!("{e}: {:?}", e.hint()));
        eprintln!("BENCH {} {}", arguments.join(" "), found.to_json());
    }
}

#[test]
#[ignore = "trains with the arguments in EMBERTUNE_SPEED"]
fn speed() {
    let Some(_) = card() else { return };
    let arguments = std::env::var("EMBERTUNE_SPEED").expect("EMBERTUNE_SPEED holds the arguments of `sft`");
    // Several runs in one process, one after the other.
    for arguments in arguments.split(';') {
        let arguments: Vec<String> = arguments.split_whitespace().map(String::from).collect();
        eprintln!("---- {}", arguments.join(" "));
        let loaded = embertune::config::load(&arguments).unwrap_or_else(|e| panic!("{e}: {:?}", e.hint()));
        let learner = SftLearner::with_runs(loaded.config, loaded.runs).unwrap_or_else(|e| panic!("{e}"));
        learner.fit(&mut Plain::stderr()).unwrap_or_else(|e| panic!("{e}: {:?}", e.hint()));
        let launches = trace::take(Gpu::open(0).expect("the card"));
        let all: f64 = launches.iter().map(|of| of.ms * of.count as f64).sum();
        for Launches { what, ms, count } in launches.iter().take(50) {
            let total = ms * *count as f64;
            eprintln!("{total:10.2} ms {:5.1} % {count:6} × {ms:.3} ms  {what}", 100.0 * total / all);
        }
    }
}
