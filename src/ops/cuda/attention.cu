// Attention by mma.sync, for sm_80 and later: causal inside each document, grouped key/value heads,
// bf16 in and out, softmax and sums in f32 (FlashAttention-2's scheme, arXiv 2307.08691). The backward is
// two kernels, one for dQ and one for dK and dV, so that every output is summed by one thread in a fixed
// order: no atomics, the same bits each time, for 7 products instead of 5.
//
// After attention_work.cu. #define STAGES 2 (1 where a block may have only 100 KB of shared memory).

#define ROW_BYTES (HEAD_DIM * 2)
#define DIM_STEPS (HEAD_DIM / 16)

// A tile in shared memory: rows of HEAD_DIM elements, 16-byte chunk c of row r at chunk c ^ (r & 7).
DEVICE u32 chunk_address(u32 tile, int row, int chunk) {
    return tile + row * ROW_BYTES + ((chunk ^ (row & 7)) << 4);
}

// Rows of a tensor to shared memory, zeros from row `valid` on.
template <int ROWS, int THREADS> DEVICE void load_tile(u32 tile, const bf16* rows, long long stride, int valid) {
    constexpr int CHUNKS = HEAD_DIM / 8, STEP = THREADS / CHUNKS; // a multiple of 8 rows: the chunk's place stays
    const int row = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
    const u32 to = chunk_address(tile, row, chunk);
    const bf16* from = rows + row * stride + chunk * 8;
#pragma unroll
    for (int i = 0; i < ROWS / STEP; i++, from += STEP * stride)
        copy16_async(to + i * STEP * ROW_BYTES, from, row + i * STEP < valid);
}

// a[16 rows from `row`][16 columns from 16 · step]
DEVICE void load_a(u32 (&a)[4], u32 tile, int row, int step) {
    const int lane = threadIdx.x % 32;
    load_matrices(a, chunk_address(tile, row + (lane & 15), 2 * step + (lane >> 4)));
}
// Two b's of a product with the tile transposed: 8 columns each from tile rows `row`, `row` + 8.
DEVICE void load_b_rows(u32 (&b)[4], u32 tile, int row, int step) {
    const int lane = threadIdx.x % 32;
    load_matrices(b, chunk_address(tile, row + (lane & 7) + (lane >> 4) * 8, 2 * step + ((lane >> 3) & 1)));
}
// Two b's of a product with the tile: 16 tile rows from `row`, columns 16 · pair and + 8.
DEVICE void load_b_columns(u32 (&b)[4], u32 tile, int row, int pair) {
    const int lane = threadIdx.x % 32;
    load_matrices_transposed(b, chunk_address(tile, row + (lane & 15), 2 * pair + (lane >> 4)));
}

// A warp's ROWS rows as bf16 through shared memory to global memory, 16 bytes a thread.
template <int ROWS>
DEVICE void store_rows(u32 tile, bf16* rows, long long stride, int first, int valid, const float (&x)[ROWS / 16][HEAD_DIM / 8][4],
                       const float (&scale)[ROWS / 16][2]) {
    constexpr int CHUNKS = HEAD_DIM / 8;
    const int lane = threadIdx.x % 32;
    __syncwarp();
#pragma unroll
    for (int m = 0; m < ROWS / 16; m++)
#pragma unroll
        for (int n = 0; n < CHUNKS; n++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = first + m * 16 + half * 8 + lane / 4;
                store_shared(chunk_address(tile, row, n) + (lane % 4) * 4,
                             pack_bf16(x[m][n][2 * half] * scale[m][half], x[m][n][2 * half + 1] * scale[m][half]));
            }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < ROWS * CHUNKS / 32; i++) {
        const int index = i * 32 + lane, row = first + index / CHUNKS, chunk = index % CHUNKS;
        if (row < valid) *(uint4*)(rows + row * stride + chunk * 8) = load_shared16(chunk_address(tile, row, chunk));
    }
}

// The pairs of accumulators that are a's of the next product: rows × 16 columns from 16 · step.
DEVICE void pack_a(u32 (&a)[4], const float (&left)[4], const float (&right)[4]) {
    a[0] = pack_bf16(left[0], left[1]);
    a[1] = pack_bf16(left[2], left[3]);
    a[2] = pack_bf16(right[0], right[1]);
    a[3] = pack_bf16(right[2], right[3]);
}

// ---- forward ------------------------------------------------------------------------------------
// One block of 4 warps × 32 rows for each query tile; key blocks of 64 from the diagonal down.
// Shared memory: (128 + 2 · 64) · HEAD_DIM · 2 bytes.

