//! The file format of a run: every key, its type, default, limits and meaning, here and only here.
//!
//! `load.rs` puts files and flags together, `read.rs` reads them into these tables, `check.rs` has the rules
//! between keys and the [`Plan`] that follows from them, and `docs/config.md` is written from this file.
//!
//! To add a key, add its line here with a doc comment, then use the field; the test that compares
//! `docs/config.md` says how to write that file anew.

#[macro_use]
mod table;
mod access;
mod check;
mod data;
mod field;
mod flags;
mod load;
mod read;
mod reference;
mod refused;
mod runs;
mod sample;
mod source;
mod write;

pub(crate) use access::keys;
pub(crate) use access::takes_text;
pub use access::{help, reference};

pub use check::{DeviceKind, DeviceSpec, Plan, Resume};
pub use data::*;
pub(crate) use load::nearest_sibling;
pub use load::{Loaded, load, load_run};
pub(crate) use reference::FlagKey;
pub use runs::RunConfig;
pub use sample::SampleConfig;
pub use write::Difference;

use std::path::PathBuf;

table! {
    /// The run as a whole.
    pub struct SftConfig {
        /// Optimizer steps of the whole run, counted from its very start. One of `max_steps` and `num_epochs` is
        /// needed; with both, the run ends at whichever comes first.
        max_steps: Option<usize> = None, 1..;
        /// Passes over the training data.
        num_epochs: Option<usize> = None, 1..=100_000;
        /// Seed of adapter initialisation and dropout. The order of the data has its own, `data.seed`.
        seed: u64 = 0;
        /// `auto`, `cuda`, `wgpu`, `vulkan` or `flex` (the CPU), with an index (`cuda:1`) or several (`cuda:0,1`), which
        /// share each step. `cuda` alone takes every card, `auto` the best single device. Of several processes
        /// (`embertune launch`, torchrun, srun, mpirun) each takes one.
        device: String = "auto".into();
        /// The run folder: checkpoints, weights, metrics, logs and the resolved configuration.
        output_dir: PathBuf = "outputs".into();
        /// Empty a run folder that holds an earlier run. Without it, such a folder is an error unless the run resumes.
        clean_output_dir: bool = false;
        /// Write the resolved configuration to `output_dir/configs/sft.toml` (`sft.dry-run.toml` beside an earlier run's)
        /// and stop.
        dry_run: bool = false;
        /// How long ranks in several processes wait for each other at the start. Later nobody waits for a rank that is
        /// gone, and for one that is slow as long as it takes.
        dist_timeout_seconds: u64 = 600, 1..;
        /// The model and how it is held.
        model: ModelConfig = ModelConfig::default();
        /// The tokenizer and chat template.
        tokenizer: TokenizerConfig = TokenizerConfig::default();
        /// The training data.
        data: DataConfig = DataConfig::default();
        /// Held-out loss.
        val: Option<ValConfig> = None;
        /// Prompts that the model answers while it trains.
        sample: Option<SampleConfig> = None;
        /// The optimizer.
        optim: OptimConfig = OptimConfig::default();
        /// The learning rate over the run.
        scheduler: SchedulerConfig = SchedulerConfig::default();
        /// Checkpoints and exported weights.
        ckpt: Option<CkptConfig> = None;
        /// What is written while it runs.
        log: LogConfig = LogConfig::default();
        /// Who else is told of each step.
        monitors: MonitorsConfig = MonitorsConfig::default();
        /// A sign of life over the network.
        heartbeat: Option<HeartbeatConfig> = None;
    }
}

table! {
    /// The model and how it is held.
    pub struct ModelConfig {
        /// A local Hugging Face folder, else a hub id, with `@revision` behind it for another branch, tag or commit than
        /// `main`; `embertune/tiny` is the model inside this program.
        name: String = "Qwen/Qwen3-0.6B".into();
        /// Not used in SFT, whose rows are `data.seq_len` tokens long; here so that shared `[model]` files load.
        seq_len: usize = 2048, 1..;
        /// Recompute activations in the backward pass: less memory, about a third more time.
        ac: Option<AcConfig> = None;
        /// How full fine-tuning holds its weights between steps. Adapters and optimizer state are always float32.
        optimization_dtype: String = "float32".into(), &["float32", "bfloat16"];
        /// How frozen weights are held. `auto`: bfloat16 on CUDA, float32 elsewhere.
        dtype: String = "auto".into(), &["auto", "float32", "float16", "bfloat16"];
        /// Longest document to allow, in place of the model's own `max_position_embeddings`.
        max_position_embeddings: Option<usize> = None, 1..=16_777_216;
        /// Train adapters instead of all weights.
        lora: Option<LoraConfig> = None;
    }
}

table! {
    /// Recomputation of activations.
    pub struct AcConfig {
        /// Every how many layers one is recomputed; 1 is all of them.
        freq: usize = 1, 1..;
    }
}

