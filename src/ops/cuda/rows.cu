// Trained rows out of all rows, and their gradients back. After elements.cu.
//
// `rows` ascends; a row named several times counts several times. width is a multiple of 8; 256 threads.

// out[i] = x[rows[i]], i < n. grid = ceil(n · width / 2048).
KERNEL __launch_bounds__(256)
    gather_rows(const element* __restrict__ x, const int* __restrict__ rows, element* __restrict__ out, int n, int width) {
    const u32 index = blockIdx.x * 256 + threadIdx.x, chunks = width / 8, i = index / chunks, column = index % chunks * 8;
    if (i >= n) return;
    float y[8];
    load8(y, x + (long long)rows[i] * width + column);
    store8(out + (long long)i * width + column, y);
}

// out[t] = factor · Σ slopes[i] over the i with rows[i] = t, for all t < tokens. grid = ceil(tokens · width / 2048).
KERNEL __launch_bounds__(256)
    scatter_rows(const element* __restrict__ slopes, const int* __restrict__ rows, const float* __restrict__ factor,
                 element* __restrict__ out, int n, int tokens, int width) {
    const u32 index = blockIdx.x * 256 + threadIdx.x, chunks = width / 8, column = index % chunks * 8;
    const int token = index / chunks;
    if (token >= tokens) return;
    int first = 0, end = n; // the first i with rows[i] >= token
    while (first < end) {
        const int middle = (first + end) / 2;
        if (rows[middle] < token)
            first = middle + 1;
        else
            end = middle;
    }
    float sum[8] = {};
    for (int i = first; i < n && rows[i] == token; i++) {
        float x[8];
        load8(x, slopes + (long long)i * width + column);
#pragma unroll
        for (int j = 0; j < 8; j++) sum[j] += x[j];
    }
    const float by = *factor;
#pragma unroll
    for (int j = 0; j < 8; j++) sum[j] *= by;
    store8(out + (long long)token * width + column, sum);
}