#define KEYS 64

KERNEL __launch_bounds__(128, 2)
    attention_forward(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                      bf16* __restrict__ out, float* __restrict__ lse, const int4* __restrict__ work, int q_stride,
                      int k_stride, int v_stride, int out_stride, int tokens, int group, float scale) {
    DYNAMIC_SHARED(memory);
    const u32 q_tile = shared_address(memory), k_tile = q_tile + TILE * ROW_BYTES, v_tile = k_tile + KEYS * ROW_BYTES;
    const Work w = read_work(work[blockIdx.x]);
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 32;
    const int kv_column = w.head / group * HEAD_DIM;
    const bf16* const k_rows = k + (long long)w.start * k_stride + kv_column;
    const bf16* const v_rows = v + (long long)w.start * v_stride + kv_column;
    const int last = (min(w.row + TILE, w.length) - 1) / KEYS;

    load_tile<TILE, 128>(q_tile, q + (long long)(w.start + w.row) * q_stride + w.head * HEAD_DIM, q_stride, w.length - w.row);
    load_tile<KEYS, 128>(k_tile, k_rows + (long long)last * KEYS * k_stride, k_stride, w.length - last * KEYS);
    copies_commit();

    const float log_scale = scale * LOG2_E;
    float o[2][HEAD_DIM / 8][4] = {}, maximum[2][2], sum[2][2];
    for (int m = 0; m < 2; m++)
        for (int half = 0; half < 2; half++) maximum[m][half] = -INFINITY_F, sum[m][half] = 0.0f;

    for (int block = last; block >= 0; block--) {
        copies_wait<0>();
        __syncthreads();
        load_tile<KEYS, 128>(v_tile, v_rows + (long long)block * KEYS * v_stride, v_stride, w.length - block * KEYS);
        copies_commit();
        const int first_row = w.row + warp_row;
        const bool reached = block * KEYS <= first_row + 31;
        float s[2][KEYS / 8][4] = {};
        if (reached) {
#pragma unroll
            for (int step = 0; step < DIM_STEPS; step++) {
                u32 a[2][4];
                load_a(a[0], q_tile, warp_row, step);
                load_a(a[1], q_tile, warp_row + 16, step);
#pragma unroll
                for (int n = 0; n < KEYS / 16; n++) {
                    u32 b[4];
                    load_b_rows(b, k_tile, n * 16, step);
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        mma(s[m][2 * n], a[m], b[0], b[1]);
                        mma(s[m][2 * n + 1], a[m], b[2], b[3]);
                    }
                }
            }
        }
        copies_wait<0>();
        __syncthreads();
        if (block > 0) {
            load_tile<KEYS, 128>(k_tile, k_rows + (long long)(block - 1) * KEYS * k_stride, k_stride, KEYS);
            copies_commit();
        }
        if (!reached) continue;
        if (block * KEYS + KEYS - 1 > first_row) {
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        const int row = first_row + m * 16 + i / 2 * 8 + lane / 4;
                        const int column = block * KEYS + n * 8 + lane % 4 * 2 + i % 2;
                        if (column > row) s[m][n][i] = -INFINITY_F;
                    }
        }
        float shrink[2][2];
#pragma unroll
        for (int m = 0; m < 2; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float top = maximum[m][half];
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++) top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
                top = lanes_max<4>(top);
                const float offset = top * log_scale;
                shrink[m][half] = ex2((maximum[m][half] - top) * log_scale);
                maximum[m][half] = top;
                float part = 0.0f;
#pragma unroll
                for (int n = 0; n < KEYS / 8; n++)
#pragma unroll
                    for (int i = 2 * half; i < 2 * half + 2; i++) {
                        s[m][n][i] = ex2(s[m][n][i] * log_scale - offset);
                        part += s[m][n][i];
                    }
                sum[m][half] = sum[m][half] * shrink[m][half] + part;
            }
        // Maxima settle early: most blocks leave the output as it is.
        if (__any_sync(0xffffffffu, shrink[0][0] * shrink[0][1] * shrink[1][0] * shrink[1][1] != 1.0f)) {
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) o[m][n][i] *= shrink[m][i / 2];
        }
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            u32 a[2][4];
            pack_a(a[0], s[0][2 * step], s[0][2 * step + 1]);
            pack_a(a[1], s[1][2 * step], s[1][2 * step + 1]);
