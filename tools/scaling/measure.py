"""Measures embertune on 1, 2, 4, … GPUs of one host in one go, and checks that ranks train as one.

    python tools/scaling/measure.py target/release/embertune --gpus 1,2,4,8 --out scaling

Needs torch and safetensors (to make random models of Qwen3's shapes) and a build with `--features cuda`. Writes a table
(`table.md`) and each measurement's JSON. `--quick` leaves out 8B and full fine-tuning of 4B, `--no-checks` the checks.
"""

import argparse, json, subprocess
from pathlib import Path

import job
import predict

SHAPES = {
    "0.6B": dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16, tied=True),
    "4B": dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32, tied=True),
    "8B": dict(hidden_size=4096, intermediate_size=12288, num_hidden_layers=36, num_attention_heads=32, tied=False),
}
VOCABULARY, KV_HEADS, HEAD = 151936, 8, 128
# Shape, rows a GPU, rows at once, LoRA or full fine-tuning, further flags.
JOBS = [
    ("0.6B", 8, 8, "lora", []),
    ("4B", 4, 4, "lora", []),
    ("8B", 2, 2, "lora", []),
    ("0.6B", 8, 8, "full", []),
    # 16 GB of gradients are summed a step: worth it for several rows (docs/scaling.md).
    ("4B", 8, 1, "full", ["--model.ac"]),
]
QUICK = [JOBS[0], JOBS[1], JOBS[3]]


