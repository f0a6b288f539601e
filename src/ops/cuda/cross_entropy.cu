// Cross-entropy over rows of logits, which it turns into their gradient in place. After elements.cu.
//
// One block of 1024 threads works on a row at a time: one pass for the largest logit and Σ exp, one that writes
// grad_scale · (softmax − onehot). The first `kept` 16-byte chunks (32 bytes of f32) of the row stay in shared
// memory between the two, so that the second reads little: shared memory = kept · 8 · sizeof(element).
// loss[row] = logsumexp − logit of the target; a row whose target is negative has loss 0 and gradient 0.
// logsumexp is stored where `lse` isn't null. grid = min(rows, multiprocessors).
// The row stride is a multiple of 8 and at least vocab rounded up to 8; what lies between is written with 0.

DEVICE void join(float& maximum, float& sum, float other_maximum, float other_sum) {
    const float top = fmaxf(maximum, other_maximum);
    // The clamps keep -inf − -inf (lanes without a logit) from being NaN.
    sum = sum * ex2(fmaxf(maximum - top, -1e30f) * LOG2_E) + other_sum * ex2(fmaxf(other_maximum - top, -1e30f) * LOG2_E);
    maximum = top;
}

KERNEL __launch_bounds__(1024, 1)
    cross_entropy(element* __restrict__ logits, const int* __restrict__ targets, float* __restrict__ loss,
                  float* __restrict__ lse, int stride, int rows, int vocab, int kept, float grad_scale) {
    DYNAMIC_SHARED(memory);
    __shared__ float maxima[32], sums[32];
    element* const cache = (element*)memory;
    const int chunks = (vocab + 7) / 8, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        element* const x = logits + (long long)row * stride;
        const int target = targets[row];
        float maximum = -INFINITY_F, sum = 0.0f;
#pragma unroll 4
        for (int chunk = threadIdx.x; chunk < chunks; chunk += 1024) {
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
        maximum = maxima[lane], sum = sums[lane];
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2)
            join(maximum, sum, __shfl_xor_sync(0xffffffffu, maximum, offset), __shfl_xor_sync(0xffffffffu, sum, offset));
        const float log_sum = maximum + logf(sum);
        if (threadIdx.x == 0) {
            float picked[8];
            if (target >= 0) load8(picked, x + target / 8 * 8);
            float value = 0.0f;
#pragma unroll
            for (int i = 0; i < 8; i++)
                if (target >= 0 && i == target % 8) value = picked[i];
            loss[row] = target >= 0 ? log_sum - value : 0.0f;
            if (lse) lse[row] = log_sum;
        }
        __syncthreads();
        const float offset = log_sum * LOG2_E, factor = target >= 0 ? grad_scale : 0.0f;
#pragma unroll 4
        for (int chunk = threadIdx.x; chunk < chunks; chunk += 1024) {
            float y[8];
            if (chunk < kept) load8(y, cache + chunk * 8);
            else load8(y, x + chunk * 8);
#pragma unroll
            for (int i = 0; i < 8; i++) {
                y[i] = factor * (ex2(y[i] * LOG2_E - offset) - (chunk * 8 + i == target ? 1.0f : 0.0f));
                if (chunk * 8 + i >= vocab) y[i] = 0.0f;
            }
            store8(x + chunk * 8, y);
        }
        __syncthreads();
    }
}