#pragma unroll
            for (int n = 0; n < HEAD_DIM / 16; n++) {
                u32 b[4];
                load_b_columns(b, v_tile, step * 16, n);
#pragma unroll
                for (int m = 0; m < 2; m++) {
                    mma(o[m][2 * n], a[m], b[0], b[1]);
                    mma(o[m][2 * n + 1], a[m], b[2], b[3]);
                }
            }
        }
    }

    float inverse[2][2];
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float total = lanes_sum<4>(sum[m][half]);
            inverse[m][half] = 1.0f / total;
            const int row = w.row + warp_row + m * 16 + half * 8 + lane / 4;
            if (lane % 4 == 0 && row < w.length)
                lse[(long long)w.head * tokens + w.start + row] = maximum[m][half] * scale + logf(total);
        }
    store_rows<32>(q_tile, out + (long long)(w.start + w.row) * out_stride + w.head * HEAD_DIM, out_stride, warp_row,
                   w.length - w.row, o, inverse);
}

// ---- dQ -----------------------------------------------------------------------------------------
// One block of 4 warps × 32 rows for each query tile; key blocks of 32.
// Shared memory: (2 · 128 + 2 · STAGES · 32) · HEAD_DIM · 2 bytes.

#define DQ_KEYS 32

KERNEL __launch_bounds__(128, STAGES)
    attention_dq(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                 const bf16* __restrict__ d_out, const float* __restrict__ stats, bf16* __restrict__ dq,
                 const int4* __restrict__ work, int q_stride, int k_stride, int v_stride, int d_out_stride,
                 int dq_stride, int heads, int padded, int group, float scale) {
    DYNAMIC_SHARED(memory);
    constexpr u32 BLOCK_BYTES = DQ_KEYS * ROW_BYTES;
    const u32 q_tile = shared_address(memory), d_out_tile = q_tile + TILE * ROW_BYTES;
    const u32 k_tiles = d_out_tile + TILE * ROW_BYTES, v_tiles = k_tiles + STAGES * BLOCK_BYTES;
    const Work w = read_work(work[blockIdx.x]);
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 32, first_row = w.row + warp_row;
    const int kv_column = w.head / group * HEAD_DIM;
    const bf16* const k_rows = k + (long long)w.start * k_stride + kv_column;
    const bf16* const v_rows = v + (long long)w.start * v_stride + kv_column;
    const int last = (min(w.row + TILE, w.length) - 1) / DQ_KEYS;

    const long long first = w.start + w.row;
    load_tile<TILE, 128>(q_tile, q + first * q_stride + w.head * HEAD_DIM, q_stride, w.length - w.row);
    load_tile<TILE, 128>(d_out_tile, d_out + first * d_out_stride + w.head * HEAD_DIM, d_out_stride, w.length - w.row);
    auto fetch = [&](int block, int stage) {
        const long long row = block * DQ_KEYS;
        load_tile<DQ_KEYS, 128>(k_tiles + stage * BLOCK_BYTES, k_rows + row * k_stride, k_stride, w.length - row);
        load_tile<DQ_KEYS, 128>(v_tiles + stage * BLOCK_BYTES, v_rows + row * v_stride, v_stride, w.length - row);
        copies_commit();
    };
    fetch(last, 0);

    const float log_scale = scale * LOG2_E;
    const float* const log_plane = stats + (long long)w.head * padded + w.padded;
    const float* const delta_plane = log_plane + (long long)heads * padded;
    float log_sum[2][2], delta[2][2], x[2][HEAD_DIM / 8][4] = {};
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first_row + m * 16 + half * 8 + lane / 4;
            log_sum[m][half] = row < w.length ? log_plane[row] : INFINITY_F;
            delta[m][half] = row < w.length ? delta_plane[row] : 0.0f;
        }

    int stage = 0;
    for (int block = last; block >= 0; block--) {
        copies_wait<0>();
        __syncthreads();
        if (STAGES == 2 && block > 0) fetch(block - 1, stage ^ 1);
        const u32 k_tile = k_tiles + stage * BLOCK_BYTES, v_tile = v_tiles + stage * BLOCK_BYTES;
        if (block * DQ_KEYS <= first_row + 31) {
            float s[2][DQ_KEYS / 8][4] = {}, dp[2][DQ_KEYS / 8][4] = {};
#pragma unroll
            for (int step = 0; step < DIM_STEPS; step++) {
                u32 a[2][4], b[4];
                load_a(a[0], q_tile, warp_row, step);
                load_a(a[1], q_tile, warp_row + 16, step);
#pragma unroll
                for (int n = 0; n < DQ_KEYS / 16; n++) {
                    load_b_rows(b, k_tile, n * 16, step);
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        mma(s[m][2 * n], a[m], b[0], b[1]);
                        mma(s[m][2 * n + 1], a[m], b[2], b[3]);
                    }
                }
                load_a(a[0], d_out_tile, warp_row, step);
                load_a(a[1], d_out_tile, warp_row + 16, step);
#pragma unroll
                for (int n = 0; n < DQ_KEYS / 16; n++) {
                    load_b_rows(b, v_tile, n * 16, step);
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        mma(dp[m][2 * n], a[m], b[0], b[1]);
                        mma(dp[m][2 * n + 1], a[m], b[2], b[3]);
                    }
                }
            }
            const bool diagonal = block * DQ_KEYS + DQ_KEYS - 1 > first_row;
