// Root-mean-square norm: weight · x / sqrt(mean(x²) + eps) over rows of DIM elements. After elements.cu.
//
// #define DIM, a multiple of 8 up to 32768. ROW_THREADS threads hold a row in registers, ROWS rows a block:
// blocks of BLOCK_THREADS = max(256, ROW_THREADS), ROW_THREADS = 32 up to DIM 1024, 64 up to 2048, and so on.

DEVICE constexpr int row_threads(int dim) { return dim <= 1024 ? 32 : 2 * row_threads((dim + 1) / 2); }
#define ROW_THREADS row_threads(DIM)
#define BLOCK_THREADS (ROW_THREADS > 256 ? ROW_THREADS : 256)
#define ROWS (BLOCK_THREADS / ROW_THREADS)
#define CHUNKS ((DIM / 8 + ROW_THREADS - 1) / ROW_THREADS)

// Two sums over the threads of a row; `parts` has two places for each warp of the block.
DEVICE void row_sums(float& x, float& y, float* parts) {
    x = lanes_sum<32>(x);
    y = lanes_sum<32>(y);
    if (ROW_THREADS == 32) return;
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x, parts[32 + threadIdx.x / 32] = y;
    __syncthreads();
    x = y = 0.0f;
#pragma unroll
    for (int i = 0; i < ROW_THREADS / 32; i++) {
        const int warp = threadIdx.x / ROW_THREADS * (ROW_THREADS / 32) + i;
        x += parts[warp], y += parts[32 + warp];
    }
}

// y = norm(h), h = x + residual where `residual` isn't null; h is stored where `h_out` isn't null and rounded to
// its type before the norm either way. grid = ceil(rows / ROWS).
KERNEL __launch_bounds__(BLOCK_THREADS)
    rms_norm_forward(const element* __restrict__ x, const element* __restrict__ residual, const weight* __restrict__ w,
                     element* __restrict__ h_out, element* __restrict__ y, int x_stride, int residual_stride,
                     int h_stride, int y_stride, int rows, float eps) {
    __shared__ float parts[64];
    const int row = blockIdx.x * ROWS + threadIdx.x / ROW_THREADS, thread = threadIdx.x % ROW_THREADS;
    const bool valid = row < rows;
    float h[CHUNKS][8], sum = 0.0f;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int column = (c * ROW_THREADS + thread) * 8;
        if (!valid || column >= DIM) continue;
        load8(h[c], x + (long long)row * x_stride + column);
        if (residual) {
            float r[8];
            load8(r, residual + (long long)row * residual_stride + column);
#pragma unroll
            for (int i = 0; i < 8; i++) h[c][i] = rounded(h[c][i] + r[i], y);
        }
#pragma unroll
        for (int i = 0; i < 8; i++) sum += h[c][i] * h[c][i];
    }
    float unused = 0.0f;
    row_sums(sum, unused, parts);
    const float inverse = rsqrtf(sum / DIM + eps);
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int column = (c * ROW_THREADS + thread) * 8;
        if (!valid || column >= DIM) continue;
        if (h_out) store8(h_out + (long long)row * h_stride + column, h[c]);
        float g[8];
        load8(g, w + column);
#pragma unroll
        for (int i = 0; i < 8; i++) g[i] *= h[c][i] * inverse;
        store8(y + (long long)row * y_stride + column, g);
    }
}

// dx = norm's gradient of dy at h, plus `d_residual` where it isn't null (dx may be d_residual itself). With
// WEIGHT: the block's share of the weight's gradient goes to partials[block][DIM] (then `sum_partials`).
// Any grid up to ceil(rows / ROWS).
template <bool WEIGHT>
DEVICE void norm_backward(const element* h, const weight* w, const element* dy, const element* d_residual, element* dx,
                          float* partials, int h_stride, int dy_stride, int d_residual_stride, int dx_stride, int rows,
                          float eps) {
    __shared__ float parts[64];
    const int thread = threadIdx.x % ROW_THREADS;
    float dw[CHUNKS][8] = {};
    for (int first = blockIdx.x * ROWS; first < rows; first += gridDim.x * ROWS) {
        const int row = first + threadIdx.x / ROW_THREADS;
        Eight<element> x[CHUNKS], dys[CHUNKS], residual[CHUNKS];
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int column = (c * ROW_THREADS + thread) * 8;
            if (row >= rows || column >= DIM) continue;
            x[c].load(h + (long long)row * h_stride + column);
            dys[c].load(dy + (long long)row * dy_stride + column);
            if (d_residual) residual[c].load(d_residual + (long long)row * d_residual_stride + column);
        }
        float squares = 0.0f, dot = 0.0f; // Σ h², Σ w dy h
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int column = (c * ROW_THREADS + thread) * 8;
            if (row >= rows || column >= DIM) continue;
            float a[8], g[8], factor[8];
            x[c].widen(a);
            dys[c].widen(g);
            load8(factor, w + column);
#pragma unroll
            for (int i = 0; i < 8; i++) squares += a[i] * a[i], dot += g[i] * factor[i] * a[i];
        }
        row_sums(squares, dot, parts);
        const float inverse = rsqrtf(squares / DIM + eps), along = dot * inverse * inverse * inverse / DIM;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int column = (c * ROW_THREADS + thread) * 8;
            if (row >= rows || column >= DIM) continue;
            float a[8], g[8], factor[8], r[8] = {};
            x[c].widen(a);
            dys[c].widen(g);
            load8(factor, w + column);
            if (d_residual) residual[c].widen(r);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                if (WEIGHT) dw[c][i] += g[i] * a[i] * inverse;
                r[i] += g[i] * factor[i] * inverse - a[i] * along;
            }
            store8(dx + (long long)row * dx_stride + column, r);
        }
    }
    if (!WEIGHT) return;
    __shared__ float sums[ROWS == 1 ? 1 : ROWS][ROWS == 1 ? 1 : DIM];
    if (ROWS > 1) {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++)
#pragma unroll
            for (int i = 0; i < 8; i++) {
                const int column = (c * ROW_THREADS + thread) * 8 + i;
                if (column < DIM) sums[threadIdx.x / ROW_THREADS][column] = dw[c][i];
            }
        __syncthreads();
        for (int column = threadIdx.x; column < DIM; column += BLOCK_THREADS) {
            float sum = 0.0f;
#pragma unroll
            for (int i = 0; i < ROWS; i++) sum += sums[i][column];
            partials[(long long)blockIdx.x * DIM + column] = sum;
        }
    } else {
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int column = (c * ROW_THREADS + thread) * 8;
            if (column < DIM) store8(partials + (long long)blockIdx.x * DIM + column, dw[c]);
        }
    }
}

KERNEL __launch_bounds__(BLOCK_THREADS)
    rms_norm_backward(const element* h, const weight* w, const element* dy, const element* d_residual, element* dx, int h_stride,
                      int dy_stride, int d_residual_stride, int dx_stride, int rows, float eps) {
    norm_backward<false>(h, w, dy, d_residual, dx, nullptr, h_stride, dy_stride, d_residual_stride, dx_stride, rows, eps);
}
KERNEL __launch_bounds__(BLOCK_THREADS)
    rms_norm_backward_weight(const element* h, const weight* w, const element* dy, const element* d_residual, element* dx,
                             float* partials, int h_stride, int dy_stride, int d_residual_stride, int dx_stride, int rows,
                             float eps) {
    norm_backward<true>(h, w, dy, d_residual, dx, partials, h_stride, dy_stride, d_residual_stride, dx_stride, rows, eps);
}
