"""What cuBLASLt offers for a product, timed on a card: `python products.py [first]` (`first`: its first choice alone).

Row-major `out[m, n] = a[m, k] · b[k, n] (+ c)`, bf16, or f32 out; `t` behind a or b: it lies transposed. The strides are
those of the layer op. cuBLASLt counts columns first, so it sees outᵀ = bᵀ · aᵀ, as in `src/ops/cuda/gemm.rs`.
"""

import ctypes
import sys

import torch

lt = ctypes.CDLL("libcublasLt.so")
BF16, F32, WORKSPACE = 14, 0, 64 << 20
P = ctypes.c_void_p


class Result(ctypes.Structure):
    _fields_ = [("algo", ctypes.c_uint64 * 8), ("workspace", ctypes.c_size_t), ("status", ctypes.c_int),
                ("waves", ctypes.c_float), ("reserved", ctypes.c_int * 4)]  # fmt: skip


def ok(status):
    assert status == 0, status


def layout(rows, columns, stride, dtype):
    x = P()
    ok(lt.cublasLtMatrixLayoutCreate(ctypes.byref(x), dtype, ctypes.c_uint64(columns), ctypes.c_uint64(rows), ctypes.c_int64(stride)))
    return x


def setter(function, x, attribute, value):
    ok(function(x, attribute, ctypes.byref(value), ctypes.sizeof(value)))


handle = P()
ok(lt.cublasLtCreate(ctypes.byref(handle)))
workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device="cuda")


def config(algo, attribute):
    value, written = ctypes.c_int32(), ctypes.c_size_t()
    lt.cublasLtMatmulAlgoConfigGetAttribute(ctypes.byref(algo), attribute, ctypes.byref(value), 4, ctypes.byref(written))
    return value.value


