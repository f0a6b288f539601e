#!/usr/bin/env python3
"""Compares the losses of two runs step by step.

usage: compare_losses.py OURS.jsonl REFERENCE.jsonl [--bound 0.005] [--steps N]

Both files have "step" and "loss/mean" on each line that counts (embertune's metrics.jsonl, peft_train.py's output); lines
without "loss/mean" (validation, say) are passed over. Prints each step's relative difference |ours - reference| / |reference|
and the largest. Exit status 1 when it is above the bound, when a loss is not finite or when one file lacks a step of the other.
"""

import argparse
import json
import math
import sys
from pathlib import Path

KEY = "loss/mean"


def read(path):
    """{step: row} of the lines that have a loss."""
    rows = {}
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            row = json.loads(line) if line.strip() else {}
            if KEY not in row:
                continue
            if row["step"] in rows:
                sys.exit(f"{path}, line {number}: step {row['step']} for the second time")
            rows[row["step"]] = row
    if not rows:
        sys.exit(f'{path}: no line with "{KEY}"')
    return rows


def relative(a, b):
    """|a - b| / |b|, infinite when either is not a finite number."""
    if a is None or b is None or not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(b), 1e-30)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ours", type=Path)
    parser.add_argument("reference", type=Path)
    parser.add_argument("--bound", type=float, default=0.005, help="largest relative difference allowed (default 0.5 %%)")
    parser.add_argument("--steps", type=int, help="compare only the first N steps")
    args = parser.parse_args()

    ours, reference = read(args.ours), read(args.reference)
    first = lambda rows: sorted(rows)[: args.steps]
    lonely = sorted(set(first(ours)) ^ set(first(reference)))
    if lonely:
        sys.exit(f"steps in one file only: {lonely}")
    worst = (-1.0, None)
    print("step        ours   reference   relative")
    for step in first(ours):
        a, b = ours[step][KEY], reference[step][KEY]
        difference = relative(a, b)
        worst = max(worst, (difference, step), key=lambda pair: pair[0])
        print(f"{step:4d} {a!s:>11.11} {b!s:>11.11} {difference:10.2e}")
    norms = [
        relative(ours[step]["optim/grad_norm"], reference[step]["optim/grad_norm"])
        for step in first(ours)
        if "optim/grad_norm" in ours[step] and "optim/grad_norm" in reference[step]
    ]
    if norms:
        print(f"gradient norms: largest relative difference {max(norms):.2e}")
    good = worst[0] <= args.bound
    print(
        f"losses of {len(first(ours))} steps: largest relative difference {worst[0]:.2e} at step {worst[1]}, "
        f"bound {args.bound:.1e}: {'good' if good else 'TOO LARGE'}"
    )
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