table! {
    /// LoRA, with PEFT's names and meanings.
    pub struct LoraConfig {
        /// Rank r of the adapters.
        rank: usize = 16, 1..=65_536;
        /// The adapter's output is scaled by alpha / r.
        alpha: f64 = 32.0, 0.0..;
        /// Dropout on the adapter's input, in training only.
        dropout: f64 = 0.0, 0.0..1.0;
        /// The linear layers to adapt: a list of names (the last parts of a module's path), a regular expression that
        /// matches whole paths, or `"all-linear"` (all but the output head).
        target_modules: TargetModules = TargetModules::List(
            ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"].map(String::from).into(),
        );
        /// Modules to leave out although `target_modules` matches them: a list or a regular expression.
        exclude_modules: Option<TargetModules> = None;
        /// Modules to train in full beside the adapters (`embed_tokens`, `lm_head`).
        modules_to_save: Vec<String> = vec![];
        /// Scale by alpha / √r instead.
        use_rslora: bool = false;
        /// Other ranks for some modules: a table from regular expression to rank; the first match counts.
        rank_pattern: Vec<(String, usize)> = vec![], 1..=65_536;
        /// Other alphas for some modules, likewise.
        alpha_pattern: Vec<(String, f64)> = vec![], 0.0..;
        /// The layers to adapt, counted from 0; needs a list in `target_modules`.
        layers_to_transform: Option<Vec<usize>> = None;
        /// How A starts: `true` is uniform in ±1/√in, `"gaussian"` is normal with deviation 1/r. B starts at zero.
        init_lora_weights: InitLoraWeights = InitLoraWeights::Default;
        /// Start from the values of this PEFT adapter (its folder, or that of a run), whose rank, alpha and targets must be
        /// those of this table.
        init_adapter_path: Option<PathBuf> = None;
    }
}

/// PEFT's `target_modules`: a list of suffixes, one regular expression, or every linear layer.
#[derive(Debug, Clone, PartialEq)]
pub enum TargetModules {
    /// Last parts of a module's path.
    List(Vec<String>),
    /// A regular expression that matches whole paths.
    Regex(String),
    /// `"all-linear"`: every linear layer but the output head.
    AllLinear,
}

/// PEFT's `init_lora_weights`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum InitLoraWeights {
    /// `true`: A ~ U(±1/√in), B = 0.
    Default,
    /// `"gaussian"`: A ~ N(0, 1/r), B = 0.
    Gaussian,
}

table! {
    /// The tokenizer and chat template; both come from the model's folder unless they are given.
    pub struct TokenizerConfig {
        /// Folder or hub id (`@revision` too) to take the tokenizer from.
        name: Option<String> = None;
        /// The chat template itself, in Jinja.
        chat_template: Option<String> = None;
        /// Which thoughts (`<think>…</think>`, `reasoning_content`) of assistant turns are printed: those that the
        /// `template` prints (Qwen3's drops them before the last user message), all (`keep`), at most those after the
        /// `last` user message, or none (`strip`). What a template prints of its own stays: Qwen3's puts an empty
        /// `<think>` block before an answer that comes without a thought.
        thinking: Thinking = Thinking::Template;
    }
}

choice! {
    /// Which thoughts of assistant turns are printed.
    pub enum Thinking {
        /// Those that the template prints: Qwen3's drops them before the last user message, plain ones drop none.
        "template" => Template,
        /// All, the ones too that the template would drop.
        "keep" => Keep,
        /// At most those after the last user message.
        "last" => Last,
        /// None; an empty block that the template prints of its own stays.
        "strip" => Strip,
    }
}

table! {
    /// Loss on held-out data, over all its trained tokens.
    pub struct ValConfig {
        /// Steps from one evaluation to the next.
        interval: usize = 50, 1..;
        /// Evaluate before the first step too.
        eval_on_start: bool = false;
        /// The held-out data. Has to be given.
        data: SftDataConfig = SftDataConfig::default();
    }
}

table! {
    /// The optimizer.
    pub struct OptimConfig {
        /// Peak learning rate.
        lr: f64 = 1e-6, 0.0..;
        /// Decoupled weight decay, on every trained parameter.
        weight_decay: f64 = 0.01, 0.0..;
        /// Largest norm of all gradients together; longer ones are scaled down. `None` leaves them.
        max_norm: Option<f64> = Some(1.0), 0.0..;
        /// How many steps in a row may be skipped because their loss or gradient isn't finite. After one more the run
        /// saves and stops.
        max_skipped: usize = 3;
        ..kind: OptimKind;
    }
}

