#!/usr/bin/env python3
"""Loads an exported adapter in PEFT, and a merged model in transformers, and compares both with what embertune computed.

usage: check_adapter.py BASE ADAPTER [--ours LOGITS.safetensors] [--merged DIR] [--tolerance X] [--rounded-tolerance X]

BASE is the base model's Hugging Face folder, ADAPTER the PEFT folder. LOGITS.safetensors holds `input_ids` ([n] or [rows, n],
each row one document) and `logits` (one more axis: the vocabulary), embertune's output with the adapter. Without it
64 fixed ids are used and only PEFT and the merged model are compared.

Checked, all in float32 on the CPU:
  1. PEFT and transformers load everything without a warning (of deprecations in their own code apart); every tensor of the file is in the model, bit for bit;
     adapter_config.json has the keys that this PEFT writes (an error if `peft_version` is the same, else a note);
  2. the logits in PEFT against ours;
  3. the merged model: names, shapes and untouched tensors as in the base; merged weights against PEFT's merge (computed in
     float32, rounded once to the stored dtype); its logits against those of PEFT's merge in that dtype and, where the merged
     model is stored in float32, against ours.
Prints the largest absolute differences. Exit status 1 when a check fails.
Needs torch, transformers, peft and safetensors.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

failures = []


def report(good, text):
    """One line of the report; remembers failures."""
    print(f"{'ok  ' if good else 'FAIL'} {text}")
    if not good:
        failures.append(text)


class Strict(logging.Handler):
    """Within this block a warning is an exception, and so is a log record of that level."""

    def emit(self, record):
        raise RuntimeError(f"warning from {record.name}: {record.getMessage()}")

    def __enter__(self):
        self.setLevel(logging.WARNING)
        self.loggers = [logging.getLogger(name) for name in ("transformers", "peft")]
        for logger in self.loggers:
            logger.addHandler(self)
        self.catcher = warnings.catch_warnings()
        self.catcher.__enter__()
        warnings.simplefilter("error")
        for category in (DeprecationWarning, FutureWarning):  # about the libraries' own code, not about the adapter
            warnings.simplefilter("ignore", category)
        return self

    def __exit__(self, *error):
        self.catcher.__exit__(*error)
        for logger in self.loggers:
            logger.removeHandler(self)


def load_base(path):
    """A causal language model in float32, loaded without a missing, unused or mis-shaped tensor."""
    with Strict():
        model, info = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, output_loading_info=True)
    wrong = {kind: list(names) for kind, names in info.items() if names}
    if wrong:
        raise RuntimeError(f"{path}: {wrong}")
    return model.eval()


@torch.no_grad()
def logits_of(model, ids):
    return torch.stack([model(input_ids=row[None], use_cache=False).logits[0] for row in ids])


def compare(name, got, want, tolerance):
    """Largest absolute difference, and whether it is within tolerance * (1 + |want|) everywhere."""
    if got.shape != want.shape:
        report(False, f"{name}: shape {list(got.shape)}, not {list(want.shape)}")
        return
    difference = (got.double() - want.double()).abs()
    good = bool((difference <= tolerance * (1 + want.double().abs())).all())
    worst = difference.max().item()
    report(good, f"{name}: largest difference {worst:.3e} (logits up to {want.abs().max().item():.1f}, tolerance {tolerance:g})")


def check_file(model, adapter):
    """Every tensor of the adapter file is in the model, bit for bit, and nothing else is."""
    stored = load_file(adapter / "adapter_model.safetensors")
    held = get_peft_model_state_dict(model, save_embedding_layers=False)
    # A targeted head or embedding brings its frozen base weight along; PEFT may leave it out or write it.
    stored = {key: value for key, value in stored.items() if ".base_layer." not in key}
    held = {key: value for key, value in held.items() if ".base_layer." not in key}
    unlike = [key for key in stored.keys() & held.keys() if not torch.equal(stored[key].float(), held[key].float())]
    report(stored.keys() == held.keys(), f"{len(stored)} tensors in the file, {len(held)} in PEFT: {sorted(stored.keys() ^ held.keys())[:4]}")
    report(not unlike, f"values as stored: {unlike[:4]}")
    check_config(model, adapter)


def check_config(model, adapter):
    """adapter_config.json has the keys that PEFT writes for the same adapter."""
    ours = json.loads((adapter / "adapter_config.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        model.peft_config["default"].save_pretrained(folder)
        peft = json.loads((Path(folder) / "adapter_config.json").read_text())
    unlike = sorted(ours.keys() ^ peft.keys())
    same = ours.get("peft_version") == peft.get("peft_version")
    text = f"{len(ours)} keys in adapter_config.json, PEFT {peft.get('peft_version')} writes {len(peft)}: {unlike}"
    if same or not unlike:
        report(not unlike, text)
    else:
        print(f"note {text} (made for PEFT {ours.get('peft_version')})")


def stored_tensors(path):
    """All tensors of a model folder, as stored."""
    tensors = {}
    for file in sorted(Path(path).glob("model*.safetensors")):
        tensors.update(load_file(file))
    return tensors


def check_merged(base, merged, peft_merged):
    """The merged folder's tensors against the base's and PEFT's merge; returns PEFT's merge rounded to the stored dtypes."""
    before, after = stored_tensors(base), stored_tensors(merged)
    if json.loads((Path(base) / "config.json").read_text()).get("tie_word_embeddings"):
        # Some tied checkpoints hold the head as well; then it must be the embedding.
        before.pop("lm_head.weight", None)
        head = after.pop("lm_head.weight", None)
        same = head is None or torch.equal(head, after["model.embed_tokens.weight"])
        report(same, "tied head of the merged model")
    report(before.keys() == after.keys(), f"{len(after)} tensors in the merged model, {len(before)} in the base: {sorted(before.keys() ^ after.keys())[:4]}")
    rounded, worst, changed, untouched = {}, 0.0, 0, []
    for name in sorted(before.keys() & after.keys()):
        want, got = peft_merged[name], after[name]
        rounded[name] = want.to(got.dtype).float()
        if torch.equal(want, before[name].float()):
            if not torch.equal(got, before[name].to(got.dtype)):
                untouched.append(name)
            continue
        changed += 1
        # In units of the last place of the stored dtype, at least that of the tensor's mean size.
        step = torch.finfo(got.dtype).eps * torch.maximum(want.abs(), want.abs().mean())
        worst = max(worst, ((got.float() - rounded[name]).abs() / step).max().item())
    dtypes = {str(tensor.dtype).removeprefix("torch.") for tensor in after.values()}
    report(not untouched, f"tensors without an adapter as in the base: {untouched[:4]}")
    # float32 sums of r products may differ in their last places; a rounded dtype by a tie, or by rounding B·A on the way.
    bound = 64.0 if dtypes == {"float32"} else 2.0
    report(worst <= bound, f"{changed} merged tensors ({', '.join(sorted(dtypes))}): within {worst:.2f} units in the last place of PEFT's merge (bound {bound:g})")
    return rounded


def compare_merged(args, peft_model, ids, peft_logits, ours_logits):
    """The merged folder in transformers against PEFT's own merge, and against our logits."""
    parameters = dict(peft_model.named_parameters(remove_duplicate=False))
    rounded = check_merged(args.base, args.merged, {name: value.detach().clone() for name, value in parameters.items()})
    merged = logits_of(load_base(args.merged), ids)
    report(True, "transformers loads the merged model without a warning")
    exact = all(tensor.dtype == torch.float32 for tensor in stored_tensors(args.merged).values())
    tolerance = args.tolerance if exact else args.rounded_tolerance
    for name, value in rounded.items():
        parameters[name].data.copy_(value)
    compare("merged model against PEFT's merge in the same dtype", merged, logits_of(peft_model, ids), tolerance)
    if exact and ours_logits is not None:
        compare("merged model against our logits", merged, ours_logits, tolerance)
    cost = (merged - peft_logits).abs().max().item()
    print(f"     merged model against the adapter in PEFT: largest difference {cost:.3e}{'' if exact else ' (what rounding the merged weights costs)'}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("--ours", type=Path)
    parser.add_argument("--merged", type=Path)
    parser.add_argument("--tolerance", type=float, default=2e-4, help="|a - b| <= X (1 + |b|), same weights (default %(default)s)")
    parser.add_argument("--rounded-tolerance", type=float, default=2e-2, help="the same where merged weights are stored rounded (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    ours = load_file(args.ours) if args.ours else {}
    base = load_base(args.base)
    fixed = torch.arange(64)[None] * 7919 % base.config.vocab_size
    ids = ours.get("input_ids", fixed).long()
    ids = ids[None] if ids.dim() == 1 else ids
    plain = logits_of(base, ids)
    with Strict():
        model = PeftModel.from_pretrained(base, args.adapter).eval()
    report(True, "PEFT loads the adapter without a warning")
    check_file(model, args.adapter)
    peft = logits_of(model, ids)
    print(f"     the adapter moves the logits by up to {(peft - plain).abs().max().item():.3e}")
    if ours:
        ours_logits = ours["logits"].float()
        ours_logits = ours_logits[None] if ours_logits.dim() == 2 else ours_logits
        compare("our logits against PEFT", ours_logits, peft, args.tolerance)
    if args.merged:
        compare_merged(args, model.merge_and_unload().eval(), ids, peft, ours_logits if ours else None)
    if failures:
        sys.exit(f"{len(failures)} checks failed")
    print("all checks passed")


if __name__ == "__main__":
    main()
