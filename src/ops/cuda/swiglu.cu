// silu(gate) · up on the rows [gate | up] of the fused product, FEATURES elements each. After elements.cu.
// #define FEATURES, a multiple of 8. grid = ceil(rows · FEATURES / 2048), 256 threads.

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + ex2(-x * LOG2_E)); }

KERNEL __launch_bounds__(256) swiglu_forward(const element* __restrict__ gate_up, element* __restrict__ out, int gate_up_stride,
                                             int out_stride, int rows) {
    const u32 index = blockIdx.x * 256 + threadIdx.x, row = index / (FEATURES / 8), column = index % (FEATURES / 8) * 8;
    if (row >= rows) return;
    const element* const x = gate_up + (long long)row * gate_up_stride + column;
    float gate[8], up[8];
    load8(gate, x);
    load8(up, x + FEATURES);
#pragma unroll
    for (int i = 0; i < 8; i++) gate[i] *= sigmoid(gate[i]) * up[i];
    store8(out + (long long)row * out_stride + column, gate);
}

// d_gate_up may be gate_up itself. The forward's output is written again to `out` where it isn't null.
KERNEL __launch_bounds__(256)
    swiglu_backward(const element* gate_up, const element* d_out, element* d_gate_up, element* out, int gate_up_stride,
                    int d_out_stride, int d_gate_up_stride, int out_stride, int rows) {
    const u32 index = blockIdx.x * 256 + threadIdx.x, row = index / (FEATURES / 8), column = index % (FEATURES / 8) * 8;
    if (row >= rows) return;
    const element* const x = gate_up + (long long)row * gate_up_stride + column;
    float gate[8], up[8], d[8], y[8];
    load8(gate, x);
    load8(up, x + FEATURES);
    load8(d, d_out + (long long)row * d_out_stride + column);
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const float s = sigmoid(gate[i]), silu = gate[i] * s;
        y[i] = silu * up[i];
        gate[i] = d[i] * up[i] * (s + silu * (1.0f - s));
        up[i] = d[i] * silu;
    }
    element* const dx = d_gate_up + (long long)row * d_gate_up_stride + column;
    store8(dx, gate);
    store8(dx + FEATURES, up);
    if (out) store8(out + (long long)row * out_stride + column, y);
}
