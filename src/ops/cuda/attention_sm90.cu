// Attention for sm_90a by warpgroup products and the copy engine: the contract of attention.cu, the scheme of
// FlashAttention-3 (arXiv 2407.08608) with a two-kernel backward that needs no atomics.
//
// A block stays for many tiles of the work list: the first is its own number, later ones come from `counter`
// (0 before the first launch; every launch leaves it at 0). Which block works on a tile changes no bit of the
// result. 3 warpgroups: one thread of the first brings tiles, the other two compute 64 rows each.
// grid = min(entries, multiprocessors), 384 threads.
//
// Tensor maps: 3 dimensions {HEAD_DIM, heads, tokens} of bf16, strides {HEAD_DIM · 2, row stride · 2} bytes, box
// {64, 1, rows}, 128-byte swizzle, zeros outside; rows = 128, but 64 for q and d_out in attention_dkdv_sm90.
// A copied tile may hold rows of the next document; causality or `stats` gives them probability 0, and they are
// never stored.
//
// After hopper.cu and attention_work.cu.

// The two halves take turns at issuing the forward's products; with small heads it costs more than it brings.
#define PING_PONG (HEAD_DIM == 128)

#define PANELS (HEAD_DIM / 64)
#define TILE_BYTES (TILE * HEAD_DIM * 2)
#define CONTROL_BYTES 1024
#define CONSUMERS 256
#define NO_WORK (-1)

// A ring of two slots: full and empty barriers at `barriers`, 8 bytes each: full[2], empty[2].
struct Ring {
    u32 barriers, slot, phase;
    METHOD u32 full() const { return barriers + slot * 8; }
    METHOD u32 empty() const { return barriers + 16 + slot * 8; }
    METHOD void wait_full() const { barrier_wait(full(), phase); }
    METHOD void wait_empty() const { barrier_wait(empty(), phase ^ 1); }
    // By every thread of the consumers, once it is done with the slot. (One arrival a warp, after __syncwarp, is as right
    // and no faster, but racecheck doesn't follow it.)
    METHOD void release() const { barrier_arrive(empty()); }
    METHOD void advance() {
        slot ^= 1;
        if (slot == 0) phase ^= 1;
    }
};
DEVICE Ring ring(u32 control, int index) { return {control + index * 32, 0, 0}; }

// Barriers of `rings` rings: one arrival (with bytes) fills a slot, one of each consumer empties it.
DEVICE void start_rings(u32 control, int rings) {
    if (threadIdx.x == 0) {
        for (int i = 0; i < rings; i++)
            for (int slot = 0; slot < 2; slot++) {
                barrier_init(control + i * 32 + slot * 8, 1);
                barrier_init(control + i * 32 + 16 + slot * 8, CONSUMERS);
            }
        barrier_init_fence();
        fence_async();
    }
    __syncthreads();
}

// The block's next entry of the list, drawn as late as can be, so that short work evens out long; whoever draws the
// last number winds the counter back.
DEVICE int next_entry(int* counter, int entries) {
    const int drawn = atomicAdd(counter, 1);
    if (drawn == entries - 1) *(volatile int*)counter = 0;
    return drawn + gridDim.x;
}

template <int ROWS> DEVICE void copy_tile(u32 destination, const TensorMap* map, u32 barrier, int head, int token) {
#pragma unroll
    for (int panel = 0; panel < PANELS; panel++)
        copy_box(destination + panel * ROWS * 128, map, barrier, panel * 64, head, token);
}

// s[64, N] = a · bᵀ over HEAD_DIM; a: 64 rows in panels of A_ROWS rows, b: N rows in panels of N rows.
template <int A_ROWS, int N> DEVICE void product_rows(float (&s)[N / 2], u32 a, u32 b) {
    const u64 a_operand = operand(a, 16), b_operand = operand(b, 16);
#pragma unroll
    for (int step = 0; step < HEAD_DIM / 16; step++)
        Product<false>::run(s, a_operand + (step / 4 * A_ROWS * 8 + step % 4 * 2), b_operand + (step / 4 * N * 8 + step % 4 * 2),
                            step > 0);
}

