"""Makes the adapters of tests/fixtures/adapters with PEFT, on random Qwen3 and Qwen2 models of a few thousand weights.

    python tools/parity/lint_adapters.py tests/fixtures/adapters        (torch, transformers 5, peft 0.21)

Each folder is what PEFT's save_pretrained writes, less README.md; a few are then broken by hand, as their names say.
The verdicts in tests/lint.rs are the servers' own rules, not this script's.
"""

import json, shutil, sys, warnings
from pathlib import Path

import torch
from peft import IA3Config, LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config, Qwen3Config

warnings.filterwarnings("ignore")
OUT = Path(sys.argv[1])
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def model(kind="qwen3", tied=True, layers=1, head=AutoModelForCausalLM):
    torch.manual_seed(0)
    sizes = dict(
        hidden_size=8, intermediate_size=16, num_hidden_layers=layers, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=24, max_position_embeddings=64, tie_word_embeddings=tied,
    )
    config = Qwen3Config(head_dim=4, **sizes) if kind == "qwen3" else Qwen2Config(**sizes)
    return head.from_config(config, dtype=torch.float32)


def make(name, kind="qwen3", tied=True, layers=1, head=AutoModelForCausalLM, peft=LoraConfig, **options):
    if peft is LoraConfig:
        options = {"r": 2, "lora_alpha": 4} | options
    options = {"target_modules": LINEAR, "task_type": "CAUSAL_LM"} | options
    adapted = get_peft_model(model(kind, tied, layers, head), peft(**options))
    for key, value in adapted.named_parameters():
        if "lora_" in key or "ia3_" in key:
            torch.nn.init.normal_(value.data, std=0.1)
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    adapted.save_pretrained(folder)
    (folder / "README.md").unlink()
    config = json.loads((folder / "adapter_config.json").read_text())
    config["base_model_name_or_path"] = None
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True))
    return folder


def edit_config(folder, **keys):
    path = folder / "adapter_config.json"
    config = json.loads(path.read_text())
    for key, value in keys.items():
        config.pop(key) if value is None else config.__setitem__(key, value)
    path.write_text(json.dumps(config, indent=2, sort_keys=True))


def edit_names(folder, change):
    edit_tensors(folder, lambda tensors: {change(k): v for k, v in tensors.items() if change(k)})


def edit_tensors(folder, change):
    path = folder / "adapter_model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


for base, kind, tied in [("base", "qwen3", True), ("base_untied", "qwen3", False), ("base_qwen2", "qwen2", True)]:
    (OUT / base).mkdir(parents=True, exist_ok=True)
    model(kind, tied).config.save_pretrained(OUT / base)

make("plain")
make("qv_only", target_modules=["q_proj", "v_proj"])
make("gaussian", init_lora_weights="gaussian")
make("all_linear", target_modules="all-linear")
make("rank_32", r=32, lora_alpha=32, target_modules=["q_proj"])
make("rank_600", r=600, lora_alpha=600, target_modules=["k_proj"])
make("rslora", use_rslora=True)
make("rank_pattern", rank_pattern={"q_proj": 4})
make("alpha_pattern", alpha_pattern={"q_proj": 16})
make("rank_pattern_32", target_modules=["q_proj", "v_proj"], rank_pattern={"q_proj": 32})
make("rank_pattern_600", target_modules=["q_proj", "v_proj"], rank_pattern={"q_proj": 600})
make("patterns_rslora", rank_pattern={"q_proj": 4, "up_proj": 1}, alpha_pattern={"down_proj": 3}, use_rslora=True)
make("modules_to_save", target_modules=["q_proj"], modules_to_save=["lm_head"], tied=False)
make("modules_to_save_score", head=AutoModelForSequenceClassification, task_type="SEQ_CLS")
make("dora", use_dora=True)
make("lora_bias", kind="qwen2", target_modules=["q_proj", "v_proj"], lora_bias=True)
make("bias_lora_only", kind="qwen2", target_modules=["q_proj"], bias="lora_only")
make("bias_all", kind="qwen2", target_modules=["q_proj"], bias="all")
make("pissa", init_lora_weights="pissa")
make("olora", init_lora_weights="olora")
make("pissa_niter", init_lora_weights="pissa_niter_4")
make("orthogonal", init_lora_weights="orthogonal")
make("eva", init_lora_weights="eva")
for init in ["corda", "loftq", "mica", "lora_ga"]:  # these want data, a quantiser or gradients to begin with
    edit_config(make(init), init_lora_weights=init)
make("embedding", target_modules=["q_proj", "embed_tokens"], tied=False)
make("embedding_qwen2", kind="qwen2", target_modules=["q_proj", "embed_tokens"])
make("lm_head_tied", target_modules=["q_proj", "lm_head"])
make("lm_head_untied", target_modules=["q_proj", "lm_head"], tied=False)
make("tokens", target_modules=["q_proj"], trainable_token_indices=[3, 5])
edit_config(make("tokens_added", target_modules=["q_proj"], trainable_token_indices=[3, 5]), trainable_token_indices=[3, 99])
make("regex", target_modules=r".*layers\.\d+\.(self_attn\.(q|v)_proj|mlp\.up_proj)")
edit_config(make("all_linear_word"), target_modules="all-linear")
make("layers_to_transform", layers_to_transform=[0])
make("exclude_modules", target_modules="all-linear", exclude_modules=["down_proj"])
make("alora", alora_invocation_tokens=[1, 2])
make("layer_replication", layer_replication=[[0, 1], [0, 1]])
edit_config(make("qalora"), use_qalora=True)  # it wants a quantised base
edit_config(make("bdlora"), use_bdlora={"nblocks": 2})  # it wants blocks that a model this small hasn't got
edit_names(make("named_default"), lambda k: k.replace("lora_A.weight", "lora_A.default.weight").replace("lora_B.weight", "lora_B.default.weight"))
edit_names(make("wrong_prefix"), lambda k: k.removeprefix("base_model."))
edit_names(make("no_prefix"), lambda k: k.removeprefix("base_model.model."))
edit_names(make("wrong_case"), lambda k: k.replace("base_model", "Base_Model"))
make("other_layers", layers=2)
make("other_targets", target_modules=["q_proj"])
edit_names(OUT / "other_targets", lambda k: k.replace("q_proj", "c_attn"))
edit_config(OUT / "other_targets", target_modules=["c_attn"])
edit_tensors(make("bf16"), lambda tensors: {k: v.bfloat16() for k, v in tensors.items()})
edit_names(make("half_missing"), lambda k: None if "mlp" in k else k)
edit_config(make("other_rank"), r=3)
edit_config(make("no_rank", r=8, lora_alpha=8), r=None)
edit_config(make("no_alpha", r=8, lora_alpha=8), lora_alpha=None)
folder = make("smallest", r=8, lora_alpha=8)
(folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "target_modules": LINEAR}))
edit_config(make("no_type"), peft_type=None)
make("ia3", peft=IA3Config, feedforward_modules=["gate_proj", "up_proj", "down_proj"])
(make("no_weights") / "adapter_model.safetensors").unlink()
edit_tensors(make("no_tensors"), lambda tensors: {})
folder = make("truncated")
data = (folder / "adapter_model.safetensors").read_bytes()
(folder / "adapter_model.safetensors").write_bytes(data[: len(data) // 2])
folder = make("config_cut")
(folder / "adapter_config.json").write_text((folder / "adapter_config.json").read_text()[:50])
print(len([p for p in OUT.iterdir() if not p.name.startswith("base")]), "adapters")
