#!/usr/bin/env python3
"""Proves the scripts of this folder on golden cases (tests/goldens or another folder of that format).

usage: self_check.py GOLDENS

peft_train.py must give the losses, gradient norms and final weights of every GOLDENS/train case, with the mask and with
--separate; compare_losses.py must accept them and refuse losses that are off by 1 %; check_adapter.py must accept the logits
of GOLDENS/lora cases and PEFT's merge, and refuse both when something is changed. Takes about a minute.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

HERE = Path(__file__).resolve().parent


def run(script, *args):
    """Runs a script of this folder; returns its exit status and output."""
    done = subprocess.run([sys.executable, HERE / script, *map(str, args)], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def must(good, text, output=""):
    print(f"{'ok  ' if good else 'FAIL'} {text}", flush=True)
    if not good:
        sys.exit(output)


def batch_lines(case):
    """The micro-batches of a golden training case in the form that embertune writes."""
    for step in case["steps"]:
        for micro, batch in enumerate(step["micro_batches"]):
            line = {"step": step["step"], "micro": micro, "input_ids": [], "position_ids": [], "targets": [], "loss_mask": [], "cu_seqlens": [0]}
            for row in batch["rows"]:
                offset = len(line["input_ids"])
                ids, labels, documents = row["input_ids"], row["labels"], row["document_ids"]
                line["input_ids"] += ids
                line["position_ids"] += row["position_ids"]
                for t in range(len(ids)):
                    inside = t + 1 < len(ids) and documents[t + 1] == documents[t]
                    trained = inside and labels[t + 1] >= 0
                    line["targets"].append(labels[t + 1] if trained else 0)
                    line["loss_mask"].append(trained)
                    if not inside:
                        line["cu_seqlens"].append(offset + t + 1)
            assert sum(line["loss_mask"]) == batch["n_target_tokens"]
            yield json.dumps(line) + "\n"


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def check_training(goldens, name, work, separate):
    """One golden training case through peft_train.py, with the tolerances of the goldens."""
    folder = goldens / "train" / name
    case = json.loads((folder / "case.json").read_text())
    hyper = case["hyper"]
    batches, out, saved, wanted = work / "batches.jsonl", work / "losses.jsonl", work / "saved", work / "wanted.jsonl"
    batches.write_text("".join(batch_lines(case)))
    steps = case["steps"]
    want = [{"step": s["step"], "loss/mean": s["loss"], "optim/grad_norm": s["grad_norm"], "optim/lr": s["lr"]} for s in steps]
    write_rows(wanted, want)
    start = ["--full"] if case["mode"] == "full" else ["--adapter", folder / case["init"]]
    options = ["--separate"] if separate else []
    options += ["--no-decay-on-norms"] if hyper.get("decay_groups") == "hf" else []
    options += ["--weight-decay", hyper["weight_decay"], "--max-norm", hyper["max_grad_norm"], "--threads", 1, "--lr-from", wanted]
    status, output = run("peft_train.py", goldens / case["model"], batches, *start, *options, "--out", out, "--save", saved)
    must(status == 0, f"train/{name}: peft_train.py {'--separate ' if separate else ''}runs", output)
    got = [json.loads(line) for line in out.read_text().splitlines()]
    losses = max(abs(g["loss/mean"] - w["loss/mean"]) / (5e-5 + 1e-5 * abs(w["loss/mean"])) for g, w in zip(got, want, strict=True))
    norms = max(abs(g["optim/grad_norm"] / w["optim/grad_norm"] - 1) for g, w in zip(got, want))
    must(losses <= 1, f"train/{name}: losses, {losses:.3f} of the tolerance")
    must(norms <= 1e-4, f"train/{name}: gradient norms, largest relative difference {norms:.1e}")
    file = "model.safetensors" if case["mode"] == "full" else "adapter_model.safetensors"
    final, ours = load_file(folder / case["final"] / file), load_file(saved / file)
    must(final.keys() == ours.keys(), f"train/{name}: {len(final)} final tensors by name", str(final.keys() ^ ours.keys()))
    apart = torch.cat([(final[key] - ours[key]).abs().flatten() for key in final])
    good = apart.max() <= 2e-4 and (apart <= 5e-6).double().mean() >= 0.999
    must(bool(good), f"train/{name}: final weights, largest difference {apart.max():.1e}")
    status, output = run("compare_losses.py", out, wanted)
    must(status == 0, "compare_losses.py accepts them", output)
    got[4]["loss/mean"] *= 1.01
    write_rows(out, got)
    must(run("compare_losses.py", out, wanted)[0] == 1, "compare_losses.py refuses one loss that is off by 1 %")
    write_rows(out, got[:4])
    must(run("compare_losses.py", out, wanted)[0] == 1, "compare_losses.py refuses a missing step")


def check_crossing(goldens, work):
    """peft_train.py refuses a batch whose target lies in the next document."""
    case = json.loads((goldens / "train/lora/case.json").read_text())
    line = json.loads(next(batch_lines(case)))
    line["loss_mask"][line["cu_seqlens"][1] - 1] = True
    write_rows(work / "bad.jsonl", [line])
    init = goldens / "train/lora/init"
    status, output = run("peft_train.py", goldens / case["model"], work / "bad.jsonl", "--adapter", init, "--lr", 1e-3, "--out", work / "none.jsonl")
    must(status == 1 and "its target is outside" in output, "peft_train.py refuses a target in the next document", output)


def check_adapters(goldens, name, work, dtype):
    """One golden adapter through check_adapter.py, good and spoilt."""
    case = json.loads((goldens / "lora" / name / "case.json").read_text())
    base, adapter = goldens / case["model"], goldens / "lora" / name
    expected = load_file(adapter / "expected.safetensors")
    length = min(map(sum, case["attention_mask"]))  # rows are padded on the right
    ours = {key: expected[key][:, :length].contiguous() for key in ("input_ids", "logits")}
    good, spoilt, merged = work / "ours.safetensors", work / "spoilt.safetensors", work / "merged"
    save_file(ours, good)
    spoilt_logits = ours["logits"].clone()
    spoilt_logits[0, 3, 5] += 0.01
    save_file({**ours, "logits": spoilt_logits}, spoilt)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).merge_and_unload()
    shutil.rmtree(merged, ignore_errors=True)
    model.to(dtype).save_pretrained(merged)
    status, output = run("check_adapter.py", base, adapter, "--ours", good, "--merged", merged)
    must(status == 0, f"check_adapter.py accepts lora/{name} and its merge in {dtype}", output)
    print("\n".join(f"     | {line}" for line in output.splitlines() if "difference" in line or "last place" in line))
    must(run("check_adapter.py", base, adapter, "--ours", spoilt)[0] == 1, "check_adapter.py refuses a logit that is off by 0.01")
    tensors = load_file(merged / "model.safetensors")
    key = "model.layers.1.self_attn.q_proj.weight"
    tensors[key][0] = tensors[key][0] * 1.1
    save_file(tensors, merged / "model.safetensors", metadata={"format": "pt"})
    must(run("check_adapter.py", base, adapter, "--merged", merged)[0] == 1, "check_adapter.py refuses a merge with one row changed")
    bare = work / "bare"
    shutil.rmtree(bare, ignore_errors=True)
    shutil.copytree(adapter, bare)
    kept = load_file(adapter / "adapter_model.safetensors")
    kept.pop(sorted(kept)[-1])
    save_file(kept, bare / "adapter_model.safetensors", metadata={"format": "pt"})
    status, output = run("check_adapter.py", base, bare)
    must(status == 1 and "missing adapter keys" in output, "check_adapter.py refuses an adapter with a tensor missing", output)


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    goldens = Path(sys.argv[1]).resolve()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for case in sorted((goldens / "train").glob("*/case.json")):
            for separate in (False, True):
                check_training(goldens, case.parent.name, work, separate)
        check_crossing(goldens, work)
        check_adapters(goldens, "all7", work, torch.float32)
        check_adapters(goldens, "bf16-base", work, torch.bfloat16)
    print("all good")


if __name__ == "__main__":
    main()
