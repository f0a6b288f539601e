#!/usr/bin/env python3
"""A training step of transformers + PEFT on the work that `embertune bench --peer` hands over.

usage: embertune bench @ run.toml --peer "python3 tools/parity/peer.py [--liger] [--threads N] [--attn sdpa] [--compile]"

The work (a JSON file, the last argument) is described in src/train/bench/peer.rs. Documents of a micro-batch go through as one
padded batch, each a row of its own, so that none sees another; a step is forward, backward, clipping and AdamW (fused). On a
GPU the layers run under bf16 autocast where the weights are bf16, with f32 adapters, as PEFT trains them. Prints one line of JSON.
Needs torch, transformers, peft; --liger needs liger-kernel.
"""

import argparse
import json
import os
import resource
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.utils import logging


def padded(documents, device):
    """ids, mask and labels of documents as one batch; nothing is masked where all are equally long."""
    longest = max(len(document["ids"]) for document in documents)
    ids = torch.zeros(len(documents), longest, dtype=torch.long)
    mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
    for row, document in enumerate(documents):
        n = len(document["ids"])
        ids[row, :n] = torch.tensor(document["ids"])
        mask[row, :n] = 1
        trained = torch.tensor(document["trained"], dtype=torch.bool)
        labels[row, :n][trained] = ids[row, :n][trained]
    batch = dict(input_ids=ids.to(device), labels=labels.to(device))
    return batch if mask.all() else batch | dict(attention_mask=mask.to(device))


def load(work, args):
    if args.liger:
        from liger_kernel.transformers import _apply_liger_kernel

        _apply_liger_kernel(json.loads((Path(work["model"]) / "config.json").read_text())["model_type"])
    dtype = getattr(torch, work["dtype"] if work["lora"] else "float32" if work["device"] == "cpu" else "bfloat16")
    model = AutoModelForCausalLM.from_pretrained(work["model"], dtype=dtype, attn_implementation=args.attn)
    model = model.to(work["device"])
    model.config.use_cache = False
    if work["lora"]:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(**work["lora"], task_type="CAUSAL_LM"))
    if work["gradient_checkpointing"]:
        if work["lora"]:
            model.enable_input_require_grads()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return torch.compile(model.train()) if args.compile else model.train()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--liger", action="store_true", help="Liger's kernels (GPU)")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--attn", default="sdpa")
    parser.add_argument("--compile", action="store_true", help="torch.compile (compiles in the warm-up)")
    args = parser.parse_args()
    work = json.loads(args.work.read_text())
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model, cuda = load(work, args), work["device"] != "cpu"
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=work["lr"], weight_decay=work["weight_decay"], fused=True)
    batches = [padded(documents, work["device"]) for documents in work["micro_batches"]]
    targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    autocast = torch.autocast("cuda", dtype=torch.bfloat16) if cuda and work["dtype"] == "bfloat16" else nullcontext()

    times, losses = [], []
    for _ in range(work["warmup"] + work["steps"]):
        if cuda:
            torch.cuda.synchronize()
        start, total = time.perf_counter(), 0.0
        for batch in batches:
            with autocast:
                loss = model(**batch, num_items_in_batch=targets).loss
            loss.backward()
            total += loss.detach()
        if work["max_norm"] is not None:
            torch.nn.utils.clip_grad_norm_(parameters, work["max_norm"])
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total.item())
        times.append(1e3 * (time.perf_counter() - start))
    print(f"peer: loss {losses[0]:.4f} -> {losses[-1]:.4f}", file=sys.stderr)
    peak = torch.cuda.max_memory_allocated() if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    name = "transformers " + transformers.__version__
    if work["lora"]:
        import peft

        name += f" + PEFT {peft.__version__}"
    if args.liger:
        import importlib.metadata

        name += f" + Liger {importlib.metadata.version('liger-kernel')}"
    name += f" (torch {torch.__version__}, {args.attn}{', compiled' if args.compile else ''})"
    print(json.dumps({"name": name, "ms": times[work["warmup"]:], "peak_bytes": peak}))


if __name__ == "__main__":
    main()
