// Norm of each query and key head (where the model has it), then rotary embedding in half-split pairing:
// x · cos + rotate_half(x) · sin. Reads the rows [q heads | k heads | v heads | spare] of the fused product.
// After elements.cu. #define HEAD_DIM 64 or 128.
//
// A warp works on one token, HEAD_LANES lanes on one head: each holds 8 elements of the head's first half and
// the 8 that they are paired with. cos, sin: f32 rows of which the first HEAD_DIM / 2 elements are read.

#define HEAD_LANES (HEAD_DIM / 16)
#define HEADS_AT_ONCE (32 / HEAD_LANES)

// 8 tokens a block of 256 threads: grid = ceil(tokens / 8). Null weights: no norm. The outputs may be the q and k
// parts of the input.
KERNEL __launch_bounds__(256)
    qk_norm_rope_forward(const element* qkv, const weight* __restrict__ q_weight, const weight* __restrict__ k_weight,
                         const float* __restrict__ cos, const float* __restrict__ sin, element* q_out, element* k_out,
                         int qkv_stride, int rope_stride, int q_stride, int k_stride, int tokens, int q_heads, int k_heads,
                         float eps) {
    const int token = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
    if (token >= tokens) return;
    const int column = lane % HEAD_LANES * 8;
    float c[8], s[8];
    load8(c, cos + (long long)token * rope_stride + column);
    load8(s, sin + (long long)token * rope_stride + column);
    for (int first = 0; first < q_heads + k_heads; first += HEADS_AT_ONCE) {
        const int head = first + lane / HEAD_LANES;
        const bool valid = head < q_heads + k_heads, is_query = head < q_heads;
        float a[8] = {}, b[8] = {};
        if (valid) {
            const element* const x = qkv + (long long)token * qkv_stride + head * HEAD_DIM + column;
            load8(a, x);
            load8(b, x + HEAD_DIM / 2);
        }
        if (q_weight) {
            float sum = 0.0f, g[8];
#pragma unroll
            for (int i = 0; i < 8; i++) sum += a[i] * a[i] + b[i] * b[i];
            const float inverse = rsqrtf(lanes_sum<HEAD_LANES>(sum) / HEAD_DIM + eps);
            const weight* const w = (is_query ? q_weight : k_weight) + column;
            load8(g, w);
#pragma unroll
            for (int i = 0; i < 8; i++) a[i] *= inverse * g[i];
            load8(g, w + HEAD_DIM / 2);
#pragma unroll
            for (int i = 0; i < 8; i++) b[i] *= inverse * g[i];
        }
        if (valid) {
            element* const y = (is_query ? q_out + (long long)token * q_stride + head * HEAD_DIM
                                         : k_out + (long long)token * k_stride + (head - q_heads) * HEAD_DIM) +
                               column;
            float z[8];
#pragma unroll
            for (int i = 0; i < 8; i++) z[i] = a[i] * c[i] - b[i] * s[i];
            store8(y, z);
#pragma unroll
            for (int i = 0; i < 8; i++) z[i] = b[i] * c[i] + a[i] * s[i];
            store8(y + HEAD_DIM / 2, z);
        }
    }
}

