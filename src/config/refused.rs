//! Keys of prime-rl's SFT trainer (and a few of PEFT's) that are known and not taken: why, and what to do.

/// A key that is refused, with every key below it.
#[derive(Debug)]
pub(crate) struct Refused {
    pub key: &'static str,
    pub reason: &'static str,
    pub instead: &'static str,
}

const fn no(key: &'static str, reason: &'static str, instead: &'static str) -> Refused {
    Refused { key, reason, instead }
}

const ONE_ATTENTION: &str = "there is one attention, always within documents";
const WHOLE_MODEL: &str = "every rank holds the whole model";
const DENSE: &str = "models are dense";
const RL: &str = "it belongs to reinforcement learning";
const NO_WANDB: &str = "the program doesn't speak to Weights & Biases itself";
const WANDB: &str =
    "set `monitors.command = [\"python3\", \"examples/wandb_monitor.py\"]`, which hands it every row";
const FREE: &str = "take it out";
const FROZEN: &str = "take it out; `[model.lora]` and `model.ac` save memory";

pub(crate) const REFUSED: &[Refused] = &[
    // The run.
    no("wandb", NO_WANDB, WANDB),
    no("monitors.wandb", NO_WANDB, WANDB),
    no(
        "monitors.file",
        "`metrics.jsonl` is always written, to the run folder",
        "take it out; `monitors.command` can write a second one",
    ),
    no("bench", "it is a command here", "`embertune bench @ run.toml`"),
    no(
        "deployment",
        "devices are named by `device`, processes started by a launcher",
        "`device = \"cuda\"` takes every card; `embertune launch --ranks 8 -- sft …` starts a process for each",
    ),
    no("slurm", "jobs are submitted by the user", "call `embertune sft` in your own sbatch script"),
    no("loss_impl", "there is one loss, and it never holds all logits", FREE),
    no("loss", RL, FREE),
    no("trace_path", "there is no profiler in the program", "`metrics.jsonl` has the time of each phase"),
    no(
        "memory_profiler_path",
        "there is no profiler in the program",
        "`metrics.jsonl` has the peak memory of each step",
    ),
    no("matmul_precision", "precision follows the dtypes", "set `model.dtype`"),
    no("env_vars", "the environment is the caller's", "set the variables before the command"),
    no("gc", "there is no garbage collector", FREE),
    no(
        "renderer",
        "conversations are rendered by the model's own chat template",
        "set `tokenizer.chat_template`",
    ),
    no("eval", "evaluation is held-out loss", "use `[val]`"),
    no("inference", RL, FREE),
    no("weight_broadcast", RL, FREE),
    no("resume", "it is a key of `[ckpt]` here", "set `ckpt.resume_step` (-1 is the newest)"),
    no("run", "the run folder is named directly", "set `output_dir`"),
    no("clean", "it has another name here", "set `clean_output_dir`"),
    // The model.
    no("model.attn", ONE_ATTENTION, FREE),
    no("model.impl", "there is one implementation", FREE),
    no("model.compile", "kernels are compiled as they are, ahead of the first step", FREE),
    no("model.trust_remote_code", "no code of a model is run", FREE),
    no("tokenizer.trust_remote_code", "no code of a tokenizer is run", FREE),
    no("model.ac_offloading", "activations are recomputed, not moved", "use `[model.ac]`"),
    no("model.ac.mode", "whole layers are recomputed", "set `model.ac.freq`"),
    no("model.ac.targets", "whole layers are recomputed", "set `model.ac.freq`"),
    no("model.fsdp_cpu_offload", WHOLE_MODEL, FROZEN),
    no("model.optim_cpu_offload", WHOLE_MODEL, FROZEN),
    no("model.full_offload", WHOLE_MODEL, FROZEN),
    no("model.reshard_after_forward", WHOLE_MODEL, FREE),
    no("model.dp_replicate", WHOLE_MODEL, FREE),
    no("model.cp", "a row stays on one device", "lower `data.seq_len`, or use `[model.ac]`"),
    no("model.cp_style", "a row stays on one device", FREE),
    no("model.tp", "layers are not split", FROZEN),
    no("model.ep", DENSE, FREE),
    no("model.ep_comm_backend", DENSE, FREE),
    no("model.deepep_num_sms", DENSE, FREE),
    no("model.deepep_token_chunk_size", DENSE, FREE),
    no("model.moe_use_grouped_mm", DENSE, FREE),
    no("model.moe_router_dtype", DENSE, FREE),
    no("model.moe_fused_kernel", DENSE, FREE),
    no("model.freeze_moe_router", DENSE, FREE),
    no("model.reduce_dtype", "gradients are summed in float32", FREE),
    no(
        "model.debug",
        "models are whole",
        "`data.type = \"fake\"` needs no data; `embertune/tiny` is a small model",
    ),
    no("model.fused_lm_head_token_chunk_size", "the loss chooses its chunks", FREE),
    no("model.quantization", "weights are not quantised", "set `model.dtype`"),
    no("model.index_cache", "the architecture it belongs to is not supported", FREE),
    no("model.vlm", "models are text only", FREE),
    no("model.conversion_dir", "Hugging Face weights are read as they are", FREE),
    // PEFT.
    no("model.lora.bias", "biases stay frozen", FREE),
    no("model.lora.use_dora", "adapters are plain LoRA", FREE),
    no("model.lora.layers_pattern", "layers are found by the model's own names", "use `layers_to_transform`"),
    no("model.lora.target_parameters", "adapters sit on linear layers", "use `target_modules`"),
    no("model.lora.task_type", "it is always CAUSAL_LM", FREE),
    // The data.
    no("data.pack_function", "rows are always packed, and no document is split", FREE),
    no("data.num_workers", "one thread keeps ahead of the device", FREE),
    // Checkpoints and messages.
    no("ckpt.save_async", "checkpoints are written before the next step", FREE),
    no("log.vf_level", RL, "set `log.level`"),
    no("log.env_worker_logs", RL, FREE),
    no("log.interval", "every step is logged", FREE),
    no("log.ranks_filter", "rank 0 speaks for all", FREE),
];

