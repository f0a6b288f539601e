"""The memory-bound kernels with the host's part, and their checks against float64: each `check_*` takes a machine and
sizes, makes fresh inputs and poisoned outputs and returns {name: relative error}."""

import ctypes

import torch

from attention import error

BASE = ["common.cu", "elements.cu"]


def _defines(dtype, **sizes):
    return [*(["FLOAT32"] if dtype == torch.float32 else []), *(f"{k}={v}" for k, v in sizes.items())]


def strided(rows, columns, spare, device, dtype, fill=None):
    """A [rows, columns] view of rows that are `spare` longer: random, or all `fill`."""
    whole = torch.randn(rows, columns + spare, device=device, dtype=torch.float32).to(dtype)
    if fill is not None:
        whole.fill_(fill)
    return whole, whole[:, :columns]


def untouched(whole, columns):
    assert whole[:, columns:].isnan().all(), "wrote into the spare columns"


def same_twice(run):
    """Runs twice and compares every bit of what `run` returns."""
    for a, b in zip(run(), run()):
        assert torch.equal(a, b) or (a.isnan().all() and b.isnan().all()), "two runs differ"


def row_threads(dim):
    threads = 32
    while dim > threads * 32:
        threads *= 2
    return threads


def norm_backward_grid(machine, rows, dim):
    per_block = max(1, 256 // row_threads(dim))
    return min(-(-rows // per_block), 8 * machine.multiprocessors)


def norm_grids(rows, dim):
    threads = row_threads(dim)
    return -(-rows // max(1, 256 // threads)), max(256, threads)


def check_norm(machine, rows, dim, dtype, residual=True, spare=64):
    nan = float("nan")
    dev, eps = machine.device, 1e-6
    module = machine.module([*BASE, "norm.cu"], _defines(dtype, DIM=dim))
    small = machine.module([*BASE, "small.cu"], _defines(dtype))
    x, r, dy, dr = (torch.randn(rows, dim, device=dev).to(dtype) for _ in range(4))
    w = torch.randn(dim, device=dev).to(dtype)
    h = torch.full((rows, dim), nan, device=dev, dtype=dtype)
    whole, y = strided(rows, dim, spare, dev, dtype, nan)
    grid, block = norm_grids(rows, dim)
    arg = r if residual else None
    module.launch("rms_norm_forward", grid, block, 0, x, arg, w, h if residual else None, y, dim, dim, dim, dim + spare, rows, eps)
    machine.synchronize()
    untouched(whole, dim)
    errors = {}
    if residual:
        assert torch.equal(h, x + r), "h isn't x + residual"
    else:
        h = x
    hd, wd = h.double().requires_grad_(), w.double().requires_grad_()
    want = hd * (hd.square().mean(1, keepdim=True) + eps).rsqrt() * wd
    errors["y"] = error(y, want.detach())
    want.backward(dy.double())
    for kind in ("plain", "weight"):
        dx = torch.full((rows, dim), nan, device=dev, dtype=dtype)
        blocks = norm_backward_grid(machine, rows, dim)
        partials = torch.full((blocks, dim), nan, device=dev)
        dw = torch.full((dim,), nan, device=dev)
        args = [h, w, dy, dr if residual else None, dx] + ([partials] if kind == "weight" else [])
        name = "rms_norm_backward" + ("_weight" if kind == "weight" else "")

        def run():
            module.launch(name, blocks, block, 0, *args, dim, dim, dim, dim, rows, eps)
            if kind == "weight":
                small.launch("sum_partials", -(-dim // 32), 256, 0, partials, dw, blocks, dim, 0)
            machine.synchronize()
            return dx.clone(), dw.clone()

        same_twice(run)
        errors[f"dx {kind}"] = error(dx, hd.grad + (dr.double() if residual else 0))
        if kind == "weight":
            errors["dw"] = error(dw, wd.grad)
    return errors


def check_qk(machine, tokens, dim, q_heads, k_heads, dtype, norm=True):
    nan, dev, eps = float("nan"), machine.device, 1e-6
    module = machine.module([*BASE, "qk_norm_rope.cu"], _defines(dtype, HEAD_DIM=dim))
    small = machine.module([*BASE, "small.cu"], _defines(dtype))
    width = (q_heads + 2 * k_heads) * dim
    _, qkv = strided(tokens, width, 64, dev, dtype)
    qw, kw = (torch.randn(dim, device=dev).to(dtype) for _ in range(2))
    angle = torch.rand(tokens, dim // 2, device=dev, dtype=torch.float64) * 6.28
    cos, sin = (torch.cat([f(angle)] * 2, 1).float() for f in (torch.cos, torch.sin))
    wq, q = strided(tokens, q_heads * dim, 64, dev, dtype, nan)
    wk, k = strided(tokens, k_heads * dim, 64, dev, dtype, nan)
    weights = (qw, kw) if norm else (None, None)
    strides = [qkv.stride(0), dim]
    module.launch("qk_norm_rope_forward", -(-tokens // 8), 256, 0, qkv, *weights, cos, sin, q, k, *strides, q.stride(0),
                  k.stride(0), tokens, q_heads, k_heads, eps)  # fmt: skip
    machine.synchronize()
    untouched(wq, q_heads * dim)
    untouched(wk, k_heads * dim)

    x = qkv.double().detach().requires_grad_()
    qwd, kwd = (w.double().requires_grad_() for w in (qw, kw))

    def rotate(heads, w):
        if norm:
            heads = heads * (heads.square().mean(-1, keepdim=True) + eps).rsqrt() * w
        half = torch.cat([-heads[..., dim // 2 :], heads[..., : dim // 2]], -1)
        return heads * cos.double()[:, None] + half * sin.double()[:, None]

    heads = x.unflatten(1, (-1, dim))
    want_q, want_k = rotate(heads[:, :q_heads], qwd), rotate(heads[:, q_heads : q_heads + k_heads], kwd)
    errors = {"q": error(q, want_q.detach().flatten(1)), "k": error(k, want_k.detach().flatten(1))}
    _, dq = strided(tokens, q_heads * dim, 64, dev, dtype)
    _, dk = strided(tokens, k_heads * dim, 0, dev, dtype)
    torch.autograd.backward([want_q, want_k], [dq.double().unflatten(1, (-1, dim)), dk.double().unflatten(1, (-1, dim))])
    written = (q_heads + k_heads) * dim
    for kind in ("plain", "weight") if norm else ("plain",):
        whole, dqkv = strided(tokens, width, 64, dev, dtype, nan)
        blocks = min(-(-tokens // 8), 8 * machine.multiprocessors)
        partials, dw = torch.full((blocks, 2 * dim), nan, device=dev), torch.full((2 * dim,), nan, device=dev)
        args = [qkv, *weights, cos, sin, dq, dk, dqkv] + ([partials] if kind == "weight" else [])

        def run():
            module.launch("qk_norm_rope_backward" + ("_weight" if kind == "weight" else ""), blocks, 256, 0, *args, *strides,
                          dq.stride(0), dk.stride(0), dqkv.stride(0), tokens, q_heads, k_heads, eps)  # fmt: skip
            if kind == "weight":
                small.launch("sum_partials", -(-2 * dim // 32), 256, 0, partials, dw, blocks, 2 * dim, 0)
            machine.synchronize()
            return dqkv[:, :written].clone(), dw.clone()

        same_twice(run)
        untouched(whole, written)
        errors[f"dx {kind}"] = error(dqkv[:, :written], x.grad[:, :written])
        if kind == "weight":
            errors["dw"] = error(dw, torch.cat([qwd.grad, kwd.grad]))
    return errors


def check_swiglu(machine, rows, features, dtype, spare=64):
    nan, dev = float("nan"), machine.device
    module = machine.module([*BASE, "swiglu.cu"], _defines(dtype, FEATURES=features))
    gu = (torch.randn(rows, 2 * features, device=dev) * 2).to(dtype)
    d = torch.randn(rows, features, device=dev).to(dtype)
    whole, y = strided(rows, features, spare, dev, dtype, nan)
    grid = -(-rows * features // 2048)
    module.launch("swiglu_forward", grid, 256, 0, gu, gu[:, features:], y, 2 * features, y.stride(0), rows)
    again, z = strided(rows, features, spare, dev, dtype, nan)
    dgu = torch.full_like(gu, nan)
    module.launch("swiglu_backward", grid, 256, 0, gu, gu[:, features:], d, dgu, dgu[:, features:], z, 2 * features, features,
                  2 * features, z.stride(0), rows)  # fmt: skip
    machine.synchronize()
    untouched(whole, features)
    untouched(again, features)
    x = gu.double().requires_grad_()
    want = torch.nn.functional.silu(x[:, :features]) * x[:, features:]
    want.backward(d.double())
    return {"y": error(y, want.detach()), "y again": error(z, want.detach()), "dx": error(dgu, x.grad)}


CE_THREADS = 1024


def kept_chunks(vocab, dtype, blocks=1024 // CE_THREADS):
    """As many chunks as fit the shared memory of each of `blocks` blocks."""
    return min(-(-vocab // 8), (216 << 10) // blocks // (8 * dtype.itemsize))


def check_cross_entropy(machine, rows, vocab, dtype, kept=None):
    dev = machine.device
    module = machine.module([*BASE, "cross_entropy.cu"], _defines(dtype, CE_THREADS=CE_THREADS))
    stride = -(-vocab // 8) * 8 + 8
    logits = (torch.randn(rows, stride, device=dev) * 3).to(dtype)
    targets = torch.randint(0, vocab, (rows,), device=dev, dtype=torch.int32)
    targets[rows // 2] = -100
    targets[0] = vocab - 1
    x = logits[:, :vocab].double().requires_grad_()
    lse = x.logsumexp(1)
    picked = x.gather(1, targets.clamp_min(0).long()[:, None])[:, 0]
    want = torch.where(targets >= 0, lse - picked, torch.zeros_like(lse))
    want.sum().backward()
    loss, out_lse = (torch.full((rows,), float("nan"), device=dev) for _ in range(2))
    kept = kept_chunks(vocab, dtype) if kept is None else kept
    before = logits.clone()

    def run():
        logits.copy_(before)
        module.launch("cross_entropy", min(rows, 1024 // CE_THREADS * machine.multiprocessors), CE_THREADS, kept * 8 * dtype.itemsize, logits, targets, loss,
                  out_lse, stride, rows, vocab, kept, 0.5)  # fmt: skip
        machine.synchronize()
        return logits.clone(), loss.clone()

    same_twice(run)
    return {"loss": error(loss, want.detach()), "lse": error(out_lse, lse.detach()), "dx": error(logits[:, :vocab], x.grad * 0.5)}


class Piece(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint64) for n in ("parameter", "m", "v", "grad", "copy")] + [
        ("count", ctypes.c_int), ("weight_decay", ctypes.c_float), ("first", ctypes.c_uint32), ("rounding", ctypes.c_uint32),
    ]  # fmt: skip


class Adam(ctypes.Structure):
    _fields_ = [(n, ctypes.c_float) for n in ("lr", "beta1", "beta2", "eps", "bias1", "root_bias2", "factor", "max_norm")]


def piece_table(tensors, size, device):
    """tensors: (parameter, m, v, grad, copy or None, weight_decay); pieces of at most `size` elements."""
    pieces = []
    for number, (*parts, decay) in enumerate(tensors):
        for first in range(0, parts[0].numel(), size):
            at = [0 if p is None else p.data_ptr() + first * p.element_size() for p in parts]
            pieces.append(Piece(*at, min(size, parts[0].numel() - first), decay, first, number))
    raw = bytes((Piece * len(pieces))(*pieces))
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8).to(device), len(pieces)


def check_optimizer(machine, sizes, gradient=torch.float32, moments=torch.float32, size=8192, steps=3):
    dev = machine.device
    names = {"GRADIENT_BF16": gradient, "MOMENTS_BF16": moments}
    module = machine.module([*BASE, "optimizer.cu"], [k for k, v in names.items() if v == torch.bfloat16])
    lr, betas, eps, factor, max_norm = 1e-2, (0.9, 0.99), 1e-8, 0.25, 1.0
    state, reference = [], []
    for i, n in enumerate(sizes):
        p = torch.randn(n, device=dev)
        m, v = (torch.zeros(n, device=dev, dtype=moments) for _ in range(2))
        copy = torch.full((n,), float("nan"), device=dev, dtype=torch.bfloat16) if i % 2 else None
        decay = 0.1 * (i % 3)
        grad = torch.empty(n, device=dev, dtype=gradient)
        state.append((p, m, v, grad, copy, decay))
        reference.append(p.double().clone().requires_grad_())
    groups = [{"params": [r], "weight_decay": s[-1]} for r, s in zip(reference, state)]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps)
    table, n = piece_table(state, size, dev)
    partials = torch.full((n,), float("nan"), device=dev)
    finished, squares = torch.zeros(1, dtype=torch.int32, device=dev), torch.full((1,), float("nan"), device=dev)
    errors = {}
    for k in range(1, steps + 1):
        for s, r in zip(state, reference):
            s[3].copy_(torch.randn(s[3].shape, device=dev))
            r.grad = s[3].double() * factor
        want = sum(s[3].double().square().sum() for s in state)
        torch.nn.utils.clip_grad_norm_(reference, max_norm)
        optimizer.step()

        def run():
            module.launch("sum_squares", n, 256, 0, table, partials, finished, squares)
            machine.synchronize()
            return (squares.clone(),)

        same_twice(run)
        a = Adam(lr, *betas, eps, 1 - betas[0] ** k, (1 - betas[1] ** k) ** 0.5, factor, max_norm)
        module.launch("adamw", n, 256, 0, table, squares, a)
        machine.synchronize()
        assert finished.item() == 0
        errors["squares"] = max(errors.get("squares", 0), error(squares, want[None]))
    errors["p"] = max(error(s[0], r.detach()) for s, r in zip(state, reference))
    errors["copy"] = max([error(s[4], r.detach()) for s, r in zip(state, reference) if s[4] is not None], default=0.0)
    before = [s[0].clone() for s in state]
    state[0][3][0] = float("inf")
    module.launch("sum_squares", n, 256, 0, table, partials, finished, squares)
    module.launch("adamw", n, 256, 0, table, squares, a)
    machine.synchronize()
    assert all(torch.equal(a, s[0]) for a, s in zip(before, state)), "an infinite gradient changed parameters"
    return errors


def check_gradients(machine, sizes, gradient, size=8192):
    """put_gradients, add_gradients and round_parameters, bit for bit."""
    dev, defines = machine.device, ["GRADIENT_BF16"] if gradient == torch.bfloat16 else []
    module = machine.module([*BASE, "optimizer.cu"], defines)
    nan = lambda n, dtype: torch.full((n,), float("nan"), device=dev, dtype=dtype)
    state = [(nan(n, torch.float32), None, None, torch.randn(n, device=dev).to(gradient), nan(n, torch.bfloat16), 0.0) for n in sizes]
    table, n = piece_table(state, size, dev)
    module.launch("put_gradients", n, 256, 0, table)
    machine.synchronize()
    assert all(torch.equal(s[0], s[3].float()) for s in state), "put_gradients"
    first = [s[0].clone() for s in state]
    for s in state:
        s[3].copy_(torch.randn(s[3].shape, device=dev))
    module.launch("add_gradients", n, 256, 0, table)
    module.launch("round_parameters", n, 256, 0, table)
    machine.synchronize()
    assert all(torch.equal(s[0], f + s[3].float()) for s, f in zip(state, first)), "add_gradients"
    assert all(torch.equal(s[4], s[0].bfloat16()) for s in state), "round_parameters"
    return {"sum": 0.0}


def check_embedding(machine, tokens, vocab, dim, dtype):
    dev = machine.device
    module = machine.module([*BASE, "embedding.cu"], _defines(dtype))
    ids = (torch.rand(tokens, device=dev) ** 3 * vocab).long()
    d = torch.randn(tokens, dim, device=dev).to(dtype)
    want = torch.zeros(vocab, dim, device=dev, dtype=torch.float64).index_add(0, ids, d.double())
    tokens_of, dw = ids.int(), torch.empty(vocab, dim, device=dev, dtype=dtype)

    def run():
        dw.zero_()
        module.launch("embedding_gradient", tokens * -(-dim // 2048), 256, 0, d, tokens_of, dw, dim, tokens, dim)
        machine.synchronize()
        return (dw.clone(),)

    same_twice(run)
    return {"dw": error(dw, want)}


def check_small(machine, dtype):
    """copy_block into the spare columns of a weight, and sum_values."""
    dev, out, width, rank = machine.device, 37, 64, 16
    small, module = (machine.module([*BASE, n], _defines(dtype)) for n in ("small.cu", "optimizer.cu"))
    b = torch.randn(out, rank, device=dev)
    whole = torch.full((out, width + rank), float("nan"), device=dev, dtype=dtype)
    small.launch("copy_block", -(-out * rank // 2048), 256, 0, b, whole[:, width:], rank, width + rank, out, rank, 0.5)
    values, total = torch.randn(1001, device=dev), torch.ones(1, device=dev)
    module.launch("sum_values", 1, 256, 0, values, total, 1001, 1)
    machine.synchronize()
    assert whole[:, :width].isnan().all(), "wrote into the weight"
    return {"block": error(whole[:, width:], b * 0.5), "sum": error(total, values.double().sum()[None] + 1)}


def check_next_token(machine, dim, heads, group, seen, dtype):
    """Twice on fresh copies of the cache: the output, the new row in its place, and nothing else changed."""
    dev, nan = machine.device, float("nan")
    module = machine.module([*BASE, "next_token.cu"], _defines(dtype, HEAD_DIM=dim))
    width = heads // group * dim
    q = (torch.randn(heads * dim, device=dev) * 2).to(dtype)
    k, v = (torch.randn(width, device=dev).to(dtype) for _ in range(2))
    before = [torch.randn(seen + 3, width, device=dev).to(dtype) for _ in range(2)]
    for x in before:
        x[seen:] = nan

    def run():
        keys, values = (x.clone() for x in before)
        out = torch.full((heads * dim,), nan, device=dev, dtype=dtype)
        module.launch("next_token_attention", heads, 512, 0, q, k, v, keys, values, out, width, seen, group, dim**-0.5)
        machine.synchronize()
        for new, old, row in ((keys, before[0], k), (values, before[1], v)):
            assert torch.equal(new[:seen], old[:seen]) and torch.equal(new[seen], row), "the cache"
            assert new[seen + 1 :].isnan().all(), "wrote behind the new row"
        return out, keys[: seen + 1], values[: seen + 1]

    same_twice(run)
    out, keys, values = run()
    at = lambda x: x.double().view(seen + 1, heads // group, dim).repeat_interleave(group, 1)
    scores = torch.einsum("hd,thd->ht", q.double().view(heads, dim), at(keys)) * dim**-0.5
    want = torch.einsum("ht,thd->hd", scores.softmax(1), at(values))
    return {"y": error(out.view(heads, dim), want)}


def limit(name, dtype):
    if name != "copy" and dtype == torch.float32 or name in ("loss", "lse", "squares", "p", "sum"):
        return 1e-5
    return 5e-3


def suite(machine, small):
    """(label, errors, dtype) of every case; `small` for the emulated machine."""
    bf16, f32 = torch.bfloat16, torch.float32
    scale = 1 if small else 50
    for dtype in (bf16, f32):
        for dim in (64, 576, 1024, 2048, 4096) if not small else (64, 576, 2048):
            yield f"norm {dim}", check_norm(machine, 21 * scale, dim, dtype), dtype
        yield "norm, no residual", check_norm(machine, 13, 1024, dtype, residual=False, spare=0), dtype
        for dim, h, g in ((128, 16, 8), (64, 9, 3), (64, 14, 2), (128, 5, 1)):
            yield f"qk {dim} {h}/{g}", check_qk(machine, 19 * scale, dim, h, g, dtype), dtype
        yield "rope alone", check_qk(machine, 11, 128, 4, 2, dtype, norm=False), dtype
        for f in (1536, 3072) if not small else (264,):
            yield f"swiglu {f}", check_swiglu(machine, 17 * scale, f, dtype), dtype
        for v in (49152, 151936, 1003) if not small else (1003, 9000):
            yield f"cross-entropy {v}", check_cross_entropy(machine, 5 * scale, v, dtype), dtype
        yield "cross-entropy, nothing kept", check_cross_entropy(machine, 3, 2056, dtype, kept=0), dtype
        yield "small", check_small(machine, dtype), dtype
        for dim, h, group, seen in ((128, 16, 2, 300), (64, 9, 3, 0), (64, 14, 7, 63), (128, 4, 4, 33 * scale)):
            yield f"next token {dim} {h}/{h // group} after {seen}", check_next_token(machine, dim, h, group, seen, dtype), dtype
        yield "embedding", check_embedding(machine, 300 * scale, 97, 576, dtype), dtype
    sizes = [1024, 7, 8192 * 2 + 5, 4096, 33] + ([] if small else [3_000_000])
    yield "adamw", check_optimizer(machine, sizes), f32
    yield "adamw, bf16 gradients", check_optimizer(machine, sizes, gradient=bf16), bf16
    for gradient in (f32, bf16):
        yield "gradients put and added", check_gradients(machine, sizes, gradient), gradient
    # bf16 moments are compared loosely: the parameter has moved by 3 steps of lr only.
    yield "adamw, bf16 moments", {"moments": check_optimizer(machine, sizes, moments=bf16)["p"]}, bf16
