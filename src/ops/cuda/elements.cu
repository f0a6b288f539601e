// Rows of activations, 8 elements (16 bytes of bf16) at a time. After common.cu.
//
// #define FLOAT32 for f32 activations, else bf16; #define WEIGHT_FLOAT32 for f32 weights, else as activations.
// Pointers and row strides (in elements) are multiples of 8 elements; a null pointer means "not wanted" where a
// contract says so. Arithmetic is f32; results are rounded once, when they are stored.

#ifdef FLOAT32
typedef float element;
#else
typedef bf16 element;
#endif
#if defined(WEIGHT_FLOAT32) || defined(FLOAT32)
typedef float weight;
#else
typedef bf16 weight;
#endif

#define LOG2_E 1.4426950408889634f

DEVICE void load8(float (&x)[8], const bf16* p) {
    const uint4 y = *(const uint4*)p;
    x[0] = low_half(y.x), x[1] = high_half(y.x), x[2] = low_half(y.y), x[3] = high_half(y.y);
    x[4] = low_half(y.z), x[5] = high_half(y.z), x[6] = low_half(y.w), x[7] = high_half(y.w);
}
DEVICE void load8(float (&x)[8], const float* p) {
    const float4 a = ((const float4*)p)[0], b = ((const float4*)p)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
DEVICE void store8(bf16* p, const float (&x)[8]) {
    *(uint4*)p = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
}
DEVICE void store8(float* p, const float (&x)[8]) {
    ((float4*)p)[0] = {x[0], x[1], x[2], x[3]};
    ((float4*)p)[1] = {x[4], x[5], x[6], x[7]};
}
DEVICE float rounded(float x, const bf16*) { return from_bf16(to_bf16(x)); }
DEVICE float rounded(float x, const float*) { return x; }
