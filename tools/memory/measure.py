#!/usr/bin/env python3
"""How right `embertune check`'s estimate of memory is on the CPU: runs configurations and holds their peaks against it.

    python3 tools/memory/measure.py target/release/embertune                     # the table of docs/benchmarks.md
    python3 tools/memory/measure.py target/release/embertune --model DIR --only SmolLM2

Each run is three steps of `embertune bench` on made-up tokens; the peak is the largest resident size less mapped files,
as `bench` prints it. Shapes without a folder get random weights in a temporary folder. Needs Linux, Python
3.9 and nothing else; the largest run takes about 6 GiB.
"""

import argparse
import array
import json
import os
import random
import struct
import subprocess
import tempfile

# hidden size, layers, query heads, key heads, head size, MLP size, vocabulary, tied head
SHAPES = {
    "142M": (768, 12, 12, 4, 64, 3072, 50000, True),
    "329M": (1024, 14, 16, 8, 128, 4096, 64000, True),
    "147M untied": (768, 10, 12, 12, 64, 2048, 50000, False),
}
LORA, AGAIN = "--model.lora", "--model.ac"
# shape, tokens of a row, rows of a micro-batch, micro-batches of a step, more arguments
RUNS = [
    ("SmolLM2-135M", 256, 1, 1, [LORA]),
    ("SmolLM2-135M", 512, 4, 1, [LORA]),
    ("SmolLM2-135M", 2048, 1, 1, [LORA]),
    ("SmolLM2-135M", 512, 4, 1, [LORA, AGAIN]),
    ("SmolLM2-135M", 512, 1, 1, []),
    ("SmolLM2-135M", 256, 2, 2, []),
    ("SmolLM2-135M", 512, 2, 1, [AGAIN]),
    ("142M", 512, 2, 1, [LORA, "--model.lora.rank", "64"]),
    ("142M", 1024, 1, 1, []),
    ("142M", 512, 1, 2, []),
    ("142M", 512, 2, 1, ["--optim.type", "sgd"]),
    ("329M", 512, 1, 1, [LORA]),
    ("329M", 1024, 2, 1, [LORA]),
    ("329M", 1024, 2, 1, [LORA, AGAIN]),
    ("329M", 256, 1, 1, []),
    ("147M untied", 512, 2, 1, [LORA]),
    ("147M untied", 512, 1, 1, []),
]


def tensors(shape):
    e, layers, h, g, d, f, v, tied = shape
    yield "model.embed_tokens.weight", [v, e]
    for i in range(layers):
        layer = f"model.layers.{i}."
        for name, out, width in [("q", h * d, e), ("k", g * d, e), ("v", g * d, e), ("o", e, h * d)]:
            yield f"{layer}self_attn.{name}_proj.weight", [out, width]
        for name in ("q", "k"):
            yield f"{layer}self_attn.{name}_norm.weight", [d]
        for name, out, width in [("gate", f, e), ("up", f, e), ("down", e, f)]:
            yield f"{layer}mlp.{name}_proj.weight", [out, width]
        for name in ("input", "post_attention"):
            yield f"{layer}{name}_layernorm.weight", [e]
    yield "model.norm.weight", [e]
    if not tied:
        yield "lm_head.weight", [v, e]


def write_model(folder, shape):
    """A Qwen3 folder with bf16 weights of standard deviation 0.02."""
    e, layers, h, g, d, f, v, tied = shape
    os.makedirs(folder)
    config = dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=e, num_hidden_layers=layers,
        num_attention_heads=h, num_key_value_heads=g, head_dim=d, intermediate_size=f, vocab_size=v,
        tie_word_embeddings=tied, rms_norm_eps=1e-6, rope_theta=1e6, max_position_embeddings=40960,
        attention_bias=False, hidden_act="silu",
    )  # fmt: skip
    with open(f"{folder}/config.json", "w") as out:
        json.dump(config, out)
    numbers = random.Random(0)
    floats = array.array("f", (numbers.gauss(0, 0.02) for _ in range(1 << 16))).tobytes()
    block = b"".join(floats[i + 2 : i + 4] for i in range(0, len(floats), 4))
    header, end = {}, 0
    for name, sizes in tensors(shape):
        length = 2 * sizes[0] * (sizes[1] if len(sizes) > 1 else 1)
        header[name] = {"dtype": "BF16", "shape": sizes, "data_offsets": [end, end + length]}
        end += length
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(f"{folder}/model.safetensors", "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, _ in tensors(shape):
            first, last = header[name]["data_offsets"]
            whole, part = divmod(last - first, len(block))
            for _ in range(whole):
                out.write(block)
            out.write(block[:part])


def measure(binary, model, seq_len, rows, rounds, more, scratch):
    found, base = f"{scratch}/bench.json", f"{scratch}/base.toml"
    with open(base, "w") as out:
        out.write('max_steps = 3\ndevice = "flex"\n[model]\nname = ""\n[data]\ntype = "fake"\ninput_ids = "random"\n')
    command = [
        binary, "bench", "@", base, "--steps", "1", "--warmup", "2", "--json", found,
        "--model.name", model, "--data.seq-len", str(seq_len),
        "--data.micro-batch-size", str(rows), "--data.batch-size", str(rows * rounds), *more,
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{' '.join(command)}\n{ran.stderr[-800:]}")
    with open(found) as file:
        found = json.load(file)
    return found["peak_process_bytes"], found["estimated_bytes"]


def describe(more):
    kind = "LoRA" if LORA in more else "full"
    rank = more[more.index("--model.lora.rank") + 1] if "--model.lora.rank" in more else None
    kind += f" r {rank}" if rank else ""
    kind += ", SGD" if "sgd" in more else ""
    return kind + (", recomputed" if AGAIN in more else "")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("binary")
    parser.add_argument("--model", help="folder of SmolLM2-135M-Instruct; without it those runs are left out")
    parser.add_argument("--only", default="", help="only shapes whose name holds this")
    args = parser.parse_args()
    print("| model | step | trained | peak, MiB | estimate | error |\n|---|---|---|---|---|---|", flush=True)
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        for name, seq_len, rows, rounds, more in RUNS:
            if args.only not in name or (name not in SHAPES and not args.model):
                continue
            folder = f"{scratch}/{name}" if name in SHAPES else args.model
            if not os.path.exists(folder):
                write_model(folder, SHAPES[name])
            peak, estimate = measure(args.binary, folder, seq_len, rows, rounds, more, scratch)
            error = estimate / peak - 1
            worst = max(worst, abs(error))
            step = f"{rows} × {seq_len}" + (f", {rounds} times" if rounds > 1 else "")
            sizes = f"{peak / 2**20:.0f} | {estimate / 2**20:.0f} | {100 * error:+.1f} %"
            print(f"| {name} | {step} | {describe(more)} | {sizes} |", flush=True)
    print(f"\nThe largest error: {100 * worst:.1f} %")


if __name__ == "__main__":
    main()
