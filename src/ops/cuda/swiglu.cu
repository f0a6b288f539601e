// silu(gate) · up on rows of FEATURES elements each: two matrices of the same row stride, or the two halves of the
// fused product [gate | up]. After elements.cu.
// #define FEATURES, a multiple of 8. grid = ceil(rows · FEATURES / 2048), 256 threads.

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + ex2(-x * LOG2_E)); }

KERNEL __launch_bounds__(256) swiglu_forward(const element* __restrict__ gate_rows, const element* __restrict__ up_rows,
                                             element* __restrict__ out, int stride, int out_stride, int rows) {
    const u32 index = blockIdx.x * 256 + threadIdx.x, row = index / (FEATURES / 8), column = index % (FEATURES / 8) * 8;
    if (row >= rows) return;
    const long long at = (long long)row * stride + column;
    float gate[8], up[8];
    load8(gate, gate_rows + at);
    load8(up, up_rows + at);
#pragma unroll
    for (int i = 0; i < 8; i++) gate[i] *= sigmoid(gate[i]) * up[i];
    store8(out + (long long)row * out_stride + column, gate);
}

// d_gate and d_up may be gate and up themselves. The forward's output is written again to `out` where it isn't null.
KERNEL __launch_bounds__(256)
    swiglu_backward(const element* gate_rows, const element* up_rows, const element* d_out, element* d_gate, element* d_up,
                    element* out, int stride, int d_out_stride, int d_stride, int out_stride, int rows) {
    const u32 index = blockIdx.x * 256 + threadIdx.x, row = index / (FEATURES / 8), column = index % (FEATURES / 8) * 8;
    if (row >= rows) return;
    const long long at = (long long)row * stride + column, d_at = (long long)row * d_stride + column;
    float gate[8], up[8], d[8], y[8];
    load8(gate, gate_rows + at);
    load8(up, up_rows + at);
    load8(d, d_out + (long long)row * d_out_stride + column);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float s = sigmoid(gate[i]), silu = gate[i] * s;
        y[i] = silu * up[i];
        gate[i] = d[i] * up[i] * (s + silu * (1.0f - s));
        up[i] = d[i] * silu;
    }
    store8(d_gate + d_at, gate);
    store8(d_up + d_at, up);
    if (out) store8(out + (long long)row * out_stride + column, y);
}