/// The refusal of `path`; the keys of `[val.data]` are those of `[data]`.
pub(crate) fn key(path: &str) -> Option<&'static Refused> {
    let path = path.strip_prefix("val.").filter(|p| p.starts_with("data.")).unwrap_or(path);
    REFUSED.iter().find(|refused| path == refused.key)
}

/// Values that are known and not taken, and why.
pub(crate) fn value(path: &str, value: &str) -> Option<&'static str> {
    Some(match (path, value) {
        ("ckpt.weights.save_format", "torch") => {
            "a torch file is a pickle, which can run code when it is loaded; safetensors loads everywhere"
        }
        ("val.data.type", "fake") => {
            "made-up tokens say nothing about a model; name held-out data in `val.data.name`"
        }
        ("device", "cpu") => "the CPU is `flex`",
        ("device", "gpu") => "a GPU is `wgpu`, `vulkan` or `cuda`",
        _ => return None,
    })
}

/// Names that a key has elsewhere (PEFT, transformers), and ours.
const OTHER_NAMES: &[(&str, &str)] = &[
    ("r", "rank"),
    ("lora_alpha", "alpha"),
    ("lora_dropout", "dropout"),
    ("betas", "betas1` and `betas2"),
    ("learning_rate", "optim.lr"),
    ("num_train_epochs", "num_epochs"),
    ("gradient_checkpointing", "model.ac"),
    ("max_seq_length", "data.seq_len"),
    ("optimizer", "optim"),
    ("checkpoint", "ckpt"),
];

/// Our name of the first key whose other name is wanted.
pub(crate) fn other_name(wanted: impl Fn(&'static str) -> bool) -> Option<&'static str> {
    OTHER_NAMES.iter().find(|(other, _)| wanted(other)).map(|(_, ours)| *ours)
}
