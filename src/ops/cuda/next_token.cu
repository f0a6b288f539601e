// Attention of one token of a text to itself and the tokens before it, whose keys and values lie in order of tokens; the
// token's own are put behind them. After elements.cu. #define HEAD_DIM 64 or 128.
//
// A block for each query head. A team of TEAM lanes works on a token, each lane on 8 columns of the head; every team has
// a running maximum and sums of its own, joined at the end, always in the same order.

#define TEAM (HEAD_DIM / 8)
#define THREADS 512
#define TEAMS (THREADS / TEAM)

// `keys`, `values`: rows of the text's tokens, key heads side by side, `stride` apart; row `seen` is written. `group` query
// heads share a key head.
KERNEL __launch_bounds__(THREADS)
    next_token_attention(const element* __restrict__ q, const element* __restrict__ k, const element* __restrict__ v, element* keys,
                         element* values, element* __restrict__ out, int stride, int seen, int group, float scale) {
    __shared__ float maxima[TEAMS], sums[TEAMS], parts[TEAMS][HEAD_DIM];
    const int head = blockIdx.x, team = threadIdx.x / TEAM, lane = threadIdx.x % 32;
    const int column = threadIdx.x % TEAM * 8, shared = head / group * HEAD_DIM + column;
    keys += shared, values += shared;
    float x[8], y[8], sum = 0.0f, total[8] = {};
    load8(x, q + head * HEAD_DIM + column);
#pragma unroll
    for (int i = 0; i < 8; i++) x[i] *= scale * LOG2_E;
    if (team == 0 && head % group == 0) {
        load8(y, k + shared);
        store8(keys + (long long)seen * stride, y);
        load8(y, v + shared);
        store8(values + (long long)seen * stride, y);
    }
    float most = -INFINITY_F;
    // All lanes of a warp go round together: they exchange sums.
    for (int first = threadIdx.x / 32 * (32 / TEAM); first <= seen; first += TEAMS) {
        const int token = first + lane / TEAM;
        float score = 0.0f;
        if (token <= seen) {
            // Another block may be writing the new row.
            load8(y, token == seen ? k + shared : keys + (long long)token * stride);
#pragma unroll
            for (int i = 0; i < 8; i++) score += x[i] * y[i];
        }
        score = lanes_sum<TEAM>(score);
        if (token <= seen) {
            const float larger = fmaxf(most, score), shrink = ex2(most - larger), weight = ex2(score - larger);
            load8(y, token == seen ? v + shared : values + (long long)token * stride);
            sum = sum * shrink + weight;
#pragma unroll
            for (int i = 0; i < 8; i++) total[i] = total[i] * shrink + weight * y[i];
            most = larger;
        }
    }
#pragma unroll
    for (int i = 0; i < 8; i++) parts[team][column + i] = total[i];
    if (column == 0) maxima[team] = most, sums[team] = sum;
    __syncthreads();
    if (threadIdx.x >= HEAD_DIM) return;
    for (int other = 0; other < TEAMS; other++) most = other == 0 ? maxima[0] : fmaxf(most, maxima[other]);
    sum = 0.0f;
    float result = 0.0f;
    for (int other = 0; other < TEAMS; other++) {
        const float weight = ex2(maxima[other] - most);
        sum += weight * sums[other];
        result += weight * parts[other][threadIdx.x];
    }
    put(out + head * HEAD_DIM + threadIdx.x, result / sum);
}
