//! The file format of a run: every key, its default and its meaning, here and only here.

use std::path::PathBuf;

/// A whole run of supervised fine-tuning.
#[derive(Debug, Clone, PartialEq)]
pub struct SftConfig {
    pub max_steps: Option<usize>,
    pub num_epochs: Option<usize>,
    pub seed: u64,
    pub device: String,
    pub output_dir: PathBuf,
    pub clean_output_dir: bool,
    pub dry_run: bool,
    pub dist_timeout_seconds: u64,
    pub model: ModelConfig,
    pub tokenizer: TokenizerConfig,
    pub data: DataConfig,
    pub val: Option<ValConfig>,
    pub optim: OptimConfig,
    pub scheduler: SchedulerConfig,
    pub ckpt: Option<CkptConfig>,
    pub log: LogConfig,
}

/// `[model]`
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    pub name: String,
    pub seq_len: usize,
    pub ac: Option<AcConfig>,
    pub optimization_dtype: String,
    pub dtype: String,
    pub lora: Option<LoraConfig>,
}

/// `[model.ac]`: recompute activations in the backward pass.
#[derive(Debug, Clone, PartialEq)]
pub struct AcConfig {
    pub freq: usize,
}

/// `[model.lora]`
#[derive(Debug, Clone, PartialEq)]
pub struct LoraConfig {
    pub rank: usize,
    pub alpha: f64,
    pub dropout: f64,
    pub target_modules: TargetModules,
    pub exclude_modules: Option<TargetModules>,
    pub modules_to_save: Vec<String>,
    pub use_rslora: bool,
    pub rank_pattern: Vec<(String, usize)>,
    pub alpha_pattern: Vec<(String, f64)>,
    pub layers_to_transform: Option<Vec<usize>>,
    pub init_lora_weights: InitLoraWeights,
}

/// PEFT's `target_modules`: a list of suffixes, one regular expression, or every linear layer.
#[derive(Debug, Clone, PartialEq)]
pub enum TargetModules {
    List(Vec<String>),
    Regex(String),
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

/// `[tokenizer]`
#[derive(Debug, Clone, PartialEq)]
pub struct TokenizerConfig {
    pub name: Option<String>,
    pub chat_template: Option<String>,
}

/// `[data]` (and `[val.data]`)
#[derive(Debug, Clone, PartialEq)]
pub enum DataConfig {
    Sft(SftDataConfig),
    Fake(FakeDataConfig),
}

/// `[data] type = "sft"`
#[derive(Debug, Clone, PartialEq)]
pub struct SftDataConfig {
    pub batch_size: usize,
    pub seq_len: usize,
    pub micro_batch_size: usize,
    pub name: String,
    pub subsets: Option<Vec<String>>,
    pub splits: Option<Vec<String>>,
    pub probabilities: Option<Vec<f64>>,
    pub stopping_strategy: StoppingStrategy,
    pub shuffle: bool,
    pub seed: u64,
    pub loss_mask: LossMaskConfig,
}

/// When interleaved sources end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoppingStrategy {
    AllExhausted,
    FirstExhausted,
}

/// Which roles are trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LossMaskConfig {
    pub system: bool,
    pub user: bool,
    pub assistant: bool,
    pub tool: bool,
}

/// `[data] type = "fake"`
#[derive(Debug, Clone, PartialEq)]
pub struct FakeDataConfig {
    pub batch_size: usize,
    pub seq_len: usize,
    pub micro_batch_size: usize,
    pub length: FakeLength,
    pub input_ids: FakeInputIds,
    pub seed: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FakeLength {
    Fixed,
    Variable,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FakeInputIds {
    Increasing,
    Random,
}

/// `[val]`
#[derive(Debug, Clone, PartialEq)]
pub struct ValConfig {
    pub interval: usize,
    pub eval_on_start: bool,
    pub data: SftDataConfig,
}

/// `[optim]`
#[derive(Debug, Clone, PartialEq)]
pub struct OptimConfig {
    pub lr: f64,
    pub weight_decay: f64,
    pub max_norm: Option<f64>,
    pub kind: OptimKind,
}

/// `[optim] type`
#[derive(Debug, Clone, PartialEq)]
pub enum OptimKind {
    AdamW { betas1: f64, betas2: f64, eps: f64 },
    Sgd { nesterov: bool, momentum: f64 },
    Muon { mu: f64, betas1: f64, betas2: f64 },
    SignSgd,
}

/// `[scheduler] type`
#[derive(Debug, Clone, PartialEq)]
pub enum SchedulerConfig {
    Constant,
    Linear { warmup_steps: usize, decay_steps: usize, min_lr: f64 },
    Cosine { warmup_steps: usize, min_lr: f64 },
}

/// `[ckpt]`
#[derive(Debug, Clone, PartialEq)]
pub struct CkptConfig {
    pub output_dir: Option<PathBuf>,
    pub interval: Option<usize>,
    pub weights: Option<WeightsConfig>,
    pub weights_only: bool,
    pub resume_step: Option<i64>,
    pub keep_last: Option<usize>,
    pub keep_interval: Option<usize>,
    pub skip_progress: bool,
    pub skip_scheduler: bool,
    pub skip_dataloader: bool,
    pub skip_optimizer: bool,
}

/// `[ckpt.weights]`
#[derive(Debug, Clone, PartialEq)]
pub struct WeightsConfig {
    pub save_sharded: bool,
    pub save_format: String,
    pub save_adapter_separately: bool,
}

/// `[log]`
#[derive(Debug, Clone, PartialEq)]
pub struct LogConfig {
    pub level: String,
    pub file: bool,
    pub log_data: bool,
    pub json_logging: bool,
}
