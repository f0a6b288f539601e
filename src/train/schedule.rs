//! The learning rate as a pure function of the step.
//!
//! prime-rl's schedules in closed form (`trainer/scheduler.py`: torch's `LinearLR`, `ConstantLR` and
//! `CosineAnnealingLR` joined by `SequentialLR`). `step` is the number of finished updates, 0 for
//! the first one. With a warmup and `min_lr = 0` the first update runs at 1e-8 · lr, as there:
//! torch's `LinearLR` doesn't accept a factor of 0.
//!
//! ```text
//! linear    lr ──      ┌───────────────┐          cosine  lr ──    ┌─╮
//!                    ╱                   ╲                       ╱     ╲
//!       min_lr ──  ╱                       ╲          min_lr ─ ╱         ╲__
//!                 0   warmup    M − decay   M                 0   warmup    M
//! ```

use std::f64::consts::PI;

use crate::config::SchedulerConfig;

/// torch's `LinearLR` needs a start factor above 0; prime-rl takes this one.
const SMALLEST_FACTOR: f64 = 1e-8;

/// A learning-rate schedule of one run.
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    config: SchedulerConfig,
    lr: f64,
    max_steps: Option<usize>,
}

impl Schedule {
    /// The schedule of a run of `max_steps` updates (`None`: without end) with peak rate `lr`. Whether it fits is
    /// a rule of the configuration.
    pub fn new(config: &SchedulerConfig, lr: f64, max_steps: Option<usize>) -> Self {
        Self { config: config.clone(), lr, max_steps }
    }

    /// The rate of the update that follows `step` finished ones.
    pub fn lr(&self, step: usize) -> f64 {
        let end = self.max_steps.unwrap_or(usize::MAX);
        match self.config {
            SchedulerConfig::Constant => self.lr,
            SchedulerConfig::Linear { warmup_steps, decay_steps, min_lr } => {
                let lowest = lowest(self.lr, min_lr);
                let decay_start = end.saturating_sub(decay_steps);
                if step < warmup_steps {
                    between(lowest, self.lr, step, warmup_steps)
                } else if decay_steps == 0 || step < decay_start {
                    self.lr
                } else {
                    between(self.lr, lowest, step - decay_start, decay_steps - 1)
                }
            }
            SchedulerConfig::Cosine { warmup_steps, min_lr } if step < warmup_steps => {
                between(lowest(self.lr, min_lr), self.lr, step, warmup_steps)
            }
            SchedulerConfig::Cosine { warmup_steps, min_lr } => {
                let length = end.saturating_sub(warmup_steps).max(1) as f64;
                let part = ((step - warmup_steps) as f64 / length).min(1.0);
                min_lr + (self.lr - min_lr) * (1.0 + (PI * part).cos()) / 2.0
            }
        }
    }
}

fn lowest(lr: f64, min_lr: f64) -> f64 {
    if min_lr > 0.0 { min_lr } else { SMALLEST_FACTOR * lr }
}

/// `LinearLR`: from `start` to `end` in `steps` steps, then `end`; stays at `start` for 0 steps.
fn between(start: f64, end: f64, step: usize, steps: usize) -> f64 {
    match steps {
        0 => start,
        _ if step >= steps => end,
        _ => start + (end - start) * step as f64 / steps as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rates(config: SchedulerConfig, lr: f64, steps: usize) -> Vec<f64> {
        let schedule = Schedule::new(&config, lr, Some(steps));
        (0..steps).map(|s| schedule.lr(s)).collect()
    }

    fn assert_rates(got: &[f64], want: &[f64]) {
        assert_eq!(got.len(), want.len());
        for (s, (got, want)) in got.iter().zip(want).enumerate() {
            assert!((got - want).abs() <= 1e-9 * want.abs(), "step {s}: {got}, want {want}");
        }
    }

    #[test]
    fn linear_as_torch_sequential_lr() {
        // SequentialLR([LinearLR(1e-8, 1, 2), LinearLR(1, 1, 1), LinearLR(1, 1e-8, 2)], [2, 3]), lr 1
        let config = SchedulerConfig::Linear { warmup_steps: 2, decay_steps: 3, min_lr: 0.0 };
        assert_rates(&rates(config, 1.0, 6), &[1e-8, 0.500000005, 1.0, 1.0, 0.500000005, 1e-8]);
    }

    #[test]
    fn linear_ends_at_min_lr() {
        let config = SchedulerConfig::Linear { warmup_steps: 0, decay_steps: 2, min_lr: 0.25 };
        assert_rates(&rates(config, 0.5, 4), &[0.5, 0.5, 0.5, 0.25]);
        let one = SchedulerConfig::Linear { warmup_steps: 1, decay_steps: 1, min_lr: 0.25 };
        assert_rates(&rates(one, 0.5, 3), &[0.25, 0.5, 0.5]);
    }

    #[test]
    fn cosine_as_torch_cosine_annealing() {
        // SequentialLR([LinearLR(0.1, 1, 1), CosineAnnealingLR(T_max=4, eta_min=0.1)], [1]), lr 1
        let config = SchedulerConfig::Cosine { warmup_steps: 1, min_lr: 0.1 };
        let half = 0.9 / 2.0;
        let root = 0.5f64.sqrt();
        let want = [0.1, 1.0, 0.1 + half * (1.0 + root), 0.1 + half, 0.1 + half * (1.0 - root)];
        assert_rates(&rates(config, 1.0, 5), &want);
    }

    #[test]
    fn cosine_without_warmup_starts_at_the_peak() {
        let config = SchedulerConfig::Cosine { warmup_steps: 0, min_lr: 0.0 };
        assert_rates(&rates(config, 2e-5, 2), &[2e-5, 1e-5]);
    }

    #[test]
    fn a_warmup_as_long_as_the_run_ends_below_the_peak() {
        let cosine = SchedulerConfig::Cosine { warmup_steps: 2, min_lr: 0.0 };
        assert_rates(&rates(cosine.clone(), 1.0, 2), &[1e-8, 0.500000005]);
        assert_eq!(Schedule::new(&cosine, 1.0, Some(2)).lr(2), 1.0);
    }

    #[test]
    fn constant_needs_no_end() {
        assert_eq!(Schedule::new(&SchedulerConfig::Constant, 0.5, None).lr(1 << 40), 0.5);
    }
}
