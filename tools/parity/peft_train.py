#!/usr/bin/env python3
"""Trains with transformers + PEFT on batches that embertune wrote out: the same numbers, computed by somebody else.

usage: peft_train.py MODEL BATCHES.jsonl --adapter DIR (--lr X | --lr-from FILE) --out LOSSES.jsonl [options]
       peft_train.py MODEL BATCHES.jsonl --full        (--lr X | --lr-from FILE) --out LOSSES.jsonl [options]

MODEL is a Hugging Face folder; --adapter is the PEFT folder to start from (it is only read); --full trains every weight.
BATCHES.jsonl has one line per micro-batch, its rows laid end to end:
    {"step": 0, "micro": 0, "input_ids": [..], "position_ids": [..], "targets": [..], "loss_mask": [..], "cu_seqlens": [0, .., T]}
`targets[t]` is the id to predict at position t, `loss_mask[t]` whether it counts (true/false or 1/0), `cu_seqlens` the
document boundaries. Lines of one step stand together.

One step: the loss is the sum of the cross entropies of all trained tokens of the step / their number; the gradient norm is
clipped (torch.nn.utils.clip_grad_norm_); then torch.optim.AdamW. A step without trained tokens changes nothing and gives no line.
Documents never see each other: by a block-diagonal mask over the micro-batch, or (--separate) by running each one alone.
float32 on the CPU unless --dtype and --device say otherwise; there the same arguments give the same bytes for the same
number of threads.

LOSSES.jsonl: {"step", "loss/mean", "optim/grad_norm", "optim/lr", "trained_tokens"}, the loss and norm before the update.
Needs torch, transformers and peft.
"""

import argparse
import itertools
import json
import math
import os
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
import torch.nn.functional as F
from peft import PeftModel
from transformers import AutoModelForCausalLM

KEYS = ("input_ids", "position_ids", "targets", "loss_mask", "cu_seqlens")