#pragma unroll
            for (int m = 0; m < 2; m++)
#pragma unroll
                for (int n = 0; n < DQ_KEYS / 8; n++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float p = ex2(s[m][n][i] * log_scale - log_sum[m][i / 2]);
                        const int row = first_row + m * 16 + i / 2 * 8 + lane / 4;
                        if (diagonal && block * DQ_KEYS + n * 8 + lane % 4 * 2 + i % 2 > row) p = 0.0f;
                        s[m][n][i] = p * (dp[m][n][i] - delta[m][i / 2]);
                    }
#pragma unroll
            for (int step = 0; step < DQ_KEYS / 16; step++) {
                u32 a[2][4], b[4];
                pack_a(a[0], s[0][2 * step], s[0][2 * step + 1]);
                pack_a(a[1], s[1][2 * step], s[1][2 * step + 1]);
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 16; n++) {
                    load_b_columns(b, k_tile, step * 16, n);
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        mma(x[m][2 * n], a[m], b[0], b[1]);
                        mma(x[m][2 * n + 1], a[m], b[2], b[3]);
                    }
                }
            }
        }
        if (STAGES == 1 && block > 0) {
            __syncthreads();
            fetch(block - 1, 0);
        }
        if (STAGES == 2) stage ^= 1;
    }
    const float factors[2][2] = {{scale, scale}, {scale, scale}};
    store_rows<32>(q_tile, dq + first * dq_stride + w.head * HEAD_DIM, dq_stride, warp_row, w.length - w.row, x, factors);
}

// ---- dK, dV -------------------------------------------------------------------------------------
// One block of 8 warps × 16 keys for each key tile, over the query blocks of 64 of every head of its group.
// Shared memory: (2 · 128 + 2 · STAGES · 64) · HEAD_DIM · 2 + STAGES · 512 bytes.

#define QUERIES 64

