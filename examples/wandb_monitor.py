#!/usr/bin/env python3
"""Hands the rows of a run on to Weights & Biases.

    [monitors]
    command = ["python3", "examples/wandb_monitor.py"]

needs `pip install wandb`, and `wandb login` or WANDB_MODE=offline. WANDB_PROJECT, WANDB_ENTITY, WANDB_NAME and wandb's other
variables count. The runs of a job with `[[runs]]` are runs of one group. A run that goes on after a checkpoint goes on there
too. What is said here stands in `logs/monitor.log` of the run folder.

Any program can stand in its place: it reads a JSON object a line from its standard input, until that ends.
"""

import json
import os
import pathlib
import sys
import tomllib

import wandb

OUTPUT = pathlib.Path(os.environ["EMBERTUNE_OUTPUT_DIR"])


def begin(name, first_step):
    """A run of wandb's; the one of before where `name` goes on after a checkpoint."""
    folder = OUTPUT / "runs" / name if name else OUTPUT
    config = tomllib.loads((folder / "configs" / "sft.toml").read_text())
    kept = folder / "wandb_id"
    known = kept.read_text().strip() if kept.exists() and first_step > 1 else None
    run = wandb.init(
        id=known,
        resume="allow" if known else None,
        reinit="create_new",
        dir=folder,
        name=name or os.environ.get("WANDB_NAME", folder.name),
        group=OUTPUT.name if name else None,
        config=config,
    )
    kept.write_text(run.id)
    return run


runs = {}
for line in sys.stdin:
    row = json.loads(line)
    name, step = row.pop("run", ""), row.pop("step")
    if name not in runs:
        runs[name] = begin(name, step)
    runs[name].log(row, step=step)
for run in runs.values():
    run.finish()