// c[64, HEAD_DIM] (+)= p[64, K] · b[K, HEAD_DIM]; b: K rows in panels of K rows.
template <int K> DEVICE void product_columns(float (&c)[HEAD_DIM / 2], const u32 (&p)[K / 16][4], u32 b, bool add) {
    const u64 b_operand = operand(b, K * 128);
#pragma unroll
    for (int step = 0; step < K / 16; step++) Product<true>::run(c, p[step], b_operand + step * 128, add || step > 0);
}

// An accumulator as the first operand of the next product.
template <int N> DEVICE void pack_rows(u32 (&p)[N / 16][4], const float (&s)[N / 2]) {
#pragma unroll
    for (int step = 0; step < N / 16; step++)
#pragma unroll
        for (int i = 0; i < 4; i++) p[step][i] = pack_bf16(s[step * 8 + i * 2], s[step * 8 + i * 2 + 1]);
}

// The 16 rows of a warp from its accumulator through `tile` (panels of TILE rows) to global memory.
DEVICE void store_warp_rows(u32 tile, int first, bf16* rows, long long stride, int valid, const float (&x)[HEAD_DIM / 2],
                            float scale0, float scale1) {
    constexpr int CHUNKS = HEAD_DIM / 8;
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < CHUNKS; n++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int row = first + half * 8 + lane / 4;
            const float scale = half ? scale1 : scale0;
            store_shared(tile + n / 8 * (TILE * 128) + row * 128 + ((n % 8 ^ (row & 7)) << 4) + lane % 4 * 4,
                         pack_bf16(x[n * 4 + half * 2] * scale, x[n * 4 + half * 2 + 1] * scale));
        }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 16 * CHUNKS / 32; i++) {
        const int index = i * 32 + lane, row = first + index / CHUNKS, n = index % CHUNKS;
        const uint4 chunk = load_shared16(tile + n / 8 * (TILE * 128) + row * 128 + ((n % 8 ^ (row & 7)) << 4));
        if (row < valid) *(uint4*)(rows + row * stride + n * 8) = chunk;
    }
}

DEVICE int4 load_entry(u32 address) {
    const uint4 x = load_shared16(address);
    return {int(x.x), int(x.y), int(x.z), int(x.w)};
}
DEVICE void store_entry(u32 address, int4 x) {
    store_shared(address, x.x);
    store_shared(address + 4, x.y);
    store_shared(address + 8, x.z);
    store_shared(address + 12, x.w);
}

// ---- forward ------------------------------------------------------------------------------------
// Shared memory: 1024 + 6 tiles: q 2, k 2, v 2.

DEVICE void forward_bring(u32 control, const TensorMap* q_map, const TensorMap* k_map, const TensorMap* v_map,
                          const int4* work, int entries, int* counter, int group) {
    Ring q = ring(control, 0), k = ring(control, 1), v = ring(control, 2);
    const u32 q_tiles = control + CONTROL_BYTES, k_tiles = q_tiles + 2 * TILE_BYTES, v_tiles = k_tiles + 2 * TILE_BYTES;
    int index = blockIdx.x;
    for (;;) {
        const bool more = index < entries;
        const int4 entry = more ? work[index] : int4{NO_WORK, 0, 0, 0};
        q.wait_empty();
        store_entry(control + 512 + q.slot * 16, entry);
        if (!more) {
            barrier_arrive(q.full());
            return;
        }
        const Work w = read_work(entry);
        barrier_arrive_expect(q.full(), TILE_BYTES);
        copy_tile<TILE>(q_tiles + q.slot * TILE_BYTES, q_map, q.full(), w.head, w.start + w.row);
        q.advance();
        for (int row = w.row; row >= 0; row -= TILE) {
            k.wait_empty();
            barrier_arrive_expect(k.full(), TILE_BYTES);
            copy_tile<TILE>(k_tiles + k.slot * TILE_BYTES, k_map, k.full(), w.head / group, w.start + row);
            k.advance();
            v.wait_empty();
            barrier_arrive_expect(v.full(), TILE_BYTES);
            copy_tile<TILE>(v_tiles + v.slot * TILE_BYTES, v_map, v.full(), w.head / group, w.start + row);
            v.advance();
        }
        index = next_entry(counter, entries);
    }
}