def survey(name, m, n, k, ta=False, tb=False, sa=None, sb=None, so=None, add=False, f32=False, most=24, repeat=10):
    """Times the ways that cuBLASLt names, best guess first."""
    shapes = [(k, m) if ta else (m, k), (n, k) if tb else (k, n), (m, n), (m, n)]
    strides = [s or shape[1] for s, shape in zip((sa, sb, so, so), shapes)]
    make = lambda shape, stride: torch.randn(shape[0], stride, device="cuda", dtype=torch.bfloat16)
    a, b = (make(shape, stride) for shape, stride in zip(shapes[:2], strides[:2]))
    out = torch.empty(m, strides[3], device="cuda", dtype=torch.float32 if f32 else torch.bfloat16)
    c = torch.randn_like(out) if add else out
    kind = F32 if f32 else BF16
    la, lb = (layout(*shape, stride, BF16) for shape, stride in zip(shapes[:2], strides[:2]))
    lc, lo = (layout(m, n, strides[3], kind) for _ in range(2))
    desc, preference = P(), P()
    ok(lt.cublasLtMatmulDescCreate(ctypes.byref(desc), 68, F32))
    setter(lt.cublasLtMatmulDescSetAttribute, desc, 3, ctypes.c_int32(tb))
    setter(lt.cublasLtMatmulDescSetAttribute, desc, 4, ctypes.c_int32(ta))
    ok(lt.cublasLtMatmulPreferenceCreate(ctypes.byref(preference)))
    setter(lt.cublasLtMatmulPreferenceSetAttribute, preference, 1, ctypes.c_size_t(WORKSPACE))
    results, found = (Result * most)(), ctypes.c_int()
    ok(lt.cublasLtMatmulAlgoGetHeuristic(handle, desc, lb, la, lc, lo, preference, most, results, ctypes.byref(found)))
    alpha, beta = ctypes.c_float(1), ctypes.c_float(1 if add else 0)
    stream = P(torch.cuda.current_stream().cuda_stream)
    rows = []
    for n_th, result in enumerate(results[: found.value]):
        def run():
            ok(lt.cublasLtMatmul(handle, desc, ctypes.byref(alpha), P(b.data_ptr()), lb, P(a.data_ptr()), la, ctypes.byref(beta),
                                 P(c.data_ptr()), lc, P(out.data_ptr()), lo, ctypes.byref(result.algo), P(workspace.data_ptr()),
                                 ctypes.c_size_t(WORKSPACE), stream))  # fmt: skip
        times = []
        for _ in range(repeat):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        ms = sorted(times)[len(times) // 2]
        rows.append((ms, n_th, *(config(result.algo, i) for i in (0, 1, 6, 2, 3)), result.workspace >> 20, result.waves))
    flops = 2 * m * n * k / 1e9
    first = rows[0]
    show = lambda r: f"{r[0]:.3f} ms {flops / r[0]:4.0f} TFLOP/s  #{r[1]} algo {r[2]} tile {r[3]} stages {r[4]} split {r[5]}/{r[6]} ws {r[7]} waves {r[8]:.2f}"
    print(f"{name} {m} × {n} × {k}: first {show(first)}")
    for row in sorted(rows)[:3]:
        print("      ", show(row))
    sys.stdout.flush()


T, most = 32768, 1 if "first" in sys.argv else 24
A = dict(tb=True, most=most)
G = dict(most=most)
W = dict(ta=True, f32=True, most=most)
survey("x·Aᵀ qkv", T, 48, 1024, sa=1088, sb=1088, so=1088, **A)
survey("x·Aᵀ qkv", T, 64, 1024, sa=1088, sb=1088, so=1088, **A)
survey("x·Aᵀ o", T, 16, 2048, sa=2112, sb=2112, so=2112, **A)
survey("x·Aᵀ o", T, 64, 2048, sa=2112, sb=2112, so=2112, **A)
survey("x·Aᵀ gu", T, 32, 1024, sa=1088, sb=1088, so=1088, **A)
survey("x·Aᵀ down", T, 16, 3072, sa=3136, sb=3136, so=3136, **A)
survey("x·Aᵀ down", T, 64, 3072, sa=3136, sb=3136, so=3136, **A)
survey("g·B qkv", T, 48, 4096, sa=4160, sb=1088, so=4160, **G)
survey("g·B qkv", T, 64, 4096, sa=4160, sb=1088, so=4160, **G)
survey("g·B o", T, 16, 1024, sa=1088, sb=2112, so=1088, **G)
survey("g·B o", T, 64, 1024, sa=1088, sb=2112, so=1088, **G)
survey("g·B gu", T, 32, 6144, sa=6208, sb=1088, so=6208, **G)
survey("g·B down", T, 16, 1024, sa=1088, sb=3136, so=1088, **G)
survey("dA qkv", 48, 1024, T, sa=4160, sb=1088, **W)
survey("dA o", 16, 2048, T, sa=1088, sb=2112, **W)
survey("dA gu", 32, 1024, T, sa=6208, sb=1088, **W)
survey("dA down", 16, 3072, T, sa=1088, sb=3136, **W)
survey("dB q", 2048, 16, T, sa=4160, sb=1088, **W)
survey("dB k", 1024, 16, T, sa=4160, sb=1088, **W)
survey("dB gate", 3072, 16, T, sa=6208, sb=1088, **W)
survey("dB gu, both at once", 6144, 32, T, sa=6208, sb=1088, **W)
survey("dB qkv, all at once", 4096, 48, T, sa=4160, sb=1088, **W)
for k in (1024, 1072, 1088):
    survey("qkv", T, 4096, k, sa=1088, sb=1088, **A)
for k in (1024, 1056, 1088):
    survey("gate up", T, 6144, k, sa=1088, sb=1088, **A)
for k in (2048, 2064, 2112):
    survey("o + x", T, 1024, k, sa=2112, sb=2112, add=True, **A)
survey("o", T, 1024, 2064, sa=2112, sb=2112, **A)
survey("o", T, 1024, 2112, sa=2112, sb=2112, **A)
for k in (3088, 3136):
    survey("down + x", T, 1024, k, sa=3136, sb=3136, add=True, **A)
survey("down", T, 1024, 3088, sa=3136, sb=3136, **A)
for k in (4096, 4144, 4160):
    survey("d qkv", T, 1024, k, sa=4160, sb=1088, **G)
for k in (6144, 6176, 6208):
    survey("d gate up", T, 1024, k, sa=6208, sb=1088, **G)
for k in (1024, 1040, 1088):
    survey("d o", T, 2048, k, sa=1088, sb=2112, **G)
for k in (1024, 1040, 1088):
    survey("d down", T, 3072, k, sa=1088, sb=3136, **G)
for rows in (4096, 6656, 8192, 16384):
    survey("head", rows, 151936, 1024, **A)
    survey("d head", rows, 1024, 151936, **G)