tagged! {
    /// The optimizer's formula.
    pub enum OptimKind {
        /// PyTorch's AdamW.
        "adamw" => AdamW {
            /// Decay of the mean of gradients.
            betas1: f64 = 0.9, 0.0..1.0;
            /// Decay of the mean of squared gradients.
            betas2: f64 = 0.999, 0.0..1.0;
            /// Added to the root of the mean square.
            eps: f64 = 1e-8, 0.0..;
            /// How both means are held between steps. `bfloat16` halves their memory, on the CPU and CUDA; it is rounded up
            /// or down by chance, so that steps smaller than half a digit aren't lost.
            moments_dtype: String = "float32".into(), &["float32", "bfloat16"];
        },
        /// stochastic gradient descent.
        "sgd" => Sgd {
            /// Look ahead along the momentum.
            nesterov: bool = true;
            /// Part of the last update that is kept.
            momentum: f64 = 0.9, 0.0..1.0;
        },
        /// Muon for matrices, AdamW for everything else.
        "muon" => Muon {
            /// Momentum of the matrices.
            mu: f64 = 0.95, 0.0..1.0;
            /// Decay of the mean of gradients, of everything else.
            betas1: f64 = 0.9, 0.0..1.0;
            /// Decay of the mean of squared gradients, of everything else.
            betas2: f64 = 0.95, 0.0..1.0;
        },
        /// the sign of the gradient.
        "sign_sgd" => SignSgd,
    }
}

tagged! {
    /// The learning rate over the run. Warmup goes from `min_lr` (or 1e-8 of the peak) to `optim.lr`.
    pub enum SchedulerConfig {
        /// `optim.lr` throughout.
        "constant" => Constant,
        /// warmup, `optim.lr`, then a straight line down to `min_lr`.
        "linear" => Linear {
            /// Steps of warmup.
            warmup_steps: usize = 10;
            /// Steps of the way down.
            decay_steps: usize = 10;
            /// The lowest learning rate.
            min_lr: f64 = 0.0, 0.0..;
        },
        /// warmup, then half a cosine down to `min_lr`.
        "cosine" => Cosine {
            /// Steps of warmup.
            warmup_steps: usize = 10;
            /// The lowest learning rate.
            min_lr: f64 = 0.0, 0.0..;
        },
    }
}

table! {
    /// Checkpoints to resume from (`checkpoints/step_N`) and weights to use (`weights/step_N`).
    pub struct CkptConfig {
        /// Folder of both, in place of the run's `output_dir`.
        output_dir: Option<PathBuf> = None;
        /// Steps from one checkpoint to the next; `None` writes only the last.
        interval: Option<usize> = None, 1..;
        /// Write weights too, as a Hugging Face folder.
        weights: Option<WeightsConfig> = Some(WeightsConfig::default());
        /// Write weights and nothing to resume from.
        weights_only: bool = false;
        /// Step to resume from; -1 is the newest whole checkpoint.
        resume_step: Option<i64> = None, -1..;
        /// How many of the newest to keep; `None` keeps all.
        keep_last: Option<usize> = None, 1..;
        /// Keep those whose step is a multiple of this, whatever `keep_last` says.
        keep_interval: Option<usize> = None, 1..;
        /// On resume, count steps from 0; the schedule starts anew with them.
        skip_progress: bool = false;
        /// On resume, start the schedule anew.
        skip_scheduler: bool = false;
        /// On resume, start the data anew.
        skip_dataloader: bool = false;
        /// On resume, start the optimizer's moments anew.
        skip_optimizer: bool = false;
    }
}

table! {
    /// Exported weights.
    pub struct WeightsConfig {
        /// No effect: weights above 5 GB are always split, with an index.
        save_sharded: bool = true;
        /// The file format.
        save_format: String = "safetensors".into(), &["safetensors"];
        /// No effect: a LoRA run always writes its adapter, and nothing else; needs `[model.lora]`.
        save_adapter_separately: bool = false;
    }
}

table! {
    /// What is written while it runs. `metrics.jsonl` is always written.
    pub struct LogConfig {
        /// Least important message to show.
        level: String = "info".into(), &["trace", "debug", "info", "warn", "error"];
        /// Write messages to `logs/` in the run folder too.
        file: bool = true;
        /// Print every sample with its trained tokens marked.
        log_data: bool = false;
        /// Messages as JSON, one object a line.
        json_logging: bool = false;
        /// A line a step on a terminal too, in place of the dashboard.
        plain: bool = false;
    }
}

table! {
    /// Who else is told of each step, beside `metrics.jsonl`.
    pub struct MonitorsConfig {
        /// Write TensorBoard's files too, to `tensorboard/` in the run folder (of several runs, in each run's own).
        tensorboard: bool = false;
        /// A program and its arguments, started with the run: it gets the rows of `metrics.jsonl` on its standard input,
        /// and the run folder in the variable `EMBERTUNE_OUTPUT_DIR`. `examples/wandb_monitor.py` hands them on to
        /// Weights & Biases.
        command: Vec<String> = vec![];
    }
}

table! {
    /// A sign of life over the network, from rank 0.
    pub struct HeartbeatConfig {
        /// Ask for this URL (GET) after each step. An answer is waited for one second, beside the run. Has to be given.
        url: String = String::new();
    }
}

#[cfg(test)]
mod tests;