// Scores to probabilities; the row's running maximum and (the thread's part of) its sum.
DEVICE void softmax_rows(float (&s)[TILE / 2], float (&maximum)[2], float (&sum)[2], float (&shrink)[2], float log_scale) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float top = maximum[half];
#pragma unroll
        for (int n = 0; n < TILE / 8; n++) top = fmaxf(top, fmaxf(s[n * 4 + half * 2], s[n * 4 + half * 2 + 1]));
        top = lanes_max<4>(top);
        shrink[half] = ex2((maximum[half] - top) * log_scale);
        maximum[half] = top;
        const float offset = top * log_scale;
        float part = 0.0f;
#pragma unroll
        for (int n = 0; n < TILE / 8; n++)
#pragma unroll
            for (int j = 0; j < 2; j++) {
                float& x = s[n * 4 + half * 2 + j];
                x = ex2(x * log_scale - offset);
                part += x;
            }
        sum[half] = sum[half] * shrink[half] + part;
    }
}

KERNEL __launch_bounds__(384, 1)
    attention_forward_sm90(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                           const __grid_constant__ TensorMap v_map, bf16* __restrict__ out, float* __restrict__ lse,
                           const int4* __restrict__ work, int entries, int* __restrict__ counter, int out_stride,
                           int tokens, int group, float scale) {
    DYNAMIC_SHARED(memory);
    const u32 control = shared_address(memory);
    start_rings(control, 3);
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        registers_lower<40>();
        if (threadIdx.x == 0) forward_bring(control, &q_map, &k_map, &v_map, work, entries, counter, group);
    } else {
        registers_raise<232>();
        Ring q = ring(control, 0), k = ring(control, 1), v = ring(control, 2);
        const u32 q_tiles = control + CONTROL_BYTES, k_tiles = q_tiles + 2 * TILE_BYTES, v_tiles = k_tiles + 2 * TILE_BYTES;
        const int half_tile = warpgroup - 1, lane = threadIdx.x % 32;
        const int warp_row = half_tile * 64 + threadIdx.x % 128 / 32 * 16;
        const float log_scale = scale * LOG2_E;
        float o[HEAD_DIM / 2], s[TILE / 2];
        u32 p[TILE / 16][4];
        if (PING_PONG && half_tile == 1) threads_arrive(1, 256);
        for (;;) {
            q.wait_full();
            const int4 entry = load_entry(control + 512 + q.slot * 16);
            if (entry.x == NO_WORK) break;
            const Work w = read_work(entry);
            const u32 q_tile = q_tiles + q.slot * TILE_BYTES, q_half = q_tile + half_tile * 64 * 128;
            float maximum[2] = {-INFINITY_F, -INFINITY_F}, sum[2] = {0.0f, 0.0f}, shrink[2];

            k.wait_full();
            products_fence();
            product_rows<TILE, TILE>(s, q_half, k_tiles + k.slot * TILE_BYTES);
            products_commit();
            products_wait<0>();
            pin(s);
            k.release();
            k.advance();
#pragma unroll
            for (int i = 0; i < TILE / 2; i++) {
                const int row = warp_row + i % 4 / 2 * 8 + lane / 4, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
                if (column > row) s[i] = -INFINITY_F;
            }
            softmax_rows(s, maximum, sum, shrink, log_scale);
            pack_rows<TILE>(p, s);
            bool started = false;
            for (int row = w.row - TILE; row >= 0; row -= TILE) {
                k.wait_full();
                if (PING_PONG) threads_sync(1 + half_tile, 256);
                pin(s);
                pin(o);
                products_fence();
                product_rows<TILE, TILE>(s, q_half, k_tiles + k.slot * TILE_BYTES);
                products_commit();
                v.wait_full();
                product_columns<TILE>(o, p, v_tiles + v.slot * TILE_BYTES, started);
                products_commit();
                if (PING_PONG) threads_arrive(2 - half_tile, 256);
                started = true;
                products_wait<1>();
                pin(s);
                k.release();
                k.advance();
                softmax_rows(s, maximum, sum, shrink, log_scale);
                products_wait<0>();
                pin(o);
                v.release();
                v.advance();
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 2; i++) o[i] *= shrink[i % 4 / 2];
                pack_rows<TILE>(p, s);
            }
            v.wait_full();
            pin(o);
            products_fence();
            product_columns<TILE>(o, p, v_tiles + v.slot * TILE_BYTES, started);
            products_commit();
            products_wait<0>();
            pin(o);
            v.release();
            v.advance();

            float inverse[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float total = lanes_sum<4>(sum[half]);
                inverse[half] = 1.0f / total;
                const int row = w.row + warp_row + half * 8 + lane / 4;
                if (lane % 4 == 0 && row < w.length)
                    lse[(long long)w.head * tokens + w.start + row] = maximum[half] * scale + logf(total);
            }
            threads_sync(3 + half_tile, 128); // the whole warpgroup is done with its rows of q
            store_warp_rows(q_tile, warp_row, out + (long long)(w.start + w.row) * out_stride + w.head * HEAD_DIM, out_stride,
                            w.length - w.row, o, inverse[0], inverse[1]);
            fence_async();
            __syncwarp();
            q.release();
            q.advance();
        }
    }
}

