"""The way of an adapter from end to end: sft → lint → merge → generate → PEFT → transformers, with equal logits.

    python tools/parity/chain.py EMBERTUNE MODEL [--dump PARITY_DUMP] [--steps 10] [--work DIR]

EMBERTUNE is the program, MODEL a folder such as SmolLM2-135M-Instruct; PARITY_DUMP (`cargo build --release --example
parity_dump`) adds our own logits. Needs torch, transformers and peft. What is checked, all on the CPU in float32:

  1. `sft` trains a LoRA of rank 8 on all linear layers, for a few steps on the data inside the program;
  2. `lint` says that peft, vllm, sglang and llama.cpp take it as it is;
  3. `merge --dtype float32`; the logits of transformers on the merged model against PEFT's on base and adapter, and ours;
  4. `generate` says the same with base and adapter as with the merged model, and as transformers' greedy search;
  5. two steps, and two more from their adapter, have the losses of four (the same rows in each step, SGD without momentum).

Prints the largest differences; exits with 1 where something is off.
"""

import argparse, json, subprocess, sys, tempfile
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("embertune", type=Path)
parser.add_argument("model", type=Path)
parser.add_argument("--dump", type=Path)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--tolerance", type=float, default=3e-5, help="largest difference of logits, as a part of the largest")
parser.add_argument("--work", type=Path)
args = parser.parse_args()
work = args.work or Path(tempfile.mkdtemp(prefix="chain-"))
work.mkdir(parents=True, exist_ok=True)
failed = []


def report(good, text):
    print(f"{'ok  ' if good else 'FAIL'} {text}", flush=True)
    failed.extend([] if good else [text])


def embertune(*words):
    done = subprocess.run([args.embertune.resolve(), *map(str, words)], capture_output=True, text=True, cwd=work)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, words))}: {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def sft(out, steps, *more):
    words = f"@ run.toml --output-dir {out} --max-steps {steps} --clean-output-dir"
    embertune("sft", *words.split(), *map(str, more))
    rows = [json.loads(line) for line in (work / out / "metrics.jsonl").read_text().splitlines()]
    return [row["loss/mean"] for row in rows]


@torch.no_grad()
def logits(model, ids):
    return model(input_ids=ids).logits


def apart(name, a, b):
    largest, size = (a - b).abs().max().item(), a.abs().max().item()
    report(largest <= args.tolerance * size, f"{name}: largest difference {largest:.2e} of logits up to {size:.1f}")


(work / "run.toml").write_text(
    f"""device = "flex"
[model]
name = "{args.model.resolve()}"
[model.lora]
rank = 8
alpha = 16
[data]
name = "embertune/reverse-text"
seq_len = 256
batch_size = 2
shuffle = false
[optim]
lr = 2e-4
"""
)
losses = sft("run", args.steps)
report(losses[-1] < losses[0], f"sft: loss {losses[0]:.4f} -> {losses[-1]:.4f} in {args.steps} steps")
adapter = work / f"run/weights/step_{args.steps}/lora_adapters"
told = embertune("lint", adapter, "--base", args.model.resolve(), "--for", "peft,vllm,sglang,llama.cpp")
report(told.count("takes it as it is") == 4, "lint: all four take it as it is")
merged = work / "merged"
subprocess.run(["rm", "-rf", merged], check=True)
print("     " + embertune("merge", "--base", args.model.resolve(), "--adapter", "run", "--out", merged, "--dtype", "float32").strip().splitlines()[-1])

load = lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
base, whole = load(args.model), load(merged)
ids = (torch.arange(64)[None] * 7919) % base.config.vocab_size
before = logits(base, ids)
peft = PeftModel.from_pretrained(base, adapter).eval()
with_adapter = logits(peft, ids)
report(True, f"the adapter moves logits by up to {(with_adapter - before).abs().max().item():.2e}")
apart("PEFT on base and adapter, transformers on the merged model", with_adapter, logits(whole, ids))
if args.dump:
    ours = work / "logits.safetensors"
    words = ["logits", args.model.resolve(), adapter, 1, ours, "@", work / "run/configs/sft.toml"]
    subprocess.run([args.dump.resolve(), *map(str, words)], check=True, cwd=work)
    ours = load_file(ours)
    wanted = logits(peft, ours["input_ids"])
    apart("PEFT on base and adapter, embertune, on a row of the data", wanted, ours["logits"])
    apart("transformers on the merged model, embertune", logits(whole, ours["input_ids"]), ours["logits"])
# What float32 sums in another order make of 30 layers: PEFT's own merge is as far from PEFT.
own = logits(peft.merge_and_unload(), ids)
apart("PEFT on base and adapter, PEFT's own merge", with_adapter, own)
apart("PEFT's own merge, transformers on the merged model", own, logits(whole, ids))

prompt = "What is a tide?"
answers = [
    embertune("generate", "--device", "flex", "--max-new-tokens", 32, "--model", args.model.resolve(), "--adapter", "run", prompt),
    embertune("generate", "--device", "flex", "--max-new-tokens", 32, "--model", merged, prompt),
]
tokenizer = AutoTokenizer.from_pretrained(args.model)
chat = tokenizer.apply_chat_template([{"role": "user", "content": prompt}], add_generation_prompt=True, return_tensors="pt", return_dict=True)
with torch.no_grad():
    written = whole.generate(**chat, max_new_tokens=32, do_sample=False)[0, chat["input_ids"].shape[1] :]
theirs = tokenizer.decode(written, skip_special_tokens=True)
report(answers[0] == answers[1], "generate: the same with the adapter and merged")
report(answers[1].strip() == theirs.strip(), f"generate: as transformers: {theirs!r}" + ("" if answers[1].strip() == theirs.strip() else f", ours {answers[1]!r}"))

turn = lambda role, content: {"role": role, "content": content}
row = {"messages": [turn("user", "Count the tides. " * 20), turn("assistant", "One tide, two tides. " * 20)]}
(work / "same.jsonl").write_text((json.dumps(row) + "\n") * 4)
plain = "--data.name same.jsonl --data.batch-size 1 --optim.type sgd --optim.momentum 0 --no-optim.nesterov --optim.lr 0.05".split()
curve = sft("uninterrupted", 4, *plain)
parts = sft("first", 2, *plain) + sft("second", 2, *plain, "--model.lora.init-adapter-path", "first")
report(parts == curve and curve[3] < curve[0], f"warm start: losses {parts}, uninterrupted {curve}")
sys.exit(bool(failed))