// Gradients of the q and k parts of the fused rows from those of the rotated heads; `qkv` is what the forward read
// (unused without norm). WEIGHT: the block's share of the weights' gradients goes to
// partials[block][2 · HEAD_DIM], q's then k's. Any grid up to ceil(tokens / 8). d_qkv may hold dq and dk itself.
template <bool WEIGHT>
DEVICE void rope_backward(const element* qkv, const weight* q_weight, const weight* k_weight, const float* cos, const float* sin,
                          const element* dq, const element* dk, element* d_qkv, float* partials, int qkv_stride, int rope_stride,
                          int dq_stride, int dk_stride, int d_qkv_stride, int tokens, int q_heads, int k_heads, float eps) {
    const int lane = threadIdx.x % 32, column = lane % HEAD_LANES * 8;
    float dw[2][16] = {};
    for (int token = blockIdx.x * 8 + threadIdx.x / 32; token < tokens; token += gridDim.x * 8) {
        float c[8], s[8];
        load8(c, cos + (long long)token * rope_stride + column);
        load8(s, sin + (long long)token * rope_stride + column);
        for (int first = 0; first < q_heads + k_heads; first += HEADS_AT_ONCE) {
            const int head = first + lane / HEAD_LANES;
            const bool valid = head < q_heads + k_heads, is_query = head < q_heads;
            float da[8] = {}, db[8] = {};
            if (valid) {
                const element* const dy = (is_query ? dq + (long long)token * dq_stride + head * HEAD_DIM
                                                    : dk + (long long)token * dk_stride + (head - q_heads) * HEAD_DIM) +
                                          column;
                float x[8], y[8];
                load8(x, dy);
                load8(y, dy + HEAD_DIM / 2);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    da[i] = x[i] * c[i] + y[i] * s[i];
                    db[i] = y[i] * c[i] - x[i] * s[i];
                }
            }
            if (q_weight) {
                float a[8] = {}, b[8] = {}, squares = 0.0f, dot = 0.0f, g[8];
                if (valid) {
                    const element* const x = qkv + (long long)token * qkv_stride + head * HEAD_DIM + column;
                    load8(a, x);
                    load8(b, x + HEAD_DIM / 2);
                }
#pragma unroll
                for (int i = 0; i < 8; i++) squares += a[i] * a[i] + b[i] * b[i];
                const float inverse = rsqrtf(lanes_sum<HEAD_LANES>(squares) / HEAD_DIM + eps);
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    a[i] *= inverse, b[i] *= inverse;
                    if (WEIGHT) {
                        dw[0][i] += is_query ? da[i] * a[i] : 0.0f, dw[0][8 + i] += is_query ? db[i] * b[i] : 0.0f;
                        dw[1][i] += is_query ? 0.0f : da[i] * a[i], dw[1][8 + i] += is_query ? 0.0f : db[i] * b[i];
                    }
                }
                const weight* const w = (is_query ? q_weight : k_weight) + column;
                load8(g, w);
#pragma unroll
                for (int i = 0; i < 8; i++) da[i] *= g[i], dot += da[i] * a[i];
                load8(g, w + HEAD_DIM / 2);
#pragma unroll
                for (int i = 0; i < 8; i++) db[i] *= g[i], dot += db[i] * b[i];
                dot = lanes_sum<HEAD_LANES>(dot) / HEAD_DIM;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    da[i] = inverse * (da[i] - a[i] * dot);
                    db[i] = inverse * (db[i] - b[i] * dot);
                }
            }
            if (valid) {
                element* const dx = d_qkv + (long long)token * d_qkv_stride + head * HEAD_DIM + column;
                store8(dx, da);
                store8(dx + HEAD_DIM / 2, db);
            }
        }
    }
    if (!WEIGHT) return;
    __shared__ float sums[8][2 * HEAD_DIM];
#pragma unroll
    for (int which = 0; which < 2; which++)
#pragma unroll
        for (int i = 0; i < 16; i++) {
            float x = dw[which][i];
#pragma unroll
            for (int offset = HEAD_LANES; offset < 32; offset *= 2) x += __shfl_xor_sync(0xffffffffu, x, offset);
            if (lane < HEAD_LANES) sums[threadIdx.x / 32][which * HEAD_DIM + i / 8 * (HEAD_DIM / 2) + column + i % 8] = x;
        }
    __syncthreads();
    for (int i = threadIdx.x; i < 2 * HEAD_DIM; i += 256) {
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < 8; warp++) sum += sums[warp][i];
        partials[(long long)blockIdx.x * 2 * HEAD_DIM + i] = sum;
    }
}

KERNEL __launch_bounds__(256)
    qk_norm_rope_backward(const element* qkv, const weight* q_weight, const weight* k_weight, const float* cos, const float* sin,
                          const element* dq, const element* dk, element* d_qkv, int qkv_stride, int rope_stride, int dq_stride,
                          int dk_stride, int d_qkv_stride, int tokens, int q_heads, int k_heads, float eps) {
    rope_backward<false>(qkv, q_weight, k_weight, cos, sin, dq, dk, d_qkv, nullptr, qkv_stride, rope_stride, dq_stride, dk_stride,
                         d_qkv_stride, tokens, q_heads, k_heads, eps);
}
KERNEL __launch_bounds__(256)
    qk_norm_rope_backward_weight(const element* qkv, const weight* q_weight, const weight* k_weight, const float* cos,
                                 const float* sin, const element* dq, const element* dk, element* d_qkv, float* partials,
                                 int qkv_stride, int rope_stride, int dq_stride, int dk_stride, int d_qkv_stride, int tokens,
                                 int q_heads, int k_heads, float eps) {
    rope_backward<true>(qkv, q_weight, k_weight, cos, sin, dq, dk, d_qkv, partials, qkv_stride, rope_stride, dq_stride, dk_stride,
                        d_qkv_stride, tokens, q_heads, k_heads, eps);
}
