// What the attention kernels share: work lists, statistics, the pass before the backward.
//
// #define HEAD_DIM 64 or 128.
//
// A work list names the tiles of TILE = 128 rows of each document, once for every head, in the order in
// which they should start (costly ones first): int4 {tile in the document, first token of the document,
// its length, document · 1024 + head}. Query tile i costs i + 1, key tile j costs tiles − j.
//
// Statistics of the softmax: `lse`, [h, t] in f32, natural logarithm. The backward reads them from
// `stats`, f32 [2, h, padded]: plane 0 lse · log2 e, plane 1 Σ dO·O, where document n starting at token s
// lies at (s + 64 n) / 64 · 64, and rows after its end up to a multiple of 64 hold +inf and 0, which
// makes their probabilities 0. padded = (t + 64 n) / 64 · 64 for n documents.

#define TILE 128
#define LOG2_E 1.4426950408889634f
#define LN_2 0.6931471805599453f

struct Work {
    int row;    // first row of the tile within the document
    int start;  // first token of the document
    int length; // tokens of the document
    int head;
    int padded; // the document's place in `stats`
};

DEVICE Work read_work(int4 entry) {
    Work w;
    w.row = entry.x * TILE;
    w.start = entry.y;
    w.length = entry.z;
    w.head = entry.w & 1023;
    w.padded = (w.start + 64 * (entry.w >> 10)) & ~63;
    return w;
}

// stats from lse and Σ dO·O: one block of 256 threads for each entry of the query tiles' list.
KERNEL __launch_bounds__(256) attention_stats(const bf16* __restrict__ out, const bf16* __restrict__ d_out,
                                              const float* __restrict__ lse, float* __restrict__ stats,
                                              const int4* __restrict__ work, int out_stride, int d_out_stride,
                                              int tokens, int heads, int padded) {
    constexpr int LANES = HEAD_DIM / 8, ROWS = 256 / LANES;
    const Work w = read_work(work[blockIdx.x]);
    const int lane = threadIdx.x % LANES;
    const int end = (w.length + 63) / 64 * 64;
    float* const log_plane = stats + (long long)w.head * padded + w.padded;
    float* const delta_plane = log_plane + (long long)heads * padded;
#pragma unroll
    for (int i = 0; i < TILE / ROWS; i++) {
        const int row = w.row + i * ROWS + threadIdx.x / LANES;
        const bool valid = row < w.length;
        uint4 a = {0, 0, 0, 0}, b = {0, 0, 0, 0};
        if (valid) {
            const int column = w.head * HEAD_DIM + lane * 8;
            a = *(const uint4*)(out + (long long)(w.start + row) * out_stride + column);
            b = *(const uint4*)(d_out + (long long)(w.start + row) * d_out_stride + column);
        }
        float sum = low_half(a.x) * low_half(b.x) + high_half(a.x) * high_half(b.x) + low_half(a.y) * low_half(b.y) +
                    high_half(a.y) * high_half(b.y) + low_half(a.z) * low_half(b.z) + high_half(a.z) * high_half(b.z) +
                    low_half(a.w) * low_half(b.w) + high_half(a.w) * high_half(b.w);
        sum = lanes_sum<LANES>(sum);
        if (lane == 0 && row < end) {
            log_plane[row] = valid ? lse[(long long)w.head * tokens + w.start + row] * LOG2_E : INFINITY_F;
            delta_plane[row] = valid ? sum : 0.0f;
        }
    }
}
