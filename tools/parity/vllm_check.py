"""Does vLLM take an adapter? Asks vLLM's own loader, on the CPU, without a GPU and without its compiled parts.

    python tools/parity/vllm_check.py ADAPTER [ADAPTER...] [--base MODEL] [--max-lora-rank 16]

What vLLM's worker does with a LoRA request (vllm/lora/worker_manager.py, `_load_adapter`): `PEFTHelper.from_local_dir`,
`validate_legal`, `LoRAModel.from_local_checkpoint`; then that each layer holds A and B of the file and PEFT's scale.
Needs the files of the wheel (`pip download --no-deps vllm`, unpacked, in PYTHONPATH), torch, transformers, and what the
imports ask for; vLLM's CUDA libraries are not loaded. Exits with 1 if an adapter isn't taken.
"""

import argparse, ast, json, math, re, sys
from pathlib import Path

import torch
import vllm
from safetensors.torch import load_file
from vllm.config.lora import LoRAConfig
from vllm.lora import lora_model
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper

# Pinned memory is a matter of speed, and of CUDA.
lora_model.PIN_MEMORY = False

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("adapters", nargs="+", type=Path)
parser.add_argument("--base", type=Path, help="the base model's folder, for its architecture and sizes")
parser.add_argument("--max-lora-rank", type=int, default=LoRAConfig.max_lora_rank)
args = parser.parse_args()
base = json.loads((args.base / "config.json").read_text()) if args.base else {"model_type": "qwen3"}


def supported_modules(kind):
    """The names that the model class lets LoRA have, from its source: importing it would load the kernels."""
    tree = ast.parse((Path(vllm.__file__).parent / f"model_executor/models/{kind}.py").read_text())
    name = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}[kind]
    (model,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    assert any("SupportsLoRA" in ast.unparse(b) for b in model.bases), f"{name} doesn't support LoRA"
    fields = {
        node.targets[0].id if isinstance(node, ast.Assign) else node.target.id: ast.literal_eval(node.value)
        for node in model.body
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and "modules" in ast.unparse(node).split("=")[0]
    }
    packed = fields["packed_modules_mapping"]
    return sum(packed.values(), []) + ["o_proj", "down_proj", *fields.get("embedding_modules", {})]


def check(folder):
    helper = PEFTHelper.from_local_dir(str(folder), base.get("max_position_embeddings"))
    helper.validate_legal(LoRAConfig(max_lora_rank=args.max_lora_rank, lora_dtype=torch.float32))
    expected = set(supported_modules(base["model_type"]))
    model = LoRAModel.from_local_checkpoint(
        str(folder), expected, helper, device="cpu", dtype=torch.float32, model_vocab_size=base.get("vocab_size")
    )
    config = json.loads((folder / "adapter_config.json").read_text())
    stored = load_file(folder / "adapter_model.safetensors")
    names = {k.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for k in stored if ".lora_" in k}
    assert set(model.loras) == names, set(model.loras) ^ names
    for name, layer in model.loras.items():
        own = lambda pattern, other: next(
            (v for k, v in (config.get(pattern) or {}).items() if re.match(rf"(.*\.)?({k})$", name)), other
        )
        rank, alpha = own("rank_pattern", config["r"]), own("alpha_pattern", config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        assert layer.rank == rank and math.isclose(layer.scaling, scale), (name, layer.rank, layer.scaling)
        for got, letter in [(layer.lora_a, "A"), (layer.lora_b, "B")]:
            parts = [f"lora_{letter}.weight", f"lora_embedding_{letter}"]
            (want,) = [stored[k] for p in parts if (k := f"base_model.model.{name}.{p}") in stored]
            assert torch.equal(got, want.float()), (name, letter)
    return f"{len(model.loras)} layers, rank {helper.r}, scale {helper.vllm_lora_scaling_factor:g}"


print(f"vllm {vllm.__version__}, torch {torch.__version__}")
refused = 0
for adapter in args.adapters:
    try:
        print(f"{adapter.name}: takes it: {check(adapter)}")
    except Exception as error:
        refused += 1
        print(f"{adapter.name}: refuses it: {type(error).__name__}: {error}")
sys.exit(refused > 0)
