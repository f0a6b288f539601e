"""The attention kernels with the host's part: work lists, statistics, launches. See the .cu files for the contracts."""

import torch

TILE = 128


def work_list(lengths, heads, bytes_per_token, cost, multiprocessors, cache_bytes):
    """Entries (tile, start, length, document · 1024 + head) for `heads` heads of one work item each, in starting order.

    Costly tiles come first, so that the last blocks to finish are short; but pairs of document and head are taken in
    sections whose rows (`bytes_per_token` a pair) fit the cache together, as long as a section is long enough to
    even out: `cost(tile, tiles)`.
    """
    starts, position = [], 0
    for n in lengths:
        starts.append(position)
        position += n
    pairs = [(d, g) for d in sorted(range(len(lengths)), key=lambda d: -lengths[d]) for g in heads]
    entries, section, size, total, largest = [], [], 0, 0, 0

    def close():
        section.sort(key=lambda x: -x[0])
        entries.extend(x[1] for x in section)
        section.clear()

    for d, group in pairs:
        tiles = -(-lengths[d] // TILE)
        new = size + lengths[d] * bytes_per_token > cache_bytes and total >= multiprocessors * largest
        if section and new:
            close()
            size = total = largest = 0
        size += lengths[d] * bytes_per_token
        for i in range(tiles):
            for head in group:
                c = cost(i, tiles)
                section.append((c, (i, starts[d], lengths[d], d * 1024 + head)))
                total, largest = total + c, max(largest, c)
    close()
    return entries


def work_lists(lengths, heads, group, dim, machine, cache_bytes=24 << 20):
    """(query tiles, key tiles, padded): int32 [n, 4] each."""
    kv_heads = heads // group
    row = dim * 4  # a token's key and value, or its query and d_out, of one head
    rest = (machine.multiprocessors, cache_bytes)
    query = work_list(lengths, [range(g * group, (g + 1) * group) for g in range(kv_heads)], row, lambda i, n: i + 1, *rest)
    key = work_list(lengths, [(g,) for g in range(kv_heads)], row * group, lambda i, n: (n - i) * 2 * group, *rest)
    padded = (sum(lengths) + 64 * len(lengths)) // 64 * 64
    pack = lambda x: torch.tensor(x, dtype=torch.int32).to(machine.device)
    return pack(query), pack(key), padded


class Attention:
    """q [t, h, d], k and v [t, g, d] as views with any row stride; everything else is made here, poisoned."""

    def __init__(self, machine, dim, lengths, heads, group, kind):
        self.machine, self.dim, self.heads, self.group, self.kind = machine, dim, heads, group, kind
        files = {"mma": ["common.cu", "attention_work.cu", "attention.cu"],
                 "wgmma": ["common.cu", "hopper.cu", "attention_work.cu", "attention_sm90.cu"]}[kind]  # fmt: skip
        self.defines = [f"HEAD_DIM={dim}", *(["STAGES=2"] if kind == "mma" else [])]
        self.module = machine.module(files, self.defines)
        self.queries, self.keys, self.padded = work_lists(lengths, heads, group, dim, machine)
        self.counters = torch.zeros(4, dtype=torch.int32, device=machine.device)
        self.tokens = sum(lengths)
        self.stats = torch.full((2, heads, self.padded), float("nan"), device=machine.device)

    def grid(self, work):
        return min(len(work), self.machine.multiprocessors)

    def forward(self, q, k, v, out, lse, scale):
        d, row = self.dim, self.dim * 2
        if self.kind == "mma":
            self.module.launch("attention_forward", len(self.queries), 128, (TILE + 128) * row, q, k, v, out, lse, self.queries,
                               q.stride(0), k.stride(0), v.stride(0), out.stride(0), self.tokens, self.group, scale)  # fmt: skip
            return
        maps = [self.machine.tensor_map(x, x.shape[1], d, TILE) for x in (q, k, v)]
        self.module.launch("attention_forward_sm90", self.grid(self.queries), 384, 6 * TILE * row + 1024, *maps, out, lse,
                           self.queries, len(self.queries), self.counters[0:], out.stride(0), self.tokens, self.group, scale)  # fmt: skip

    def prepare(self, out, d_out, lse):
        self.module.launch("attention_stats", len(self.queries), 256, 0, out, d_out, lse, self.stats, self.queries,
                           out.stride(0), d_out.stride(0), self.tokens, self.heads, self.padded)  # fmt: skip

    def d_query(self, q, k, v, d_out, dq, scale):
        d, row = self.dim, self.dim * 2
        if self.kind == "mma":
            self.module.launch("attention_dq", len(self.queries), 128, (2 * TILE + 4 * 32) * row, q, k, v, d_out, self.stats, dq,
                               self.queries, q.stride(0), k.stride(0), v.stride(0), d_out.stride(0), dq.stride(0), self.heads,
                               self.padded, self.group, scale)  # fmt: skip
            return
        maps = [self.machine.tensor_map(x, x.shape[1], d, TILE) for x in (q, k, v, d_out)]
        self.module.launch("attention_dq_sm90", self.grid(self.queries), 384, 7 * TILE * row + 1024, *maps, self.stats, dq,
                           self.queries, len(self.queries), self.counters[1:], dq.stride(0), self.heads, self.padded, self.group,
                           scale)  # fmt: skip

    def d_key_value(self, q, k, v, d_out, dk, dv, scale):
        d, row = self.dim, self.dim * 2
        if self.kind == "mma":
            self.module.launch("attention_dkdv", len(self.keys), 256, (2 * TILE + 4 * 64) * row + 1024, q, k, v, d_out, self.stats,
                               dk, dv, self.keys, q.stride(0), k.stride(0), v.stride(0), d_out.stride(0), dk.stride(0),
                               dv.stride(0), self.heads, self.padded, self.group, scale)  # fmt: skip
            return
        maps = [self.machine.tensor_map(x, x.shape[1], d, n) for x, n in ((q, 64), (k, TILE), (v, TILE), (d_out, 64))]
        self.module.launch("attention_dkdv_sm90", self.grid(self.keys), 384, (4 * TILE + 4 * 64) * row + 3072, *maps, self.stats,
                           dk, dv, self.keys, len(self.keys), self.counters[2:], dk.stride(0), dv.stride(0), self.heads,
                           self.padded, self.group, scale)  # fmt: skip


def reference(q, k, v, d_out, lengths, scale):
    """out, lse, dq, dk, dv in float64, document by document and head by head."""
    t, h, d = q.shape
    group = h // k.shape[1]
    double = lambda x: x.detach().double()
    out, dq = torch.zeros(t, h, d, dtype=torch.float64, device=q.device), torch.zeros(t, h, d, dtype=torch.float64, device=q.device)
    dk, dv = (torch.zeros(t, k.shape[1], d, dtype=torch.float64, device=q.device) for _ in range(2))
    lse = torch.zeros(h, t, dtype=torch.float64, device=q.device)
    start = 0
    for n in lengths:
        rows = slice(start, start + n)
        mask = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        for i in range(h):
            a, b, c, g = double(q[rows, i]), double(k[rows, i // group]), double(v[rows, i // group]), double(d_out[rows, i])
            s = (a @ b.T * scale).masked_fill(mask, float("-inf"))
            lse[i, rows] = s.logsumexp(1)
            p = (s - lse[i, rows, None]).exp()
            out[rows, i] = p @ c
            dp = g @ c.T
            ds = p * (dp - (dp * p).sum(1, keepdim=True)) * scale
            dq[rows, i] = ds @ b
            dk[rows, i // group] += ds.T @ a
            dv[rows, i // group] += p.T @ g
        start += n
    return out, lse, dq, dk, dv


def inputs(machine, dim, tokens, heads, group, fused=True):
    """q, k, v as slices of one buffer [t, (h + 2 g) d + 64] where `fused`; d_out."""
    g = heads // group
    width = (heads + 2 * g) * dim
    qkv = torch.randn(tokens, width + 64 * fused, device=machine.device, dtype=torch.bfloat16)
    views = [(0, heads), (heads, g), (heads + g, g)]
    q, k, v = (qkv[:, a * dim : (a + n) * dim].unflatten(1, (n, dim)) for a, n in views)
    if not fused:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    d_out = torch.randn(tokens, heads, dim, device=machine.device, dtype=torch.bfloat16)
    return q, k, v, d_out


def poisoned(tokens, heads, dim, device):
    """A [t, h, d] view with a longer row, all NaN; what lies between the rows must stay NaN."""
    whole = torch.full((tokens, heads * dim + 64), float("nan"), device=device, dtype=torch.bfloat16)
    return whole, whole[:, : heads * dim].unflatten(1, (heads, dim))


def error(x, reference):
    reference = reference.double()
    if reference.abs().max() < 1e-12:  # nothing but rounding: attention over one token has no gradient in q and k
        return 0.0 if x.abs().max() < 1e-2 else float("inf")
    value = (x.double() - reference).norm() / reference.norm()
    return float("inf") if value != value else value.item()


def check(machine, kind, dim, lengths, heads, group, fused=True):
    """Relative errors {name: value} of one fresh case; asserts that nothing else was written and that a second run
    gives the same bits."""
    scale = dim**-0.5
    tokens, g = sum(lengths), heads // group
    q, k, v, d_out = inputs(machine, dim, tokens, heads, group, fused)
    run = Attention(machine, dim, lengths, heads, group, kind)

    def go():
        buffers = [poisoned(tokens, n, dim, machine.device) for n in (heads, heads, g, g)]
        (_, out), (_, dq), (_, dk), (_, dv) = buffers
        lse = torch.full((heads, tokens), float("nan"), device=machine.device)
        run.forward(q, k, v, out, lse, scale)
        run.prepare(out, d_out, lse)
        run.d_query(q, k, v, d_out, dq, scale)
        run.d_key_value(q, k, v, d_out, dk, dv, scale)
        machine.synchronize()
        for whole, part in buffers:
            assert whole[:, part[0].numel() :].isnan().all(), "wrote between the rows"
        assert (run.counters == 0).all(), "work counter left behind"
        return out, lse, dq, dk, dv

    first, second = go(), go()
    names = ("out", "lse", "dq", "dk", "dv")
    for name, a, b in zip(names, first, second):
        assert torch.equal(a, b), f"{name}: two runs differ ({kind}, {dim}, {lengths}, {heads}/{group})"
    expected = reference(q, k, v, d_out, lengths, scale)
    return {name: error(a, b) for name, a, b in zip(names, first, expected)}


LIMITS = {"out": 6e-3, "lse": 1e-5, "dq": 1e-2, "dk": 1e-2, "dv": 6e-3}
