// What happens to all trainable parameters at once. After elements.cu.
//
// A table names pieces of parameters, at most PIECE elements each, one block a piece: tensors may lie anywhere.
// #define GRADIENT_BF16 where gradients are bf16 (else f32), MOMENTS_BF16 where Adam's moments are (else f32).

#ifdef GRADIENT_BF16
typedef bf16 gradient;
#else
typedef float gradient;
#endif
#ifdef MOMENTS_BF16
typedef bf16 moment;
#else
typedef float moment;
#endif

struct Piece {             // 56 bytes
    float* parameter;      // f32 master
    moment *m, *v;         // Adam's moments
    const gradient* grad;  //
    bf16* copy;            // bf16 copy for the products, or null
    int count;
    float weight_decay;
    u32 first;             // the piece's first element, counted in the parameter
    u32 rounding;          // which random numbers round moments in bf16
};

// `mix` of ops/mod.rs.
DEVICE u32 mix(u32 x) {
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15) * 0xd35a2d97u;
    return x ^ x >> 15;
}

// What is written back of the moments of the piece's element i: in bf16 rounded up or down by chance, as `to_bf16` of
// ops/optim.rs does it, and f32 as it is.
DEVICE float one_of_bf16(float x, u32 chance) {
    const u32 bits = __float_as_uint(x);
    return (bits & 0x7f800000u) == 0x7f800000u ? x : __uint_as_float((bits + chance) & 0xffff0000u);
}
DEVICE void round_moments(float& m, float& v, const Piece& piece, int i) {
#ifdef MOMENTS_BF16
    const u32 random = mix(mix(piece.first + i) ^ piece.rounding);
    m = one_of_bf16(m, random & 0xffff), v = one_of_bf16(v, random >> 16);
#endif
}

DEVICE void load4(float (&x)[4], const float* p) {
    const float4 y = *(const float4*)p;
    x[0] = y.x, x[1] = y.y, x[2] = y.z, x[3] = y.w;
}
DEVICE void load4(float (&x)[4], const bf16* p) {
    const uint2 y = *(const uint2*)p;
    x[0] = low_half(y.x), x[1] = high_half(y.x), x[2] = low_half(y.y), x[3] = high_half(y.y);
}
DEVICE void store4(float* p, const float (&x)[4]) { *(float4*)p = {x[0], x[1], x[2], x[3]}; }
DEVICE void store4(bf16* p, const float (&x)[4]) { *(uint2*)p = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3])}; }

// Σ over 256 threads, the same in each, in a fixed order.
DEVICE float block_sum(float x, float* parts) {
    x = lanes_sum<32>(x);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) x += parts[i];
    __syncthreads();
    return x;
}

// Σ of x (SQUARES: of x²) over pieces' gradients, in an order that depends on the table alone: each piece's sum
// goes to partials[piece], the block that finishes last adds them. `finished` is 0 before and after.
// grid = pieces, 256 threads.
KERNEL __launch_bounds__(256) sum_squares(const Piece* __restrict__ pieces, float* partials, int* finished, float* __restrict__ out) {
    __shared__ float parts[8];
    __shared__ bool last;
    const Piece piece = pieces[blockIdx.x];
    float sum = 0.0f;
    const bool wide = ((u64)piece.grad & 15) == 0;
    const int count4 = wide ? piece.count / 4 : 0;
    for (int i = threadIdx.x; i < count4; i += 256) {
        float g[4];
        load4(g, piece.grad + i * 4);
        sum += g[0] * g[0] + g[1] * g[1] + (g[2] * g[2] + g[3] * g[3]);
    }
    for (int i = count4 * 4 + threadIdx.x; i < piece.count; i += 256) {
        const float g = as_float(piece.grad[i]);
        sum += g * g;
    }
    sum = block_sum(sum, parts);
    if (threadIdx.x == 0) {
        partials[blockIdx.x] = sum;
        __threadfence();
        last = atomicAdd(finished, 1) == int(gridDim.x) - 1;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
    sum = 0.0f;
    for (int i = threadIdx.x; i < gridDim.x; i += 256) sum += ((volatile float*)partials)[i];
    sum = block_sum(sum, parts);
    if (threadIdx.x == 0) *out = sum, *finished = 0;
}

// Σ of n values in a fixed order; one block of 256 threads.
KERNEL __launch_bounds__(256) sum_values(const float* __restrict__ values, float* __restrict__ out, int n, int accumulate) {
    __shared__ float parts[8];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < n; i += 256) sum += values[i];
    sum = block_sum(sum, parts);
    if (threadIdx.x == 0) *out = (accumulate ? *out : 0.0f) + sum;
}

