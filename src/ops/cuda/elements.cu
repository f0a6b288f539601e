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

DEVICE void store8(bf16* p, const float (&x)[8]) {
    *(uint4*)p = {pack_bf16(x[0], x[1]), pack_bf16(x[2], x[3]), pack_bf16(x[4], x[5]), pack_bf16(x[6], x[7])};
}
DEVICE void store8(float* p, const float (&x)[8]) {
    ((float4*)p)[0] = {x[0], x[1], x[2], x[3]};
    ((float4*)p)[1] = {x[4], x[5], x[6], x[7]};
}
// 8 elements as they lie in memory: loaded early, widened late, to keep many loads in flight in few registers.
template <class T> struct Eight;
template <> struct Eight<bf16> {
    uint4 raw;
    METHOD void load(const bf16* p) { raw = *(const uint4*)p; }
    METHOD void widen(float (&x)[8]) const {
        x[0] = low_half(raw.x), x[1] = high_half(raw.x), x[2] = low_half(raw.y), x[3] = high_half(raw.y);
        x[4] = low_half(raw.z), x[5] = high_half(raw.z), x[6] = low_half(raw.w), x[7] = high_half(raw.w);
    }
};
template <> struct Eight<float> {
    float4 a, b;
    METHOD void load(const float* p) { a = ((const float4*)p)[0], b = ((const float4*)p)[1]; }
    METHOD void widen(float (&x)[8]) const {
        x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    }
};

DEVICE void load8(float (&x)[8], const bf16* p) {
    Eight<bf16> y;
    y.load(p);
    y.widen(x);
}
DEVICE void load8(float (&x)[8], const float* p) {
    Eight<float> y;
    y.load(p);
    y.widen(x);
}
DEVICE float as_float(float x) { return x; }
DEVICE float as_float(bf16 x) { return from_bf16(x); }
DEVICE void put(float* p, float x) { *p = x; }
DEVICE void put(bf16* p, float x) { *p = to_bf16(x); }
DEVICE float rounded(float x, const bf16*) { return from_bf16(to_bf16(x)); }
DEVICE float rounded(float x, const float*) { return x; }
