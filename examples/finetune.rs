//! Fine-tune with the library: the same run as `embertune sft`, with a listener of our own.
//!
//! ```text
//! cargo run --release --example finetune
//! ```

use embertune::report::{Event, Report, RunInfo, StepMetrics, Summary};
use embertune::{SftConfig, SftLearner, config};

/// Keeps the losses and prints every tenth.
#[derive(Default)]
struct Losses(Vec<f64>);

impl Report for Losses {
    fn progress(&mut self, _: &str, _: usize, _: usize) {}

    fn start(&mut self, run: &RunInfo) {
        println!("training {} of {} parameters on {}", run.trainable, run.parameters, run.device);
    }

    fn step(&mut self, metrics: &StepMetrics) {
        self.0.push(metrics.loss);
        if metrics.step.is_multiple_of(10) {
            println!("step {}: loss {:.3}", metrics.step, metrics.loss);
        }
    }

    fn event(&mut self, event: &Event) {
        if let Event::Warning(text) = event {
            println!("warning: {text}");
        }
    }

    fn finish(&mut self, summary: &Summary) {
        println!("{} steps in {:.1} s", summary.steps, summary.seconds);
    }
}

fn main() -> embertune::Result<()> {
    // No file: the embedded model and data. Any argument of `embertune sft` works here.
    let mut args: Vec<String> = std::env::args().skip(1).collect();
    args.extend(["--output-dir", "outputs/example", "--clean-output-dir"].map(String::from));
    let config: SftConfig = config::load(&args)?.config;

    let mut losses = Losses::default();
    let summary = SftLearner::new(config)?.fit(&mut losses)?;
    println!("mean loss {:.3}", losses.0.iter().sum::<f64>() / losses.0.len() as f64);
    println!("adapter in {}", summary.adapter.expect("a LoRA run exports its adapter").display());
    Ok(())
}
