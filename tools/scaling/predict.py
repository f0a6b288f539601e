"""Predicts the time of a step on R GPUs from that on one, by the formula of `docs/scaling.md`.

    python tools/scaling/predict.py                 # the tables of docs/scaling.md
    python tools/scaling/predict.py scaling/*.json  # each measurement of measure.py against its prediction

A measurement is held against the prediction from the same work on one GPU, whose JSON lies beside it.
"""

import json, math, re, statistics, sys
from pathlib import Path

# Bytes a second of NCCL's bus (2 (R - 1) / R bytes cross it for each byte summed), and seconds a hop.
HOST = dict(rate=350e9, hop=6e-6)      # NVLink 4, 8 GPUs of one host, without multicast
CLUSTER = dict(rate=300e9, hop=15e-6)  # hosts of 8 GPUs with a 400 Gb/s link each
SLOW = dict(rate=11e9, hop=30e-6)      # hosts with one 100 Gb/s link for all
GPUS_A_HOST = 8

# Trained parameters (LoRA: r 16 on the 7 linears), ms of a step on one H200, its standard deviation, and ms of the
# optimizer, which the ranks share in full fine-tuning. Rows of 4096 tokens, of one GPU. Not measured: 32B, from 56 % MFU;
# 4B in full, from 47 %; their optimizers, from the bytes (28 a parameter, at 4 TB/s).
LORA = {
    "0.6B, 8 rows": (10_092_544, 293.2, 3.0, 0.0),
    "4B, 4 rows": (33_030_144, 627.5, 2.5, 0.0),
    "8B, 2 rows": (43_646_976, 503.5, 4.5, 0.0),
    "32B, 1 row": (134_217_728, 960.0, 8.0, 0.0),
}
FULL = {
    "0.6B, 8 rows": (596e6, 339.9, 5.0, 4.2),
    "4B, 1 row, recomputed": (4022e6, 272.0, 3.0, 28.0),
    "4B, 8 rows, one at a time, recomputed": (4022e6, 1980.0, 8.0, 28.0),
}


def link(ranks):
    return HOST if ranks <= GPUS_A_HOST else CLUSTER


def all_reduce(size, ranks, net):
    """Seconds to sum `size` bytes over the ranks: a ring's bytes, a tree's hops."""
    if ranks == 1:
        return 0.0
    return 2 * (ranks - 1) / ranks * size / net["rate"] + 2 * math.ceil(math.log2(ranks)) * net["hop"]


def spread(size, ranks, net):
    """Seconds until every rank has each part from the one that updated it (ZeRO-1): half an all-reduce."""
    return all_reduce(size, ranks, net) / 2


def slowest(deviation, ranks):
    """By how much the slowest of R ranks is expected to be behind the mean, their times being normal."""
    return deviation * math.sqrt(2 * math.log(ranks)) if ranks > 1 else 0.0


def step(alone, deviation, optimizer, summed, ranks, full, net=None):
    """Seconds of a step: all in seconds and bytes. The sum doesn't overlap with the backward pass."""
    net = net or link(ranks)
    shared = optimizer * (1 - 1 / ranks) if full else 0.0
    sums = all_reduce(summed, ranks, net) + (spread(summed, ranks, net) if full else 0.0)
    return alone - shared + slowest(deviation, ranks) + sums


def tables():
    counts = [2, 8, 64, 512]
    for title, works, full in [("LoRA r 16", LORA, False), ("Full fine-tuning, f32 gradients, ZeRO-1", FULL, True)]:
        print(f"| {title} | summed, MB | ms on 1 | " + " | ".join(f"on {n} (efficiency)" for n in counts) + " | on 512, a 100 Gb/s link a host |")
        print("|---" * (4 + len(counts)) + "|")
        for name, (trained, ms, deviation, optimizer) in works.items():
            size = 4 * trained
            cells = []
            for n, net in [(n, None) for n in counts] + [(512, SLOW)]:
                t = 1e3 * step(ms / 1e3, deviation / 1e3, optimizer / 1e3, size, n, full, net)
                cells.append(f"{t:.0f} ({ms / t:.3f})")
            print(f"| {name} | {size / 1e6:.0f} | {ms:.0f} | " + " | ".join(cells) + " |")
        print()


def held_against(paths):
    """Prints each measurement beside its prediction; whether all lie within 10 %."""
    good = True
    for path in sorted(paths):
        name, ranks = re.fullmatch(r"(.+)-(\d+)", path.stem).groups()
        base = path.with_name(f"{name}-1.json")
        if int(ranks) == 1 or not base.exists():
            continue
        one, many = json.loads(base.read_text()), json.loads(path.read_text())
        times, summed = one["ms_per_step"], many["all_reduce_bytes"]
        deviation = statistics.stdev(times["all"]) / 1e3
        optimizer = one["phases_ms"].get("optimizer", 0.0) / 1e3
        t = 1e3 * step(times["median"] / 1e3, deviation, optimizer, summed, int(ranks), "full" in name)
        found = many["ms_per_step"]["median"]
        good &= abs(t / found - 1) <= 0.1
        print(f"{name} on {ranks}: {found:.1f} ms, predicted {t:.1f} ({100 * (t / found - 1):+.1f} %)")
    return good


if __name__ == "__main__":
    if len(sys.argv) == 1:
        tables()
    elif not held_against([Path(p) for p in sys.argv[1:]]):
        sys.exit("a prediction is more than 10 % off: correct the rates in predict.py and the tables of docs/scaling.md")