KERNEL __launch_bounds__(256, 1)
    attention_dkdv(const bf16* __restrict__ q, const bf16* __restrict__ k, const bf16* __restrict__ v,
                   const bf16* __restrict__ d_out, const float* __restrict__ stats, bf16* __restrict__ dk,
                   bf16* __restrict__ dv, const int4* __restrict__ work, int q_stride, int k_stride, int v_stride,
                   int d_out_stride, int dk_stride, int dv_stride, int heads, int padded, int group, float scale) {
    DYNAMIC_SHARED(memory);
    constexpr u32 BLOCK_BYTES = QUERIES * ROW_BYTES;
    const u32 k_tile = shared_address(memory), v_tile = k_tile + TILE * ROW_BYTES;
    const u32 q_tiles = v_tile + TILE * ROW_BYTES, d_out_tiles = q_tiles + STAGES * BLOCK_BYTES;
    const u32 stats_tiles = d_out_tiles + STAGES * BLOCK_BYTES;
    const Work w = read_work(work[blockIdx.x]);
    const int lane = threadIdx.x % 32, warp_row = threadIdx.x / 32 * 16, first_key = w.row + warp_row;
    const int first_block = w.row / QUERIES, per_head = (w.length + QUERIES - 1) / QUERIES - first_block;
    const int rounds = group * per_head;

    const long long first = w.start + w.row;
    load_tile<TILE, 256>(k_tile, k + first * k_stride + w.head * HEAD_DIM, k_stride, w.length - w.row);
    load_tile<TILE, 256>(v_tile, v + first * v_stride + w.head * HEAD_DIM, v_stride, w.length - w.row);
    auto fetch = [&](int round, int stage) {
        const int head = w.head * group + round / per_head;
        const long long row = (long long)(first_block + round % per_head) * QUERIES;
        load_tile<QUERIES, 256>(q_tiles + stage * BLOCK_BYTES, q + (w.start + row) * q_stride + head * HEAD_DIM, q_stride,
                                w.length - row);
        load_tile<QUERIES, 256>(d_out_tiles + stage * BLOCK_BYTES, d_out + (w.start + row) * d_out_stride + head * HEAD_DIM,
                                d_out_stride, w.length - row);
        if (threadIdx.x < 32) {
            const int plane = threadIdx.x / 16 * heads + head, chunk = threadIdx.x % 16;
            copy16_async(stats_tiles + stage * 512 + threadIdx.x * 16,
                         stats + (long long)plane * padded + w.padded + row + chunk * 4, true);
        }
        copies_commit();
    };
    fetch(0, 0);

    const float log_scale = scale * LOG2_E;
    float x[1][HEAD_DIM / 8][4] = {}, y[1][HEAD_DIM / 8][4] = {}; // dK, dV
    int stage = 0;
    for (int round = 0; round < rounds; round++) {
        copies_wait<0>();
        __syncthreads();
        if (STAGES == 2 && round + 1 < rounds) fetch(round + 1, stage ^ 1);
        const u32 q_tile = q_tiles + stage * BLOCK_BYTES, d_out_tile = d_out_tiles + stage * BLOCK_BYTES;
        const u32 stats_tile = stats_tiles + stage * 512 + lane % 4 * 8;
        const int first_query = (first_block + round % per_head) * QUERIES;
        if (first_query + QUERIES - 1 >= first_key) {
            float s[QUERIES / 8][4] = {}, dp[QUERIES / 8][4] = {};
            u32 a[4], b[4];
#pragma unroll
            for (int step = 0; step < DIM_STEPS; step++) {
                load_a(a, k_tile, warp_row, step);
#pragma unroll
                for (int n = 0; n < QUERIES / 16; n++) {
                    load_b_rows(b, q_tile, n * 16, step);
                    mma(s[2 * n], a, b[0], b[1]);
                    mma(s[2 * n + 1], a, b[2], b[3]);
                }
            }
            const bool diagonal = first_query < first_key + 15;
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n++) {
                const float2 log_sum = load_shared_float2(stats_tile + n * 32);
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    s[n][i] = ex2(s[n][i] * log_scale - (i % 2 ? log_sum.y : log_sum.x));
                    const int query = first_query + n * 8 + lane % 4 * 2 + i % 2;
                    if (diagonal && first_key + i / 2 * 8 + lane / 4 > query) s[n][i] = 0.0f;
                }
            }
#pragma unroll
            for (int step = 0; step < QUERIES / 16; step++) {
                pack_a(a, s[2 * step], s[2 * step + 1]);
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 16; n++) {
                    load_b_columns(b, d_out_tile, step * 16, n);
                    mma(y[0][2 * n], a, b[0], b[1]);
                    mma(y[0][2 * n + 1], a, b[2], b[3]);
                }
            }
#pragma unroll
            for (int step = 0; step < DIM_STEPS; step++) {
                load_a(a, v_tile, warp_row, step);
#pragma unroll
                for (int n = 0; n < QUERIES / 16; n++) {
                    load_b_rows(b, d_out_tile, n * 16, step);
                    mma(dp[2 * n], a, b[0], b[1]);
                    mma(dp[2 * n + 1], a, b[2], b[3]);
                }
            }
#pragma unroll
            for (int n = 0; n < QUERIES / 8; n++) {
                const float2 delta = load_shared_float2(stats_tile + 256 + n * 32);
#pragma unroll
                for (int i = 0; i < 4; i++) s[n][i] *= dp[n][i] - (i % 2 ? delta.y : delta.x);
            }
#pragma unroll
            for (int step = 0; step < QUERIES / 16; step++) {
                pack_a(a, s[2 * step], s[2 * step + 1]);
#pragma unroll
                for (int n = 0; n < HEAD_DIM / 16; n++) {
                    load_b_columns(b, q_tile, step * 16, n);
                    mma(x[0][2 * n], a, b[0], b[1]);
                    mma(x[0][2 * n + 1], a, b[2], b[3]);
                }
            }
        }
        if (STAGES == 1 && round + 1 < rounds) {
            __syncthreads();
            fetch(round + 1, 0);
        }
        if (STAGES == 2) stage ^= 1;
    }
    // Each warp reads and overwrites only its own rows of K's and V's tiles.
    const float factors[1][2] = {{scale, scale}}, ones[1][2] = {{1.0f, 1.0f}};
    store_rows<16>(k_tile, dk + first * dk_stride + w.head * HEAD_DIM, dk_stride, warp_row, w.length - w.row, x, factors);
    store_rows<16>(v_tile, dv + first * dv_stride + w.head * HEAD_DIM, dv_stride, warp_row, w.length - w.row, y, ones);
}
