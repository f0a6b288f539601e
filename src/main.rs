//! Parse, run, print what went wrong.

use std::process::ExitCode;

fn main() -> ExitCode {
    match embertune::cli::run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            embertune::cli::print_error(&error);
            ExitCode::from(error.exit_code())
        }
    }
}