// ---- dQ -----------------------------------------------------------------------------------------
// Shared memory: 1024 + 7 tiles: q, d_out, k 2, v 2, one to store through.

DEVICE void dq_bring(u32 control, const TensorMap* q_map, const TensorMap* k_map, const TensorMap* v_map,
                     const TensorMap* d_out_map, const int4* work, int entries, int* counter, int group) {
    Ring q = ring(control, 0), k = ring(control, 1), v = ring(control, 2);
    const u32 q_tile = control + CONTROL_BYTES, d_out_tile = q_tile + TILE_BYTES;
    const u32 k_tiles = d_out_tile + TILE_BYTES, v_tiles = k_tiles + 2 * TILE_BYTES;
    int index = blockIdx.x;
    bool first = true;
    for (;;) {
        const bool more = index < entries;
        const int4 entry = more ? work[index] : int4{NO_WORK, 0, 0, 0};
        // Both slots of this ring stand for the one pair of tiles: the one before must be empty as well.
        if (!first) {
            Ring before = q;
            before.slot ^= 1;
            if (q.slot == 0) before.phase ^= 1;
            barrier_wait(before.empty(), before.phase);
        }
        first = false;
        store_entry(control + 512 + q.slot * 16, entry);
        if (!more) {
            barrier_arrive(q.full());
            return;
        }
        const Work w = read_work(entry);
        barrier_arrive_expect(q.full(), 2 * TILE_BYTES);
        copy_tile<TILE>(q_tile, q_map, q.full(), w.head, w.start + w.row);
        copy_tile<TILE>(d_out_tile, d_out_map, q.full(), w.head, w.start + w.row);
        q.advance();
        for (int row = w.row; row >= 0; row -= TILE) {
            k.wait_empty();
            barrier_arrive_expect(k.full(), TILE_BYTES);
            copy_tile<TILE>(k_tiles + k.slot * TILE_BYTES, k_map, k.full(), w.head / group, w.start + row);
            k.advance();
            v.wait_empty();
            barrier_arrive_expect(v.full(), TILE_BYTES);
            copy_tile<TILE>(v_tiles + v.slot * TILE_BYTES, v_map, v.full(), w.head / group, w.start + row);
            v.advance();
        }
        index = next_entry(counter, entries);
    }
}

