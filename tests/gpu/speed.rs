//! A whole run, as `embertune sft` does it, from the arguments in `EMBERTUNE_SPEED`.

use embertune::report::Plain;
use embertune::train::SftLearner;

use super::card;

#[test]
#[ignore = "trains with the arguments in EMBERTUNE_SPEED"]
fn speed() {
    let Some(_) = card() else { return };
    let arguments = std::env::var("EMBERTUNE_SPEED").expect("EMBERTUNE_SPEED holds the arguments of `sft`");
    let arguments: Vec<String> = arguments.split_whitespace().map(String::from).collect();
    let loaded = embertune::config::load(&arguments).unwrap_or_else(|e| panic!("{e}: {:?}", e.hint()));
    let learner = SftLearner::new(loaded.config).unwrap_or_else(|e| panic!("{e}"));
    learner.fit(&mut Plain::stderr()).unwrap_or_else(|e| panic!("{e}: {:?}", e.hint()));
}
