"""Every kernel against float64 on fresh random inputs. `python check.py` on a machine with a card,
`python check.py --emulate` anywhere (small sizes; g++ and torch are needed, no card, no CUDA).
`--small`: the small sizes on the card, for compute-sanitizer. Words `mma`, `wgmma`, `elementwise` choose."""

import sys
import time

import torch

import attention
import elementwise
import machines

EMULATE = "--emulate" in sys.argv
ONLY = [a for a in sys.argv[1:] if not a.startswith("-")] or ["mma", "wgmma", "elementwise"]
SMALL = EMULATE or "--small" in sys.argv  # for compute-sanitizer


def uneven(limit, total, seed):
    generator = torch.Generator().manual_seed(seed)
    lengths = [1, 2, 63, 64, 65, 127, 128, 129] if limit > 200 else [1, 64, 65]
    while sum(lengths) < total:
        lengths.append(int(torch.randint(1, limit + 1, (1,), generator=generator)))
    return lengths


def attention_cases():
    if SMALL:
        return [(128, [70, 1, 130], 2, 2), (64, [200], 2, 1), (128, [300, 5, 64, 128], 4, 4), (64, [129, 257], 3, 3)]
    cases = [(d, uneven(4096, 6000, d + h + g), h, g) for d in (64, 128) for h, g in ((4, 1), (4, 2), (4, 4), (8, 8), (9, 3))]
    return cases + [(128, [4096, 4096], 16, 2), (128, [1] * 40, 4, 2), (128, [16384], 2, 2)]


def row(label, errors, limits):
    bad = [k for k, v in errors.items() if not v <= limits(k)]
    print(f"{'FAIL' if bad else 'ok  '} {label:34}", " ".join(f"{k} {v:.1e}" for k, v in errors.items()), flush=True)
    return not bad


def main():
    torch.manual_seed(int(time.time()))
    machine = machines.Emulated() if EMULATE else machines.Card()
    good = True
    wgmma = EMULATE or machine.arch == "sm_90a"
    for dim, lengths, heads, group in attention_cases():
        for kind in ("mma", "wgmma") if wgmma else ("mma",):
            if kind not in ONLY:
                continue
            label = f"{kind} {dim} {heads}/{heads // group} {len(lengths)} documents"
            errors = attention.check(machine, kind, dim, lengths, heads, group)
            good &= row(label, errors, attention.LIMITS.__getitem__)
    for label, errors, dtype in [] if "elementwise" not in ONLY else elementwise.suite(machine, SMALL):
        good &= row(f"{label} {str(dtype)[6:]}", errors, lambda name: elementwise.limit(name, dtype))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