KERNEL __launch_bounds__(384, 1)
    attention_dq_sm90(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                      const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap d_out_map,
                      const float* __restrict__ stats, bf16* __restrict__ dq, const int4* __restrict__ work, int entries,
                      int* __restrict__ counter, int dq_stride, int heads, int padded, int group, float scale) {
    DYNAMIC_SHARED(memory);
    const u32 control = shared_address(memory);
    start_rings(control, 3);
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        registers_lower<40>();
        if (threadIdx.x == 0) dq_bring(control, &q_map, &k_map, &v_map, &d_out_map, work, entries, counter, group);
    } else {
        registers_raise<232>();
        Ring q = ring(control, 0), k = ring(control, 1), v = ring(control, 2);
        const int half_tile = warpgroup - 1, lane = threadIdx.x % 32;
        const u32 q_half = control + CONTROL_BYTES + half_tile * 64 * 128, d_out_half = q_half + TILE_BYTES;
        const u32 k_tiles = control + CONTROL_BYTES + 2 * TILE_BYTES, v_tiles = k_tiles + 2 * TILE_BYTES;
        const u32 store_tile = v_tiles + 2 * TILE_BYTES;
        const int warp_row = half_tile * 64 + threadIdx.x % 128 / 32 * 16;
        const float log_scale = scale * LOG2_E;
        float x[HEAD_DIM / 2], s[TILE / 2], dp[TILE / 2];
        u32 ds[TILE / 16][4];
        for (;;) {
            q.wait_full();
            const int4 entry = load_entry(control + 512 + q.slot * 16);
            if (entry.x == NO_WORK) break;
            const Work w = read_work(entry);
            const float* const log_plane = stats + (long long)w.head * padded + w.padded;
            const float* const delta_plane = log_plane + (long long)heads * padded;
            float log_sum[2], delta[2];
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = w.row + warp_row + half * 8 + lane / 4;
                log_sum[half] = row < w.length ? log_plane[row] : INFINITY_F;
                delta[half] = row < w.length ? delta_plane[row] : 0.0f;
            }
            bool started = false;
            Ring before = k;
            for (int row = w.row; row >= 0; row -= TILE) {
                k.wait_full();
                pin(s);
                pin(dp);
                products_fence();
                product_rows<TILE, TILE>(s, q_half, k_tiles + k.slot * TILE_BYTES);
                products_commit();
                products_wait<1>();
                if (started) before.release();
                before = k;
                v.wait_full();
                product_rows<TILE, TILE>(dp, d_out_half, v_tiles + v.slot * TILE_BYTES);
                products_commit();
                products_wait<1>();
                pin(s);
#pragma unroll
                for (int i = 0; i < TILE / 2; i++) s[i] = ex2(s[i] * log_scale - log_sum[i % 4 / 2]);
                if (row == w.row) {
#pragma unroll
                    for (int i = 0; i < TILE / 2; i++)
                        if (i / 4 * 8 + lane % 4 * 2 + i % 2 > warp_row + i % 4 / 2 * 8 + lane / 4) s[i] = 0.0f;
                }
                products_wait<0>();
                pin(dp);
                v.release();
                v.advance();
                if (row == 0) q.release();
#pragma unroll
                for (int i = 0; i < TILE / 2; i++) s[i] *= dp[i] - delta[i % 4 / 2];
                pack_rows<TILE>(ds, s);
                pin(x);
                products_fence();
                product_columns<TILE>(x, ds, k_tiles + k.slot * TILE_BYTES, started);
                products_commit();
                started = true;
                k.advance();
            }
            products_wait<0>();
            pin(x);
            before.release();
            q.advance();
            store_warp_rows(store_tile, warp_row, dq + (long long)(w.start + w.row) * dq_stride + w.head * HEAD_DIM, dq_stride,
                            w.length - w.row, x, scale, scale);
            __syncwarp();
        }
    }
}

// ---- dK, dV -------------------------------------------------------------------------------------
// Shared memory: 1024 + 4 tiles (k 2, v 2) + 4 half tiles (q 2, d_out 2) + 1024.

#define QUERIES 64
#define BLOCK_BYTES (QUERIES * HEAD_DIM * 2)

