#!/usr/bin/env python3
"""Speed and memory of LoRA training with transformers + PEFT on the CPU: what embertune is held against.

usage: bench_peft_cpu.py MODEL [--rows 4] [--seq 512] [--micro N] [--steps 5] [--warmup 2] [--threads 2] [--attn sdpa] [--compile]

MODEL is a Hugging Face folder. float32, rank 16 on the seven linears, fixed random ids, every token but the first trained,
forward + backward + clipping + AdamW (fused). One step is --rows rows of --seq tokens, --micro of them at a time (default: all at once).
Prints one line: tokens/s from the median step after the warm-up, its processor time over all threads, peak resident
memory of the process, load average at the start (timings mean something only when it is near 0).
Needs torch, transformers and peft.
"""

import argparse
import os
import resource
import statistics
import time
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from transformers.utils import logging

LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--seq", type=int, default=512)
    parser.add_argument("--micro", type=int, help="rows that go through the model at once")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--attn", default="sdpa", choices=["sdpa", "eager"])
    parser.add_argument("--compile", action="store_true", help="torch.compile (compiles in the warm-up)")
    return parser.parse_args()


def main():
    args = parse_args()
    load = os.getloadavg()[0]
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation=args.attn)
    model.config.use_cache = False
    lora = LoraConfig(r=args.rank, lora_alpha=2 * args.rank, lora_dropout=0.0, target_modules=LINEARS, task_type="CAUSAL_LM")
    model = get_peft_model(model, lora).train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    ids = torch.randint(0, model.config.vocab_size, (args.rows, args.seq))
    run = torch.compile(model) if args.compile else model
    targets = args.rows * (args.seq - 1)

    seconds, processor, losses = [], [], []
    for _ in range(args.warmup + args.steps):
        start, used = time.perf_counter(), time.process_time()
        loss = 0.0
        for part in ids.split(args.micro or args.rows):
            piece = run(input_ids=part, labels=part, num_items_in_batch=targets).loss
            piece.backward()
            loss += piece.item()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        processor.append(time.process_time() - used)
        losses.append(loss)
    median = statistics.median(seconds[args.warmup :])
    print(
        f"transformers + PEFT {args.model.name} r={args.rank} {args.rows}x{args.seq} micro={args.micro or args.rows} {args.attn}"
        f"{' compile' if args.compile else ''} f32 threads={args.threads} torch {torch.__version__}: "
        f"{args.rows * args.seq / median:.1f} tokens/s ({median:.3f} s/step, median of {args.steps} after {args.warmup}; "
        f"{min(seconds[args.warmup :]):.3f} to {max(seconds[args.warmup :]):.3f}; "
        f"{statistics.median(processor[args.warmup :]):.2f} s of processor time) "
        f"peak RSS {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.2f} GiB loss {losses[0]:.4f} -> {losses[-1]:.4f} load {load:.2f}"
    )


if __name__ == "__main__":
    main()