struct Adam {
    float lr, beta1, beta2, eps;
    float bias1;      // 1 − β₁^k
    float root_bias2; // sqrt(1 − β₂^k)
    float factor;     // on the gradient: 1 / tokens
    float max_norm;   // clip factor · gradient to this norm; 0: don't
};

DEVICE void adam(float& p, float& m, float& v, float g, const Adam& a, float decay) {
    m = a.beta1 * m + (1.0f - a.beta1) * g;
    v = a.beta2 * v + (1.0f - a.beta2) * g * g;
    p = p * decay - a.lr / a.bias1 * (m / (sqrtf(v) / a.root_bias2 + a.eps));
}

// torch.optim.AdamW. `squares` (may be null) is `sum_squares` of the gradients: it gives the clip coefficient
// min(1, max_norm / (norm + 1e-6)), and where it isn't finite nothing changes. grid = pieces, 256 threads.
KERNEL __launch_bounds__(256) adamw(const Piece* __restrict__ pieces, const float* __restrict__ squares, Adam a) {
    const Piece piece = pieces[blockIdx.x];
    float factor = a.factor;
    if (squares) {
        const float norm = a.factor * sqrtf(*squares);
        if (!(norm < INFINITY_F)) return;
        if (a.max_norm > 0.0f) factor *= fminf(1.0f, a.max_norm / (norm + 1e-6f));
    }
    const float decay = 1.0f - a.lr * piece.weight_decay;
    const u64 misaligned = ((u64)piece.parameter | (u64)piece.m | (u64)piece.v | (u64)piece.grad | (u64)piece.copy << 1) & 15;
    const int count4 = misaligned ? 0 : piece.count / 4;
    for (int i = threadIdx.x; i < count4; i += 256) {
        float p[4], m[4], v[4], g[4];
        load4(p, piece.parameter + i * 4);
        load4(m, piece.m + i * 4);
        load4(v, piece.v + i * 4);
        load4(g, piece.grad + i * 4);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            adam(p[j], m[j], v[j], g[j] * factor, a, decay);
            round_moments(m[j], v[j], piece, i * 4 + j);
        }
        store4(piece.parameter + i * 4, p);
        store4(piece.m + i * 4, m);
        store4(piece.v + i * 4, v);
        if (piece.copy) store4(piece.copy + i * 4, p);
    }
    for (int i = count4 * 4 + threadIdx.x; i < piece.count; i += 256) {
        float p = piece.parameter[i], m = as_float(piece.m[i]), v = as_float(piece.v[i]);
        adam(p, m, v, as_float(piece.grad[i]) * factor, a, decay);
        round_moments(m, v, piece, i);
        piece.parameter[i] = p;
        put(piece.m + i, m);
        put(piece.v + i, v);
        if (piece.copy) piece.copy[i] = to_bf16(p);
    }
}

// Sums of gradients over micro-batches: parameter += grad, or = grad. grid = pieces, 256 threads.
template <bool ADD> DEVICE void take_gradient(const Piece& piece) {
    const int count4 = (((u64)piece.parameter | (u64)piece.grad) & 15) ? 0 : piece.count / 4;
    for (int i = threadIdx.x; i < count4; i += 256) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f}, g[4];
        if (ADD) load4(sum, piece.parameter + i * 4);
        load4(g, piece.grad + i * 4);
#pragma unroll
        for (int j = 0; j < 4; j++) sum[j] += g[j];
        store4(piece.parameter + i * 4, sum);
    }
    for (int i = count4 * 4 + threadIdx.x; i < piece.count; i += 256)
        piece.parameter[i] = (ADD ? piece.parameter[i] : 0.0f) + as_float(piece.grad[i]);
}
KERNEL __launch_bounds__(256) add_gradients(const Piece* __restrict__ pieces) { take_gradient<true>(pieces[blockIdx.x]); }
KERNEL __launch_bounds__(256) put_gradients(const Piece* __restrict__ pieces) { take_gradient<false>(pieces[blockIdx.x]); }

// Parameters rounded for the products: copy = parameter. grid = pieces, 256 threads.
KERNEL __launch_bounds__(256) round_parameters(const Piece* __restrict__ pieces) {
    const Piece piece = pieces[blockIdx.x];
    const int count4 = (((u64)piece.parameter | (u64)piece.copy << 1) & 15) ? 0 : piece.count / 4;
    for (int i = threadIdx.x; i < count4; i += 256) {
        float p[4];
        load4(p, piece.parameter + i * 4);
        store4(piece.copy + i * 4, p);
    }
    for (int i = count4 * 4 + threadIdx.x; i < piece.count; i += 256) piece.copy[i] = to_bf16(piece.parameter[i]);
}
