//! Parse, run, say how it ended.

use std::process::ExitCode;

fn main() -> ExitCode {
    ExitCode::from(embertune::cli::run())
}