def make_model(folder, shape):
    """Random bf16 weights as a Hugging Face folder."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    normal = lambda *size: (torch.randn(*size, device=device) * 0.02).to(torch.bfloat16).cpu()
    ones = lambda n: torch.ones(n, dtype=torch.bfloat16)
    e, f, heads = shape["hidden_size"], shape["intermediate_size"], shape["num_attention_heads"]
    tensors = {"model.embed_tokens.weight": normal(VOCABULARY, e), "model.norm.weight": ones(e)}
    if not shape["tied"]:
        tensors["lm_head.weight"] = normal(VOCABULARY, e)
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        sizes = {"self_attn.q_proj": (heads * HEAD, e), "self_attn.k_proj": (KV_HEADS * HEAD, e),
                 "self_attn.v_proj": (KV_HEADS * HEAD, e), "self_attn.o_proj": (e, heads * HEAD),
                 "mlp.gate_proj": (f, e), "mlp.up_proj": (f, e), "mlp.down_proj": (e, f)}
        tensors |= {f"{prefix}{name}.weight": normal(*size) for name, size in sizes.items()}
        norms = {"self_attn.q_norm": HEAD, "self_attn.k_norm": HEAD, "input_layernorm": e, "post_attention_layernorm": e}
        tensors |= {f"{prefix}{name}.weight": ones(size) for name, size in norms.items()}
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {k: v for k, v in shape.items() if k != "tied"} | dict(
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", vocab_size=VOCABULARY, num_key_value_heads=KV_HEADS,
        head_dim=HEAD, max_position_embeddings=40960, tie_word_embeddings=shape["tied"], rope_theta=1e6,
        rms_norm_eps=1e-6, hidden_act="silu", attention_bias=False, torch_dtype="bfloat16")
    (folder / "config.json").write_text(json.dumps(config))


def flags(args, model, kind, seq_len=4096):
    # A file, because without one the program's own default would set more than these.
    config = args.out / f"{kind}.toml"
    config.write_text("[model.lora]\n" if kind == "lora" else "")
    return ["@", str(config), "--model.name", str(model), "--data.type", "fake", "--data.input-ids", "random",
            "--data.seq-len", str(seq_len), "--scheduler.type", "constant", "--optim.lr", "1e-4", "--max-steps", "20"]


def devices(n):
    return ["--device", job.devices("cuda", n)]


def bench(args, name, n, rows, at_once, model, kind, more):
    out = args.out / f"{name}-{n}.json"
    command = [args.embertune, "bench", *flags(args, model, kind), *more, *devices(n), "--data.batch-size", str(rows * n),
               "--data.micro-batch-size", str(at_once), "--steps", str(args.steps), "--json", str(out)]
    with open(args.out / f"{name}-{n}.log", "w") as log:
        done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT)
    return json.loads(out.read_text()) if done.returncode == 0 else None


def table(args, models):
    lines = ["| work | GPUs | tokens/s | of each | efficiency | ms a step | forward, backward, all-reduce, optimizer (ms) "
             "| summed, MB | GiB |", "|---|---|---|---|---|---|---|---|---|"]
    for size, rows, at_once, kind, more in QUICK if args.quick else JOBS:
        alone = None
        for n in args.gpus:
            found = bench(args, f"{size}-{kind}", n, rows, at_once, models[size], kind, more)
            if found is None:
                lines.append(f"| {size} {kind}, {rows} rows a GPU | {n} | failed, see the log | | | | | | |")
                continue
            each = found["tokens_per_second"] / n
            alone = alone or (each if n == 1 else None)
            phases = found["phases_ms"]
            parts = ", ".join(f"{phases.get(key, 0):.1f}" for key in ["forward", "backward", "all-reduce", "optimizer"])
            efficiency = f"{each / alone:.3f}" if alone else ""
            lines.append(
                f"| {size} {kind}, {rows} rows a GPU | {n} | {found['tokens_per_second']:,.0f} | {each:,.0f} | {efficiency} | "
                f"{found['ms_per_step']['median']:.1f} | {parts} | {found['all_reduce_bytes'] / 1e6:.1f} | "
                f"{(found['peak_device_bytes'] or 0) / 2**30:.1f} |")
            print(lines[-1], flush=True)
    text = "\n".join(lines)
    (args.out / "table.md").write_text(text + "\n")
    print(text)
    predict.held_against(list(args.out.glob("*-*.json")))


def sft(args, command, out, model, more):
    rows = str(8 * max(args.gpus))
    return [args.embertune, *command, "sft", *flags(args, model, "lora", 2048), "--data.batch-size", rows, "--ckpt",
            "--ckpt.interval", "5", "--output-dir", str(out), *more]


def losses(args, model):
    """The losses of 20 steps on all GPUs, in threads and in processes, against those on one."""
    n, runs = max(args.gpus), {}
    ways = {"one": ([], devices(1)), "threads": ([], devices(n)),
            "processes": (["launch", "--ranks", str(n), "--"], ["--device", "cuda"])}
    for name, (command, more) in ways.items():
        out = args.out / f"loss-{name}"
        subprocess.run(sft(args, command, out, model, more), check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        runs[name] = [row["loss/mean"] for row in job.steps(out)]
    for name in ["threads", "processes"]:
        off = max(abs(a - b) / a for a, b in zip(runs["one"], runs[name], strict=True))
        print(f"losses of {n} ranks in {name} against one over {len(runs['one'])} steps: {off:.1e} apart at most", flush=True)


def kill(args, model):
    """A rank killed in the middle: how long the others live; then 2 ranks (or 1) go on from the checkpoint."""
    n, out = max(args.gpus), args.out / "killed"
    command = sft(args, ["launch", "--ranks", str(n), "--"], out, model, ["--device", "cuda", "--max-steps", "100000"])
    seconds, code, said = job.kill_a_rank(command, out / "checkpoints/step_5")
    (args.out / "killed.log").write_text(said)
    if code is None:
        raise SystemExit(f"a rank of {n} killed: the others still ran {seconds:.0f} s later")
    print(f"a rank of {n} killed: the others ended after {seconds:.1f} s, code {code}", flush=True)
    go_on = sft(args, [], out, model, [*devices(min(2, n)), "--ckpt.resume-step", "-1", "--max-steps", "15"])
    subprocess.run(go_on, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    whole = [row["loss/mean"] for row in job.steps(args.out / "loss-threads")][:15]
    resumed = [row["loss/mean"] for row in job.steps(out)][: len(whole)]
    off = max(abs(a - b) / a for a, b in zip(whole, resumed))
    print(f"the checkpoint of {n} ranks goes on with {min(2, n)}: losses {off:.1e} apart at most", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("embertune")
    parser.add_argument("--gpus", default="1,2,4,8", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--out", default=Path("scaling"), type=Path)
    parser.add_argument("--models", default=Path("/tmp/embertune-scaling"), type=Path, help="where random models are made")
    parser.add_argument("--steps", default=9, type=int)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--no-checks", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    jobs = QUICK if args.quick else JOBS
    models = {size: args.models / size for size in {size for size, *_ in jobs}}
    for size, folder in models.items():
        if not (folder / "config.json").exists():
            make_model(folder, SHAPES[size])
    table(args, models)
    if not args.no_checks:
        losses(args, models["0.6B"])
        kill(args, models["0.6B"])


main()