DEVICE void dkdv_bring(u32 control, const TensorMap* q_map, const TensorMap* k_map, const TensorMap* v_map,
                       const TensorMap* d_out_map, const float* stats, const int4* work, int entries, int* counter,
                       int heads, int padded, int group) {
    Ring kv = ring(control, 0), q = ring(control, 1), d_out = ring(control, 2);
    const u32 k_tiles = control + CONTROL_BYTES, v_tiles = k_tiles + 2 * TILE_BYTES;
    const u32 q_blocks = v_tiles + 2 * TILE_BYTES, d_out_blocks = q_blocks + 2 * BLOCK_BYTES;
    const u32 stats_blocks = d_out_blocks + 2 * BLOCK_BYTES; // [log sums 2, deltas 2] × 64
    int index = blockIdx.x;
    for (;;) {
        const bool more = index < entries;
        const int4 entry = more ? work[index] : int4{NO_WORK, 0, 0, 0};
        kv.wait_empty();
        store_entry(control + 512 + kv.slot * 16, entry);
        if (!more) {
            barrier_arrive(kv.full());
            return;
        }
        const Work w = read_work(entry);
        barrier_arrive_expect(kv.full(), 2 * TILE_BYTES);
        copy_tile<TILE>(k_tiles + kv.slot * TILE_BYTES, k_map, kv.full(), w.head, w.start + w.row);
        copy_tile<TILE>(v_tiles + kv.slot * TILE_BYTES, v_map, kv.full(), w.head, w.start + w.row);
        kv.advance();
        for (int head = w.head * group; head < (w.head + 1) * group; head++) {
            const float* const log_plane = stats + (long long)head * padded + w.padded;
            const float* const delta_plane = log_plane + (long long)heads * padded;
            for (int row = w.row; row < w.length; row += QUERIES) {
                q.wait_empty();
                barrier_arrive_expect(q.full(), BLOCK_BYTES + QUERIES * 4);
                copy_tile<QUERIES>(q_blocks + q.slot * BLOCK_BYTES, q_map, q.full(), head, w.start + row);
                copy_row(stats_blocks + q.slot * 256, log_plane + row, QUERIES * 4, q.full());
                q.advance();
                d_out.wait_empty();
                barrier_arrive_expect(d_out.full(), BLOCK_BYTES + QUERIES * 4);
                copy_tile<QUERIES>(d_out_blocks + d_out.slot * BLOCK_BYTES, d_out_map, d_out.full(), head, w.start + row);
                copy_row(stats_blocks + 512 + d_out.slot * 256, delta_plane + row, QUERIES * 4, d_out.full());
                d_out.advance();
            }
        }
        index = next_entry(counter, entries);
    }
}

