"""Compiles all modules of check.py and bench.py into the cache, in parallel. `python precompile.py [arch]`."""

import sys
from concurrent.futures import ProcessPoolExecutor

import machines

ATTENTION = {
    "mma": ["common.cu", "attention_work.cu", "attention.cu"],
    "wgmma": ["common.cu", "hopper.cu", "attention_work.cu", "attention_sm90.cu"],
}
BASE = ["common.cu", "elements.cu"]


def modules(arch):
    for dim in (64, 128):
        yield ATTENTION["mma"], [f"HEAD_DIM={dim}", "STAGES=2"]
        if arch == "sm_90a":
            yield ATTENTION["wgmma"], [f"HEAD_DIM={dim}"]
    for f32 in ([], ["FLOAT32"]):
        for dim in (64, 576, 1024, 2048, 4096):
            yield [*BASE, "norm.cu"], [*f32, f"DIM={dim}"]
        for dim in (64, 128):
            yield [*BASE, "qk_norm_rope.cu"], [*f32, f"HEAD_DIM={dim}"]
            yield [*BASE, "next_token.cu"], [*f32, f"HEAD_DIM={dim}"]
        for f in (1536, 3072):
            yield [*BASE, "swiglu.cu"], [*f32, f"FEATURES={f}"]
        for name in ("small.cu", "optimizer.cu"):
            yield [*BASE, name], f32
        yield [*BASE, "cross_entropy.cu"], [*f32, "CE_THREADS=1024"]
    for d in (["GRADIENT_BF16"], ["MOMENTS_BF16"]):
        yield [*BASE, "optimizer.cu"], d


def one(job):
    machines.cubin(*job)


def main():
    arch = sys.argv[1] if len(sys.argv) > 1 else "sm_90a"
    jobs = [(files, defines, arch) for files, defines in modules(arch)]
    with ProcessPoolExecutor() as pool:
        list(pool.map(one, jobs))
    print(f"{len(jobs)} modules for {arch}")


if __name__ == "__main__":
    main()
