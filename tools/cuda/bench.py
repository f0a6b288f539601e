"""Times the kernels with events: `python bench.py [attention] [elementwise] [peers]` on a machine with a card.

Attention's TFLOP/s count 4 · d · h · Σ length² / 2 for the forward and 2.5 times that for the backward, whatever is
computed; the other kernels' TB/s count each input read once and each output written once.
"""

import sys

import torch

import attention
import elementwise as ew
import machines

BF16 = torch.bfloat16


def median_ms(run, repeats=9):
    for _ in range(2):
        run()
    torch.cuda._sleep(4_000_000)  # so that the launches queue up and the host isn't timed
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for start, end in marks:
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in marks)[repeats // 2]


SHAPES = [
    ("8 × 4096", 128, [4096] * 8, 16, 2),
    ("2 × 16384", 128, [16384] * 2, 16, 2),
    ("1 × 65536", 128, [65536], 16, 2),
    ("1 × 4096", 128, [4096], 16, 2),
    ("94 × 350", 128, [350] * 94, 16, 2),
    ("8 × 4096, 32/8 heads", 128, [4096] * 8, 32, 4),
    ("8 × 4096, d 64, 14/2", 64, [4096] * 8, 14, 7),
]


def flops(dim, lengths, heads):
    return 4 * dim * heads * sum(n * n / 2 for n in lengths) / 1e9  # per ms = TFLOP/s


def bench_attention(machine, shapes=SHAPES):
    print(f"{'attention':22} {'variant':18} {'fwd':>7} {'stats':>6} {'dq':>7} {'dkdv':>7} ms   TFLOP/s: {'fwd':>5} {'bwd':>5} {'both':>5}")
    for label, dim, lengths, heads, group in shapes:
        tokens, scale = sum(lengths), dim**-0.5
        q, k, v, d_out = attention.inputs(machine, dim, tokens, heads, group)
        out, dq = (torch.empty(tokens, heads, dim, device="cuda", dtype=BF16) for _ in range(2))
        dk, dv = (torch.empty(tokens, heads // group, dim, device="cuda", dtype=BF16) for _ in range(2))
        lse = torch.empty(heads, tokens, device="cuda")
        work = flops(dim, lengths, heads)
        for kind in ("mma", "wgmma") if machine.arch == "sm_90a" else ("mma",):
            if kind == "mma" and tokens > 60000:
                continue
            try:
                run = attention.Attention(machine, dim, lengths, heads, group, kind)
                forward = median_ms(lambda: run.forward(q, k, v, out, lse, scale))
                stats = median_ms(lambda: run.prepare(out, d_out, lse))
                a = median_ms(lambda: run.d_query(q, k, v, d_out, dq, scale))
                b = median_ms(lambda: run.d_key_value(q, k, v, d_out, dk, dv, scale))
            except RuntimeError as error:
                print(f"{label:22} {kind:18} {error}")
                continue
            backward = stats + a + b
            print(f"{label:22} {kind:18} {forward:7.3f} {stats:6.3f} {a:7.3f} {b:7.3f}               "
                  f"{work / forward:5.0f} {2.5 * work / backward:5.0f} {3.5 * work / (forward + backward):5.0f}", flush=True)  # fmt: skip


def bench_peers(shapes=SHAPES):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    for label, dim, lengths, heads, group in shapes:
        b, n = len(lengths), lengths[0]
        make = lambda h: torch.randn(b, n, h, dim, device="cuda", dtype=BF16).transpose(1, 2).requires_grad_()
        q, k, v, g = make(heads), make(heads // group), make(heads // group), make(heads).detach()
        work = flops(dim, lengths, heads)
        for name, backend in (("FlashAttention", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
            try:
                with sdpa_kernel(backend):
                    call = lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
                    with torch.no_grad():
                        forward = median_ms(call, 5)
                    out = call()
                    backward = median_ms(lambda: torch.autograd.grad(out, (q, k, v), g, retain_graph=True), 5)
                print(f"{label:22} {name:18} {forward:7.3f} {'':14} {backward:7.3f}               "
                      f"{work / forward:5.0f} {2.5 * work / backward:5.0f} {3.5 * work / (forward + backward):5.0f}", flush=True)  # fmt: skip
            except RuntimeError as error:
                print(f"{label:22} {name:18} {str(error)[:80]}")


def show(label, ms, megabytes):
    print(f"{label:44} {ms:7.3f} ms {megabytes / ms / 1e3:6.2f} TB/s", flush=True)


def bench_elementwise(machine, t=32768):
    dev, eps = "cuda", 1e-6
    rand = lambda *shape: torch.randn(*shape, device=dev, dtype=BF16)
    a, b = rand(t, 3072), rand(t, 3072)
    show("torch copy", median_ms(lambda: a.copy_(b)), 2 * a.numel() * 2 / 1e6)
    small = machine.module([*ew.BASE, "small.cu"], [])
    for dim in (1024, 4096):
        module = machine.module([*ew.BASE, "norm.cu"], [f"DIM={dim}"])
        x, r, h, dy = (rand(t, dim) for _ in range(4))
        y, w = rand(t, dim + 64), rand(dim)
        grid, block = ew.norm_grids(t, dim)
        mb = t * dim * 2 / 1e6
        stride = y.stride(0)
        show(f"rms_norm {dim}, residual", median_ms(lambda: module.launch("rms_norm_forward", grid, block, 0, x, r, w, h, y, dim, dim, dim, stride, t, eps)), 4 * mb)  # fmt: skip
        show(f"rms_norm {dim}", median_ms(lambda: module.launch("rms_norm_forward", grid, block, 0, x, None, w, None, y, dim, dim, dim, stride, t, eps)), 2 * mb)  # fmt: skip
        show(f"rms_norm {dim} backward, residual", median_ms(lambda: module.launch("rms_norm_backward", grid, block, 0, h, w, dy, r, x, dim, dim, dim, dim, t, eps)), 4 * mb)  # fmt: skip
        n = ew.norm_backward_grid(machine, t, dim)
        partials, dw = torch.empty(n, dim, device=dev), torch.empty(dim, device=dev)
        show(f"  with the weight's gradient, {n} blocks", median_ms(lambda: module.launch("rms_norm_backward_weight", n, block, 0, h, w, dy, r, x, partials, dim, dim, dim, dim, t, eps)), 4 * mb)  # fmt: skip
        show("  sum_partials", median_ms(lambda: small.launch("sum_partials", -(-dim // 32), 256, 0, partials, dw, n, dim, 0)), n * dim * 4 / 1e6)  # fmt: skip
    module = machine.module([*ew.BASE, "qk_norm_rope.cu"], ["HEAD_DIM=128"])
    qkv, dqkv, q, k, qw, kw = rand(t, 4096), rand(t, 4096), rand(t, 2048), rand(t, 1024), rand(128), rand(128)
    cos, sin = (torch.randn(t, 128, device=dev) for _ in range(2))
    mb = t * 3072 * 2 / 1e6
    show("qk_norm_rope 16/8 × 128", median_ms(lambda: module.launch("qk_norm_rope_forward", t // 8, 256, 0, qkv, qw, kw, cos, sin, q, k, 4096, 128, 2048, 1024, t, 16, 8, eps)), 2 * mb + t * 512 / 1e6)  # fmt: skip
    show("  backward", median_ms(lambda: module.launch("qk_norm_rope_backward", t // 8, 256, 0, qkv, qw, kw, cos, sin, q, k, dqkv, 4096, 128, 2048, 1024, 4096, t, 16, 8, eps)), 3 * mb + t * 512 / 1e6)  # fmt: skip
    n = 8 * machine.multiprocessors
    partials = torch.empty(n, 256, device=dev)
    show("  with the weights' gradients", median_ms(lambda: module.launch("qk_norm_rope_backward_weight", n, 256, 0, qkv, qw, kw, cos, sin, q, k, dqkv, partials, 4096, 128, 2048, 1024, 4096, t, 16, 8, eps)), 3 * mb + t * 512 / 1e6)  # fmt: skip
    module = machine.module([*ew.BASE, "swiglu.cu"], ["FEATURES=3072"])
    gu, dgu, d, y = rand(t, 6144), rand(t, 6144), rand(t, 3072), rand(t, 3136)
    mb, grid = t * 3072 * 2 / 1e6, t * 3072 // 2048
    show("swiglu 3072", median_ms(lambda: module.launch("swiglu_forward", grid, 256, 0, gu, gu[:, 3072:], y, 6144, 3136, t)), 3 * mb)
    show("  backward", median_ms(lambda: module.launch("swiglu_backward", grid, 256, 0, gu, gu[:, 3072:], d, dgu, dgu[:, 3072:], None, 6144, 3072, 6144, 3136, t)), 5 * mb)  # fmt: skip
    show("  backward, output again", median_ms(lambda: module.launch("swiglu_backward", grid, 256, 0, gu, gu[:, 3072:], d, dgu, dgu[:, 3072:], y, 6144, 3072, 6144, 3136, t)), 6 * mb)  # fmt: skip
    del gu, dgu, qkv, dqkv, a, b
    rows, vocab = 8192, 151936
    logits = torch.randn(rows, vocab, device=dev, dtype=BF16)
    targets = torch.randint(0, vocab, (rows,), device=dev, dtype=torch.int32)
    loss = torch.empty(rows, device=dev)
    threads, blocks = ew.CE_THREADS, 1024 // ew.CE_THREADS
    module = machine.module([*ew.BASE, "cross_entropy.cu"], [f"CE_THREADS={threads}"])
    for kept in (0, ew.kept_chunks(vocab, BF16)):
        show(f"cross_entropy {rows} × {vocab}, {kept} chunks kept", median_ms(lambda: module.launch("cross_entropy", blocks * machine.multiprocessors, threads, kept * 16, logits, targets, loss, None, vocab, rows, vocab, kept, 1.0)), 2 * rows * vocab * 2 / 1e6)  # fmt: skip
    del logits
    for label, count, size in (("LoRA, 10 M parameters", 10_092_544, 8192), ("0.6 B parameters", 596_049_920, 65536)):
        module = machine.module([*ew.BASE, "optimizer.cu"], [])
        p, m, v, g = (torch.rand(count, device=dev) for _ in range(4))
        copy = torch.empty(count, device=dev, dtype=BF16)
        table, n = ew.piece_table([(p, m, v, g, copy, 0.01)], size, dev)
        partials, finished, squares = torch.empty(n, device=dev), torch.zeros(1, dtype=torch.int32, device=dev), torch.empty(1, device=dev)
        show(f"sum_squares, {label}", median_ms(lambda: module.launch("sum_squares", n, 256, 0, table, partials, finished, squares)), count * 4 / 1e6)  # fmt: skip
        a = ew.Adam(1e-4, 0.9, 0.999, 1e-8, 0.1, 0.03, 1.0, 1.0)
        show(f"adamw, {label}", median_ms(lambda: module.launch("adamw", n, 256, 0, table, squares, a)), count * 30 / 1e6)
        del p, m, v, g, copy
    ids = (torch.rand(t, device=dev) ** 4 * 151936).long()
    counts = torch.unique(ids, return_counts=True)[1]
    module = machine.module([*ew.BASE, "embedding.cu"], [])
    d, dw, ids = rand(t, 1024), torch.zeros(151936, 1024, device=dev, dtype=BF16), ids.int()
    show(f"embedding_gradient, {len(counts)} ids, longest {counts.max().item()}", median_ms(lambda: module.launch("embedding_gradient", t, 256, 0, d, ids, dw, 1024, t, 1024)), (t * 2048 + len(counts) * 2048) / 1e6)  # fmt: skip


if __name__ == "__main__":
    what = sys.argv[1:] or ["attention", "peers", "elementwise"]
    card = machines.Card()
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    if "attention" in what:
        bench_attention(card)
    if "peers" in what:
        bench_peers([SHAPES[i] for i in (0, 1, 4)])
    if "elementwise" in what:
        bench_elementwise(card)
