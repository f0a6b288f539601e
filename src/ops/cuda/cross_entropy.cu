// Cross-entropy over rows of logits, which it turns into their gradient in place. After elements.cu.
//
// One block works on a row at a time: one pass for the largest logit and Σ exp, one that writes
// grad_scale · (softmax − onehot). The first `kept` chunks of 8 elements of the row stay in shared memory between
// the two, so that the second reads little: shared memory = kept · 8 · sizeof(element). #define CE_THREADS.
// loss[row] = logsumexp − logit of the target; a row whose target is negative has loss 0 and gradient 0.
// logsumexp is stored where `lse` isn't null. grid: as many blocks as run at once, at most rows.
// The row stride is a multiple of 8 and at least vocab rounded up to 8; what lies between is written with 0.

DEVICE void join(float& maximum, float& sum, float other_maximum, float other_sum) {
    const float top = fmaxf(maximum, other_maximum);
    // The clamps keep -inf − -inf (lanes without a logit) from being NaN.
    sum = sum * ex2(fmaxf(maximum - top, -1e30f) * LOG2_E) + other_sum * ex2(fmaxf(other_maximum - top, -1e30f) * LOG2_E);
    maximum = top;
}

KERNEL __launch_bounds__(CE_THREADS, 1024 / CE_THREADS)
    cross_entropy(element* __restrict__ logits, const int* __restrict__ targets, float* __restrict__ loss,
                  float* __restrict__ lse, int stride, int rows, int vocab, int kept, float grad_scale) {
    DYNAMIC_SHARED(memory);
    constexpr int WARPS = CE_THREADS / 32;
    __shared__ float maxima[WARPS], sums[WARPS];
    element* const cache = (element*)memory;
    const int chunks = (vocab + 7) / 8, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        element* const x = logits + (long long)row * stride;
        const int target = targets[row];
        float maximum = -INFINITY_F, sum = 0.0f;
#pragma unroll 4
        for (int chunk = threadIdx.x; chunk < chunks; chunk += CE_THREADS) {
            float y[8];
            load8(y, x + chunk * 8);
            if (chunk < kept) store8(cache + chunk * 8, y);
            if (chunk * 8 + 8 > vocab) {
#pragma unroll
                for (int i = 0; i < 8; i++)
                    if (chunk * 8 + i >= vocab) y[i] = -INFINITY_F;
            }
            float top = maximum;
#pragma unroll
            for (int i = 0; i < 8; i++) top = fmaxf(top, y[i]);
            const float offset = top * LOG2_E;
            float part = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; i++) part += ex2(y[i] * LOG2_E - offset);
            sum = sum * ex2(maximum * LOG2_E - offset) + part;
            maximum = top;
        }
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2)
            join(maximum, sum, __shfl_xor_sync(0xffffffffu, maximum, offset), __shfl_xor_sync(0xffffffffu, sum, offset));
        if (lane == 0) maxima[warp] = maximum, sums[warp] = sum;
        __syncthreads();
        maximum = maxima[lane % WARPS], sum = sums[lane % WARPS];
#pragma unroll
        for (int offset = WARPS / 2; offset > 0; offset /= 2)
            join(maximum, sum, __shfl_xor_sync(0xffffffffu, maximum, offset), __shfl_xor_sync(0xffffffffu, sum, offset));
        const float log_sum = maximum + logf(sum);
        const float offset = log_sum * LOG2_E, factor = target >= 0 ? grad_scale : 0.0f;
        float picked = 0.0f;
        if (threadIdx.x == 0) {
            if (target >= 0) picked = as_float(x[target]);
            loss[row] = target >= 0 ? log_sum - picked : 0.0f;
            if (lse) lse[row] = log_sum;
        }
        __syncthreads(); // the target's logit is read before it is overwritten
#pragma unroll 4
        for (int chunk = threadIdx.x; chunk < chunks; chunk += CE_THREADS) {
            float y[8];
            if (chunk < kept) load8(y, cache + chunk * 8);
            else load8(y, x + chunk * 8);
#pragma unroll
            for (int i = 0; i < 8; i++) y[i] = factor * ex2(y[i] * LOG2_E - offset);
            if (chunk * 8 + 8 > vocab) {
#pragma unroll
                for (int i = 0; i < 8; i++)
                    if (chunk * 8 + i >= vocab) y[i] = 0.0f;
            }
            store8(x + chunk * 8, y);
        }
        __syncthreads();
        if (threadIdx.x == 0 && target >= 0) put(x + target, factor * (ex2(picked * LOG2_E - offset) - 1.0f));
    }
}
