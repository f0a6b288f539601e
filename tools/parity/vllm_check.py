"""Does vLLM take an adapter? Asks vLLM's own loader, on the CPU, without a GPU and without its compiled parts.

    python tools/parity/vllm_check.py ADAPTER [ADAPTER...] [--base MODEL] [--max-lora-rank 16]

What vLLM's worker does with a LoRA request (vllm/lora/worker_manager.py, `_load_adapter`): `PEFTHelper.from_local_dir`,
`validate_legal`, `LoRAModel.from_local_checkpoint`; then that each layer is one of the base's, and holds A and B of the file
and PEFT's scale. Exits with 1 if an adapter isn't taken.

Seen with vllm 0.33.0. Nothing of its wheel but the Python files is needed (`pip download --no-deps vllm`, unpacked without
its libraries, in PYTHONPATH), beside torch, transformers, safetensors and, by `pip install --no-deps --target`, what its
imports ask for: anyio apache-tvm-ffi==0.1.11 blake3 cachetools cbor2 certifi cloudpickle compressed-tensors depyf diskcache
distro einops fastapi gguf h11 httpcore httpx idna ijson jiter lark llguidance mistral_common msgspec openai orjson
oss-harmony outlines_core==0.2.14 partial-json-parser pillow prometheus-client protobuf psutil py-cpuinfo pybase64 pycountry
pydantic-extra-types python-json-logger pyzmq requests sentencepiece setproctitle sniffio starlette tiktoken uvloop
xgrammar==0.2.8 aiohttp aiohappyeyeballs aiosignal attrs frozenlist multidict propcache yarl.
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


def modules_of(base):
    """The modules of the base model that an adapter may be on, by name."""
    attention = [f"self_attn.{part}_proj" for part in "qkvo"]
    layer = attention + [f"mlp.{part}_proj" for part in ["gate", "up", "down"]]
    layers = [f"model.layers.{n}.{part}" for n in range(base.get("num_hidden_layers", 1000)) for part in layer]
    return {"model.embed_tokens", "lm_head", *layers}


def check(folder, base, max_rank):
    """What vLLM made of it, in words, and whether that is what was trained. Raises what vLLM raises."""
    helper = PEFTHelper.from_local_dir(str(folder), base.get("max_position_embeddings"))
    helper.validate_legal(LoRAConfig(max_lora_rank=max_rank, lora_dtype=torch.float32))
    expected = set(supported_modules(base["model_type"]))
    model = LoRAModel.from_local_checkpoint(
        str(folder), expected, helper, device="cpu", dtype=torch.float32, model_vocab_size=base.get("vocab_size")
    )
    config = json.loads((folder / "adapter_config.json").read_text())
    stored = load_file(folder / "adapter_model.safetensors")
    stored = {name.removeprefix("base_model.model."): tensor for name, tensor in stored.items()}
    text = f"{len(model.loras)} layers, rank {helper.r}, scale {helper.vllm_lora_scaling_factor:g}"
    strange = set(model.loras) - modules_of(base)
    if strange or not model.loras:
        return f"{text}; {len(strange)} of them are none of the base's: without effect", False
    for name, layer in model.loras.items():
        own = lambda pattern, other: next(
            (v for k, v in (config.get(pattern) or {}).items() if re.match(rf"(.*\.)?({k})$", name)), other
        )
        rank, alpha = own("rank_pattern", config["r"]), own("alpha_pattern", config["lora_alpha"])
        scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
        assert layer.rank == rank and math.isclose(layer.scaling, scale), (name, layer.rank, layer.scaling)
        for got, letter in [(layer.lora_a, "A"), (layer.lora_b, "B")]:
            (want,) = [stored[k] for part in ["_{}.weight", "_embedding_{}"] if (k := f"{name}.lora" + part.format(letter)) in stored]
            assert torch.equal(got, want.float()), (name, letter)
        if layer.lora_b.shape[1] != rank:
            return f"{text}; `{name}` is of rank {layer.lora_b.shape[1]}, scaled as if of {rank}", False
    return text, True


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("adapters", nargs="+", type=Path)
    parser.add_argument("--base", type=Path, help="the base model's folder, for its architecture and sizes")
    parser.add_argument("--max-lora-rank", type=int, default=LoRAConfig.max_lora_rank)
    args = parser.parse_args()
    base = json.loads((args.base / "config.json").read_text()) if args.base else {"model_type": "qwen3"}
    print(f"vllm {vllm.__version__}, torch {torch.__version__}")
    not_taken = 0
    for adapter in args.adapters:
        try:
            text, taken = check(adapter, base, args.max_lora_rank)
            print(f"{adapter}: {'takes it' if taken else 'misreads it'}: {text}")
        except Exception as error:
            taken = False
            print(f"{adapter}: refuses it: {type(error).__name__}: {error}")
        not_taken += not taken
    sys.exit(not_taken > 0)


if __name__ == "__main__":
    main()