KERNEL __launch_bounds__(384, 1)
    attention_dkdv_sm90(const __grid_constant__ TensorMap q_map, const __grid_constant__ TensorMap k_map,
                        const __grid_constant__ TensorMap v_map, const __grid_constant__ TensorMap d_out_map,
                        const float* __restrict__ stats, bf16* __restrict__ dk, bf16* __restrict__ dv,
                        const int4* __restrict__ work, int entries, int* __restrict__ counter, int dk_stride,
                        int dv_stride, int heads, int padded, int group, float scale) {
    DYNAMIC_SHARED(memory);
    const u32 control = shared_address(memory);
    start_rings(control, 3);
    const int warpgroup = __shfl_sync(0xffffffffu, threadIdx.x / 128, 0);
    if (warpgroup == 0) {
        registers_lower<40>();
        if (threadIdx.x == 0)
            dkdv_bring(control, &q_map, &k_map, &v_map, &d_out_map, stats, work, entries, counter, heads, padded, group);
    } else {
        registers_raise<232>();
        Ring kv = ring(control, 0), q = ring(control, 1), d_out = ring(control, 2);
        const u32 k_tiles = control + CONTROL_BYTES, v_tiles = k_tiles + 2 * TILE_BYTES;
        const u32 q_blocks = v_tiles + 2 * TILE_BYTES, d_out_blocks = q_blocks + 2 * BLOCK_BYTES;
        const int half_tile = warpgroup - 1, lane = threadIdx.x % 32;
        const u32 stats_blocks = d_out_blocks + 2 * BLOCK_BYTES + lane % 4 * 8;
        const int warp_row = half_tile * 64 + threadIdx.x % 128 / 32 * 16;
        const float log_scale = scale * LOG2_E;
        float x[HEAD_DIM / 2], y[HEAD_DIM / 2]; // dK, dV
        float s[QUERIES / 2], dp[QUERIES / 2];
        u32 p[QUERIES / 16][4], ds[QUERIES / 16][4];
        for (;;) {
            kv.wait_full();
            const int4 entry = load_entry(control + 512 + kv.slot * 16);
            if (entry.x == NO_WORK) break;
            const Work w = read_work(entry);
            const u32 k_tile = k_tiles + kv.slot * TILE_BYTES, v_tile = v_tiles + kv.slot * TILE_BYTES;
            const u32 k_half = k_tile + half_tile * 64 * 128, v_half = v_tile + half_tile * 64 * 128;
            int rounds = group * ((w.length - w.row + QUERIES - 1) / QUERIES);
            int query = w.row; // first query of the block
            bool started = false;
            Ring q_before = q;
            bool pending = false; // q_before is still being read
            for (; rounds > 0; rounds--) {
                const u32 q_block = q_blocks + q.slot * BLOCK_BYTES, d_out_block = d_out_blocks + d_out.slot * BLOCK_BYTES;
                const u32 log_sums = stats_blocks + q.slot * 256, deltas = stats_blocks + 512 + d_out.slot * 256;
                q.wait_full();
                if (half_tile == 1 && query == w.row) { // these queries come before all of this half's keys
                    d_out.wait_full();
                    products_wait<0>();
                    if (pending) q_before.release();
                    pending = false;
                    q.release();
                    q.advance();
                    d_out.release();
                    d_out.advance();
                    query += QUERIES;
                    if (query >= w.length) query = w.row;
                    continue;
                }
                pin(s);
                pin(dp);
                products_fence();
                product_rows<TILE, QUERIES>(s, k_half, q_block);
                products_commit();
                products_wait<1>();
                if (pending) q_before.release();
                q_before = q;
                pending = true;
                d_out.wait_full();
                product_rows<TILE, QUERIES>(dp, v_half, d_out_block);
                products_commit();
                products_wait<1>();
                pin(s);
#pragma unroll
                for (int n = 0; n < QUERIES / 8; n++) {
                    const float2 log_sum = load_shared_float2(log_sums + n * 32);
#pragma unroll
                    for (int i = 0; i < 4; i++) s[n * 4 + i] = ex2(s[n * 4 + i] * log_scale - (i % 2 ? log_sum.y : log_sum.x));
                }
                if (query < w.row + half_tile * 64 + 64) {
                    const int key = w.row + warp_row + lane / 4 - query;
#pragma unroll
                    for (int i = 0; i < QUERIES / 2; i++)
                        if (key + i % 4 / 2 * 8 > i / 4 * 8 + lane % 4 * 2 + i % 2) s[i] = 0.0f;
                }
                pack_rows<QUERIES>(p, s);
                pin(y);
                products_fence();
                product_columns<QUERIES>(y, p, d_out_block, started);
                products_commit();
                products_wait<1>();
                pin(dp);
#pragma unroll
                for (int n = 0; n < QUERIES / 8; n++) {
                    const float2 delta = load_shared_float2(deltas + n * 32);
#pragma unroll
                    for (int i = 0; i < 4; i++) s[n * 4 + i] *= dp[n * 4 + i] - (i % 2 ? delta.y : delta.x);
                }
                pack_rows<QUERIES>(ds, s);
                pin(x);
                products_fence();
                product_columns<QUERIES>(x, ds, q_block, started);
                products_commit();
                started = true;
                products_wait<1>();
                pin(y);
                d_out.release();
                q.advance();
                d_out.advance();
                query += QUERIES;
                if (query >= w.length) query = w.row;
            }
            products_wait<0>();
            pin(x);
            if (pending) q_before.release();
            threads_sync(3 + half_tile, 128); // the whole warpgroup is done with its rows of k and v
            const long long first = w.start + w.row;
            store_warp_rows(k_tile, warp_row, dk + first * dk_stride + w.head * HEAD_DIM, dk_stride, w.length - w.row, x, scale,
                            scale);
            store_warp_rows(v_tile, warp_row, dv + first * dv_stride + w.head * HEAD_DIM, dv_stride, w.length - w.row, y, 1.0f,
                            1.0f);
            fence_async();
            __syncwarp();
            kv.release();
            kv.advance();
        }
    }
}
