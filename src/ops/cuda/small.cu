// Small kernels that serve several others. After elements.cu.

// Adds partial sums [blocks, width] in their order: out[column] (+)= Σ. grid = ceil(width / 32), 256 threads.
KERNEL __launch_bounds__(256) sum_partials(const float* __restrict__ partials, float* __restrict__ out, int blocks, int width,
                                           int accumulate) {
    __shared__ float parts[8][32];
    const int lane = threadIdx.x % 32, line = threadIdx.x / 32, column = blockIdx.x * 32 + lane;
    float sum = 0.0f;
    if (column < width)
        for (int block = line; block < blocks; block += 8) sum += partials[(long long)block * width + column];
    parts[line][lane] = sum;
    __syncthreads();
    if (line == 0 && column < width) {
        for (int i = 1; i < 8; i++) sum += parts[i][lane];
        out[column] = (accumulate ? out[column] : 0.0f) + sum;
    }
}

// A block of f32 into columns of a wider matrix: to[r, c] = scale · from[r, c], r < rows, c < columns (a multiple
// of 8). This is how an adapter's A or B gets into the spare rows or columns beside a frozen weight.
// grid = ceil(rows · columns / 2048), 256 threads.
KERNEL __launch_bounds__(256) copy_block(const float* __restrict__ from, element* __restrict__ to, int from_stride, int to_stride,
                                         int rows, int columns, float scale) {
    const int index = blockIdx.x * 256 + threadIdx.x, chunks = columns / 8, row = index / chunks, column = index % chunks * 8;
    if (row >= rows) return;
    float x[8];
    load8(x, from + (long long)row * from_stride + column);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= scale;
    store8(to + (long long)row * to_stride + column, x);
}

// to[r, c] = from[r, c], r < rows, c < columns (a multiple of 8). grid = ceil(rows · columns / 2048), 256 threads.
KERNEL __launch_bounds__(256) copy_rows(const element* __restrict__ from, element* __restrict__ to, int from_stride,
                                        int to_stride, int rows, int columns) {
    const int index = blockIdx.x * 256 + threadIdx.x, chunks = columns / 8, row = index / chunks, column = index % chunks * 8;
    if (row >= rows) return;
    Eight<element> x;
    x.load(from + (long long)row * from_stride + column);
    float y[8];
    x.widen(y);
    store8(to + (long long)row * to_stride + column, y);
}
