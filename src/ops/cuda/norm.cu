// Root-mean-square norm: weight · x / sqrt(mean(x²) + eps) over rows of DIM elements. After elements.cu.
//
// #define DIM, a multiple of 8 up to 32768. ROW_THREADS threads hold a row in registers, ROWS rows a block:
// blocks of BLOCK_THREADS = max(256, ROW_THREADS), ROW_THREADS = 32 up to DIM 1024, 64 up to 2048, and so on.

DEVICE constexpr int row_threads(int dim) { return dim <= 1024 ? 32 : 2 * row_threads((dim + 1) / 2); }
#define ROW_THREADS row_threads(DIM)
#define BLOCK_THREADS (ROW_THREADS > 256 ? ROW_THREADS : 256)
#define ROWS (BLOCK_THREADS / ROW_THREADS)
#define CHUNKS ((DIM / 8 + ROW_THREADS - 1) / ROW_THREADS)

// Sum over the threads of a row; `parts` has a place for each warp of the block.
DEVICE float row_sum(float x, float* parts) {
    x = lanes_sum<32>(x);
    if (ROW_THREADS == 32) return x;
    __syncthreads();
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < ROW_THREADS / 32; i++) sum += parts[threadIdx.x / ROW_THREADS * (ROW_THREADS / 32) + i];
    return sum;
}

// y = norm(h), h = x + residual where `residual` isn't null; h is stored where `h_out` isn't null and rounded to
// its type before the norm either way. grid = ceil(rows / ROWS).
KERNEL __launch_bounds__(BLOCK_THREADS)
    rms_norm_forward(const element* __restrict__ x, const element* __restrict__ residual, const weight* __restrict__ w,
                     element* __restrict__ h_out, element* __restrict__ y, int x_stride, int residual_stride,
                     int h_stride, int y_stride, int rows, float eps) {
    __shared__ float parts[32];
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
    const float inverse = rsqrtf(row_sum(sum, parts) / DIM + eps);
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
    __shared__ float parts[32];
    const int thread = threadIdx.x % ROW_THREADS;
    float dw[CHUNKS][8] = {};
    for (int first = blockIdx.x * ROWS; first < rows; first += gridDim.x * ROWS) {
        const int row = first + threadIdx.x / ROW_THREADS;
        const bool valid = row < rows;
        float x[CHUNKS][8], g[CHUNKS][8], squares = 0.0f, dot = 0.0f;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int column = (c * ROW_THREADS + thread) * 8;
            if (!valid || column >= DIM) continue;
            load8(x[c], h + (long long)row * h_stride + column);
            load8(g[c], dy + (long long)row * dy_stride + column);
#pragma unroll
            for (int i = 0; i < 8; i++) squares += x[c][i] * x[c][i];
        }
        const float inverse = rsqrtf(row_sum(squares, parts) / DIM + eps);
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int column = (c * ROW_THREADS + thread) * 8;
            if (!valid || column >= DIM) continue;
            float factor[8];
            load8(factor, w + column);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                x[c][i] *= inverse;
                if (WEIGHT) dw[c][i] += g[c][i] * x[c][i];
                g[c][i] *= factor[i];
                dot += g[c][i] * x[c][i];
            }
        }
        dot = row_sum(dot, parts) / DIM;
#pragma unroll
        for (int c = 0; c < CHUNKS; c++) {
            const int column = (c * ROW_THREADS + thread) * 8;
            if (!valid || column >= DIM) continue;
            float r[8] = {};
            if (d_residual) load8(r, d_residual + (long long)row * d_residual_stride + column);
#pragma unroll
            for (int i = 0; i < 8; i++) r[i] += inverse * (g[c][i] - x[c][i] * dot);
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