def parse_args(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("batches", type=Path)
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--adapter", type=Path, help="PEFT folder to start from")
    start.add_argument("--full", action="store_true", help="train every weight of the model")
    rate = parser.add_mutually_exclusive_group(required=True)
    rate.add_argument("--lr", type=float, help="one learning rate for every step")
    rate.add_argument("--lr-from", type=Path, help='JSONL with "step" and "optim/lr" (a metrics.jsonl will do)')
    parser.add_argument("--out", type=Path, required=True, help="where the losses go (JSONL)")
    parser.add_argument("--save", type=Path, help="folder for the trained adapter or model")
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument("--beta1", type=float, default=0.9)
    parser.add_argument("--beta2", type=float, default=0.999)
    parser.add_argument("--eps", type=float, default=1e-8)
    parser.add_argument("--weight-decay", type=float, default=0.01)
    parser.add_argument("--no-decay-on-norms", action="store_true", help="no weight decay on norm weights and biases")
    parser.add_argument("--max-norm", type=float, default=1.0, help="clip the gradient norm to this")
    parser.add_argument("--separate", action="store_true", help="run every document by itself, without a mask")
    parser.add_argument("--attn", default="sdpa", choices=["sdpa", "eager"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of the base; adapters stay float32")
    return parser.parse_args(argv)


def read_steps(path):
    """Yields (step, [micro-batch]) from a batch file, each micro-batch checked."""

    def lines():
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    batch = json.loads(line)
                    check(batch, f"{path}, line {number}")
                    yield batch

    seen = set()
    for step, micros in itertools.groupby(lines(), key=lambda batch: batch["step"]):
        if step in seen:
            raise SystemExit(f"{path}: the lines of step {step} do not stand together")
        seen.add(step)
        yield step, list(micros)


def check(batch, where):
    """Refuses a micro-batch that trains across a document boundary or contradicts itself."""
    missing = [key for key in ("step", *KEYS) if key not in batch]
    if missing:
        raise SystemExit(f"{where}: no {', '.join(missing)}")
    ids, cu = batch["input_ids"], batch["cu_seqlens"]
    for key in KEYS[:-1]:
        if len(batch[key]) != len(ids):
            raise SystemExit(f"{where}: {len(batch[key])} {key} but {len(ids)} input_ids")
    if cu[0] != 0 or cu[-1] != len(ids) or any(a >= b for a, b in zip(cu, cu[1:])):
        raise SystemExit(f"{where}: cu_seqlens must rise from 0 to {len(ids)}")
    for start, end in zip(cu, cu[1:]):
        if batch["position_ids"][start:end] != list(range(end - start)):
            raise SystemExit(f"{where}: position_ids of the document at {start} do not run from 0 to {end - start - 1}")
        if batch["loss_mask"][end - 1]:
            raise SystemExit(f"{where}: the last token of the document at {start} is trained, its target is outside")
        for t in range(start, end - 1):
            if batch["loss_mask"][t] and batch["targets"][t] != ids[t + 1]:
                raise SystemExit(f"{where}: the target at {t} is {batch['targets'][t]}, the next id is {ids[t + 1]}")


def read_rates(path):
    """{step: learning rate} from a JSONL file."""
    rates = {}
    with open(path, encoding="utf-8") as file:
        for row in map(json.loads, filter(str.strip, file)):
            if "optim/lr" in row:
                rates[row["step"]] = row["optim/lr"]
    return rates


def load_model(args):
    """The model with its trainable parameters, in training mode; refuses dropout, which cannot be matched."""
    dtype = getattr(torch, args.dtype)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=dtype, attn_implementation=args.attn).to(args.device)
    model.config.use_cache = False
    if getattr(model.config, "attention_dropout", 0.0):
        raise SystemExit(f"{args.model}: attention_dropout is not 0")
    if args.adapter:
        model = PeftModel.from_pretrained(model, args.adapter, is_trainable=True)
        if model.peft_config["default"].lora_dropout:
            raise SystemExit(f"{args.adapter}: lora_dropout is not 0; two programs never draw the same mask")
    return model.train()


def block_mask(cu, total):
    """[1, 1, T, T], true where a token may look: at or before itself, in its own document."""
    document = torch.zeros(total, dtype=torch.long)
    document[cu[1:-1]] = 1
    document = document.cumsum(0)
    causal = torch.ones(total, total, dtype=torch.bool).tril()
    return (causal & (document[:, None] == document[None, :]))[None, None]


def loss_pieces(model, batch, separate):
    """Yields the cross entropy sums of a micro-batch (one, or one per document); they add up to its loss."""
    ids, positions, targets = (torch.tensor([batch[key]]) for key in ("input_ids", "position_ids", "targets"))
    mask = torch.tensor(batch["loss_mask"], dtype=torch.bool)
    cu = batch["cu_seqlens"]
    pieces = list(zip(cu, cu[1:])) if separate else [(0, len(mask))]
    for start, end in pieces:
        trained = mask[start:end].nonzero()[:, 0]
        if len(trained) == 0:
            continue
        logits = model(
            input_ids=ids[:, start:end],
            position_ids=positions[:, start:end],
            attention_mask=None if separate else block_mask(cu, len(mask)),
            logits_to_keep=trained,
        ).logits[0]
        yield F.cross_entropy(logits.float(), targets[0, start:end][trained], reduction="sum")


def make_optimizer(model, args):
    """AdamW over all trainable parameters, each with a gradient of 0 to begin with."""
    decayed, rest = [], []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
            free = args.no_decay_on_norms and ("norm" in name or name.endswith("bias"))
            (rest if free else decayed).append(parameter)
    groups = [{"params": decayed}] + ([{"params": rest, "weight_decay": 0.0}] if rest else [])
    return torch.optim.AdamW(
        groups, lr=0.0, betas=(args.beta1, args.beta2), eps=args.eps, weight_decay=args.weight_decay
    )


def train(args):
    """Runs all steps, writes the losses, and returns them."""
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(args.device == "cpu")
    model = load_model(args)
    torch.set_default_device(args.device)
    optimizer = make_optimizer(model, args)
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    rates = read_rates(args.lr_from) if args.lr_from else None
    rows = []
    with open(args.out, "w", encoding="utf-8") as out:
        for step, micros in itertools.islice(read_steps(args.batches), args.steps):
            trained = sum(sum(map(bool, batch["loss_mask"])) for batch in micros)
            if trained == 0:
                print(f"step {step}: nothing to train, skipped", flush=True)
                continue
            lr = args.lr if rates is None else rates.get(step)
            if lr is None:
                raise SystemExit(f"{args.lr_from}: no optim/lr for step {step}")
            row = one_step(model, micros, trained, lr, optimizer, parameters, args)
            row = {"step": step, **row}
            rows.append(row)
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(f"step {step}: loss {row['loss/mean']:.6f} grad norm {row['optim/grad_norm']:.5f} lr {lr:.3e}", flush=True)
    if not rows:
        raise SystemExit(f"{args.batches}: no step trained anything")
    if args.save:
        model.save_pretrained(args.save)
    return rows


def one_step(model, micros, trained, lr, optimizer, parameters, args):
    """Forward, backward and update of one step; returns its row of numbers."""
    total = 0.0
    for batch in micros:
        for loss_sum in loss_pieces(model, batch, args.separate):
            (loss_sum / trained).backward()
            total += loss_sum.item()
    norm = torch.nn.utils.clip_grad_norm_(parameters, args.max_norm).item()
    if not math.isfinite(total) or not math.isfinite(norm):
        raise SystemExit(f"loss {total} or gradient norm {norm} is not finite")
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return {"loss/mean": total / trained, "optim/grad_norm": norm, "optim/lr": lr, "trained_tokens": trained}


if __name__ == "__main__":
    train(parse_args())
