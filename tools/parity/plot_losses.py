#!/usr/bin/env python3
"""Draws the curves of several runs: training loss thin, held-out loss thick with points.

usage: plot_losses.py OUT.{svg,png} LABEL=METRICS.jsonl...        (needs matplotlib)
"""

import json
import sys

import matplotlib

matplotlib.use("Agg")
matplotlib.rcParams["svg.hashsalt"] = "embertune"  # the same bytes each time
import matplotlib.pyplot as plt

out, *runs = sys.argv[1:]
figure, axes = plt.subplots(figsize=(8, 4.5))
for color, run in zip(["#d9480f", "#1864ab", "#2b8a3e", "#862e9c"], runs):
    label, path = run.split("=", 1)
    rows = [json.loads(line) for line in open(path)]
    for key, suffix, style in [
        ("loss/mean", "training", {"linewidth": 0.8, "alpha": 0.45}),
        ("val/loss", "held out", {"linewidth": 2.0, "marker": "o", "markersize": 4}),
    ]:
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        axes.plot(*zip(*points), color=color, label=f"{label}, {suffix}", **style)
axes.set(xlabel="step", ylabel="loss (nats a trained token)")
axes.grid(alpha=0.25)
axes.legend(frameon=False)
figure.tight_layout()
figure.savefig(out, dpi=110, metadata={"Date": None} if out.endswith("svg") else None)
