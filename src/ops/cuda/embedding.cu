// The gradient of an embedding, without sorting. After elements.cu.

// d_weight[id] = Σ of the rows of d_rows whose token is id, in their order; rows of other ids stay as they are (zeros
// before). The block of a token works where the token is its id's first. width: a multiple of 8.
// grid = tokens · ceil(width / 2048), 256 threads.
KERNEL __launch_bounds__(256) embedding_gradient(const element* __restrict__ d_rows, const int* __restrict__ ids,
                                                 element* __restrict__ d_weight, int stride, int tokens, int width) {
    __shared__ u32 warps[8], found[256];
    const int tiles = (width + 2047) / 2048, token = blockIdx.x / tiles;
    const int thread = threadIdx.x, column = blockIdx.x % tiles * 2048 + thread * 8, id = ids[token];
    int seen = 0;
    for (int i = thread; i < token; i += 256) seen |= ids[i] == id;
    if (__syncthreads_or(seen)) return;
    float sum[8] = {};
    for (int base = token; base < tokens; base += 1024) {
        u32 mine = 0;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int i = base + thread * 4 + j;
            mine |= u32(i < tokens && ids[i] == id) << j;
        }
        found[thread] = mine;
        const u32 lanes = __ballot_sync(0xffffffffu, mine != 0);
        if (thread % 32 == 0) warps[thread / 32] = lanes;
        if (__syncthreads_or(mine))
            for (int warp = 0; warp < 8; warp++)
                for (u32 left = warps[warp]; left; left &= left - 1) {
                    const int at = warp * 32 + __ffs(left) - 1;
                    for (int j = 0; j < 4; j++)
                        if ((found[at] >> j & 1) && column < width) {
                            float x[8];
                            load8(x, d_rows + (long long)(base + at * 4 + j) * stride + column);
#pragma unroll
                            for (int k = 0; k < 8; k++) sum[k] += x[k];
                        }
                }
        __syncthreads();
    }
    if (column < width) store8(d_weight + (long long)id * width + column, sum);
}
