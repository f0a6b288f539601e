// A CUDA block on a CPU, to run the kernels' logic without a card: every thread is a fiber, warps move in a
// random order, asynchronous copies and warpgroup products happen at a random time between their issue and the
// wait that needs them. It gives the names of common.cu and hopper.cu; the kernel files are included as they are.
// It finds wrong indices, missing waits and deadlocks; it knows nothing of speed or of memory-ordering fences.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <tuple>
#include <utility>
#include <vector>

typedef unsigned short bf16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct dim3 { unsigned x = 1, y = 1, z = 1; };
struct uint2 { u32 x, y; };
struct uint4 { u32 x, y, z, w; };
struct int4 { int x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(8) float2 { float x, y; };

#define DEVICE static inline
#define METHOD inline
#define KERNEL extern "C" void
#define __device__
#define __forceinline__
#define __restrict__
#define __grid_constant__
#define __launch_bounds__(...)
#define __shared__ static
#define DYNAMIC_SHARED(name) unsigned char* const name = machine::shared
#define INFINITY_F INFINITY

namespace machine {

constexpr u32 SHARED_BYTES = 227 * 1024;
constexpr u32 SHARED_BASE = 1024; // address 0 stays unused
alignas(1024) static unsigned char shared[SHARED_BYTES];

[[noreturn]] static void fail(const char* what) {
    std::fprintf(stderr, "emulated kernel: %s\n", what);
    std::abort();
}
static unsigned char* at(u32 address, u32 bytes) {
    if (address < SHARED_BASE || address + bytes > SHARED_BASE + SHARED_BYTES) fail("shared memory address out of range");
    return shared + (address - SHARED_BASE);
}
static float widen(bf16 x) {
    u32 bits = u32(x) << 16;
    float y;
    std::memcpy(&y, &bits, 4);
    return y;
}

// ---- fibers ------------------------------------------------------------------------------------

extern "C" void machine_switch(void** from, void* to);
asm(R"(
.text
.globl machine_switch
machine_switch:
    pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
    ret
)");

constexpr size_t STACK = 96 * 1024;
struct Fiber {
    void* stack_pointer = nullptr;
    std::unique_ptr<unsigned char[]> stack;
    bool done = true;
};
static std::vector<Fiber> fibers;
static void* scheduler_stack;
static unsigned current;
static u64 progress;
static std::function<void()> body;
static std::mt19937 random_bits(1);
static bool coin() { return random_bits() & 1; }

static void yield() { machine_switch(&fibers[current].stack_pointer, scheduler_stack); }
static void enter() {
    body();
    fibers[current].done = true;
    progress++;
    yield();
    fail("a finished thread ran on");
}

// ---- work that happens later -----------------------------------------------------------------------

static std::vector<std::function<void()>> engine; // the copy engine's queue
static void engine_run_one() {
    const size_t i = random_bits() % engine.size();
    auto work = std::move(engine[i]);
    engine.erase(engine.begin() + i);
    progress++;
    work();
}

struct Copies { // cp.async of one thread
    std::vector<std::function<void()>> open;
    std::deque<std::vector<std::function<void()>>> groups;
    void finish(size_t pending) {
        while (groups.size() > pending) {
            for (auto& f : groups.front()) f();
            groups.pop_front();
        }
    }
};
static std::vector<Copies> copies;

struct Products { // wgmma of one warpgroup
    std::vector<std::function<void()>> open;
    std::deque<std::vector<std::function<void()>>> groups;
    void run_first_group() {
        for (auto& f : groups.front()) f();
        groups.pop_front();
    }
};
static std::vector<Products> products;

// ---- meeting points ----------------------------------------------------------------------------

struct Meeting {
    unsigned arrived = 0;
    u64 generation = 0;
    void* slots[128];
};
static std::vector<Meeting> warps, warpgroups;

// All threads of the group come with their arguments, the last one does the work for all.
template <class F> static void meet(Meeting& m, unsigned size, unsigned lane, void* argument, F work) {
    m.slots[lane] = argument;
    if (++m.arrived == size) {
        work(m.slots);
        m.arrived = 0;
        m.generation++;
        progress++;
        return;
    }
    const u64 generation = m.generation;
    while (m.generation == generation) yield();
}
template <class F> static void meet_warp(void* argument, F work) { meet(warps[current / 32], 32, current % 32, argument, work); }
template <class F> static void meet_warpgroup(void* argument, F work) {
    meet(warpgroups[current / 128], 128, current % 128, argument, work);
}

struct NamedBarrier {
    unsigned arrived = 0;
    u64 generation = 0;
};
static NamedBarrier named[16];
static u64 named_arrive(int id, unsigned threads) {
    NamedBarrier& b = named[id];
    const u64 generation = b.generation;
    progress++;
    if (++b.arrived == threads) b.arrived = 0, b.generation++;
    return generation;
}
static void named_sync(int id, unsigned threads) {
    const u64 generation = named_arrive(id, threads);
    while (named[id].generation == generation) yield();
}

struct Barrier { // an mbarrier; lives in shared memory as 8 bytes
    unsigned short expected, pending;
    int transactions : 31;
    u32 phase : 1;
    void settle() {
        if (pending == 0 && transactions == 0) phase ^= 1, pending = expected;
        progress++;
    }
};
static_assert(sizeof(Barrier) == 8);
static Barrier& barrier(u32 address) { return *(Barrier*)at(address, 8); }

// ---- the grid ----------------------------------------------------------------------------------

static dim3 block_index, block_size, grid_size, thread_index;

static void run_block(unsigned threads) {
    fibers.resize(threads);
    copies.assign(threads, {});
    products.assign(threads / 128 + 1, {});
    warps.assign(threads / 32 + 1, {});
    warpgroups.assign(threads / 128 + 1, {});
    engine.clear();
    for (auto& n : named) n = {};
    for (auto& byte : shared) byte = 0xff; // NaN as bf16 and as f32
    for (auto& fiber : fibers) {
        if (!fiber.stack) fiber.stack = std::make_unique<unsigned char[]>(STACK);
        void** top = (void**)((uintptr_t)(fiber.stack.get() + STACK) & ~uintptr_t(15));
        *--top = nullptr;
        *--top = (void*)enter;
        for (int i = 0; i < 6; i++) *--top = nullptr;
        fiber.stack_pointer = top;
        fiber.done = false;
    }
    std::vector<unsigned> order((threads + 31) / 32);
    for (unsigned i = 0; i < order.size(); i++) order[i] = i;
    unsigned idle = 0;
    // A block's asynchronous work comes soon, late, or only when nothing else can go on.
    const unsigned choices[] = {32, 2, 0};
    const unsigned copy_haste = choices[random_bits() % 3], product_haste = choices[random_bits() % 3];
    for (;;) {
        const u64 before = progress;
        bool alive = false;
        std::shuffle(order.begin(), order.end(), random_bits);
        for (unsigned warp : order) {
            for (unsigned t = warp * 32; t < std::min(threads, warp * 32 + 32); t++) {
                if (fibers[t].done) continue;
                alive = true;
                current = t;
                thread_index = {t % block_size.x, t / block_size.x % block_size.y, t / block_size.x / block_size.y};
                machine_switch(&scheduler_stack, fibers[t].stack_pointer);
            }
            if (!engine.empty() && random_bits() % 64 < copy_haste) engine_run_one();
            for (auto& p : products)
                if (!p.groups.empty() && random_bits() % 256 < product_haste) p.run_first_group();
        }
        if (!alive) break;
        if (progress == before && !engine.empty()) engine_run_one();
        idle = progress == before ? idle + 1 : 0;
        if (idle > 100) fail("deadlock");
    }
    if (!engine.empty()) fail("copies outstanding at the end of a block");
}

} // namespace machine

#define threadIdx machine::thread_index
#define blockIdx machine::block_index
#define blockDim machine::block_size
#define gridDim machine::grid_size

// ---- the language ------------------------------------------------------------------------------

using std::max;
using std::min;
static inline float __uint_as_float(u32 x) { float y; std::memcpy(&y, &x, 4); return y; }
static inline u32 __float_as_uint(float x) { u32 y; std::memcpy(&y, &x, 4); return y; }
static inline void __syncthreads() { machine::named_sync(0, blockDim.x * blockDim.y * blockDim.z); }
static inline void __syncwarp() { machine::meet_warp(nullptr, [](void**) {}); }
static inline void __threadfence() {}
template <class T> static inline T __shfl_xor_sync(u32, T x, int offset) {
    struct { T in, out; } a{x, {}};
    using A = decltype(a);
    machine::meet_warp(&a, [offset](void** s) {
        for (int i = 0; i < 32; i++) ((A*)s[i])->out = ((A*)s[i ^ offset])->in;
    });
    return a.out;
}
template <class T> static inline T __shfl_sync(u32, T x, int lane) {
    struct { T in, out; } a{x, {}};
    using A = decltype(a);
    machine::meet_warp(&a, [lane](void** s) {
        for (int i = 0; i < 32; i++) ((A*)s[i])->out = ((A*)s[lane])->in;
    });
    return a.out;
}
static inline u32 __ballot_sync(u32, bool x) {
    struct A { bool in; u32 out; } a{x, 0};
    machine::meet_warp(&a, [](void** s) {
        u32 all = 0;
        for (int i = 0; i < 32; i++) all |= u32(((A*)s[i])->in) << i;
        for (int i = 0; i < 32; i++) ((A*)s[i])->out = all;
    });
    return a.out;
}
static inline int __ffs(u32 x) { return __builtin_ffs(int(x)); }
static inline int __syncthreads_or(int x) {
    static int any;
    __syncthreads();
    if (threadIdx.x == 0) any = 0;
    __syncthreads();
    if (x) any = 1;
    __syncthreads();
    return any;
}
static inline bool __any_sync(u32, bool x) {
    struct A { bool in, out; } a{x, false};
    machine::meet_warp(&a, [](void** s) {
        bool any = false;
        for (int i = 0; i < 32; i++) any |= ((A*)s[i])->in;
        for (int i = 0; i < 32; i++) ((A*)s[i])->out = any;
    });
    return a.out;
}
template <class T> static inline T atomicAdd(T* p, T x) { T old = *p; *p += x; return old; }
static inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
static inline bool isfinite_f(float x) { return std::isfinite(x); }

static inline float from_bf16(bf16 x) { return machine::widen(x); }
static inline float low_half(u32 x) { return __uint_as_float(x << 16); }
static inline float high_half(u32 x) { return __uint_as_float(x & 0xffff0000u); }
static inline bf16 to_bf16(float x) {
    const u32 bits = __float_as_uint(x);
    if (x != x) return 0x7fff;
    return bf16((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
static inline u32 pack_bf16(float low, float high) { return u32(to_bf16(low)) | u32(to_bf16(high)) << 16; }
static inline float ex2(float x) { return std::exp2(x); }
template <int WIDTH> static inline float lanes_sum(float x) {
    for (int offset = WIDTH / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
    return x;
}
template <int WIDTH> static inline float lanes_max(float x) {
    for (int offset = WIDTH / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
    return x;
}

// ---- common.cu -----------------------------------------------------------------------------------

static inline u32 shared_address(const void* p) { return u32((unsigned char*)p - machine::shared) + machine::SHARED_BASE; }
static inline void store_shared(u32 address, u32 x) { std::memcpy(machine::at(address, 4), &x, 4); }
static inline uint4 load_shared16(u32 address) { uint4 x; std::memcpy(&x, machine::at(address, 16), 16); return x; }
static inline float2 load_shared_float2(u32 address) { float2 x; std::memcpy(&x, machine::at(address, 8), 8); return x; }

static inline void copy16_async(u32 destination, const void* source, bool valid) {
    if (destination % 16 || (uintptr_t)source % 16) machine::fail("16-byte copy is not aligned");
    auto work = [=] {
        if (valid) std::memcpy(machine::at(destination, 16), source, 16);
        else std::memset(machine::at(destination, 16), 0, 16);
    };
    if (machine::random_bits() % 4 == 0) work();
    else machine::copies[machine::current].open.push_back(work);
}
static inline void copies_commit() {
    auto& c = machine::copies[machine::current];
    c.groups.push_back(std::move(c.open));
    c.open.clear();
}
template <int PENDING> static inline void copies_wait() { machine::copies[machine::current].finish(PENDING); }

static inline void load_matrices_any(u32 (&r)[4], u32 address, bool transposed) {
    struct A { u32* r; u32 address; } a{r, address};
    machine::meet_warp(&a, [transposed](void** s) {
        for (int matrix = 0; matrix < 4; matrix++) {
            bf16 rows[8][8];
            for (int i = 0; i < 8; i++) std::memcpy(rows[i], machine::at(((A*)s[matrix * 8 + i])->address, 16), 16);
            for (int lane = 0; lane < 32; lane++) {
                const int i = lane / 4, j = lane % 4 * 2;
                ((A*)s[lane])->r[matrix] = transposed ? rows[j][i] | u32(rows[j + 1][i]) << 16 : rows[i][j] | u32(rows[i][j + 1]) << 16;
            }
        }
    });
}
static inline void load_matrices(u32 (&r)[4], u32 address) { load_matrices_any(r, address, false); }
static inline void load_matrices_transposed(u32 (&r)[4], u32 address) { load_matrices_any(r, address, true); }

static inline void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    struct A { float* c; const u32* a; u32 b[2]; } args{c, a, {b0, b1}};
    machine::meet_warp(&args, [](void** s) {
        float a[16][16], b[16][8];
        for (int lane = 0; lane < 32; lane++) {
            const A& x = *(A*)s[lane];
            for (int i = 0; i < 4; i++) {
                const int row = lane / 4 + i % 2 * 8, column = lane % 4 * 2 + i / 2 * 8;
                a[row][column] = low_half(x.a[i]), a[row][column + 1] = high_half(x.a[i]);
            }
            for (int i = 0; i < 2; i++) {
                b[lane % 4 * 2 + i * 8][lane / 4] = low_half(x.b[i]);
                b[lane % 4 * 2 + i * 8 + 1][lane / 4] = high_half(x.b[i]);
            }
        }
        for (int lane = 0; lane < 32; lane++)
            for (int i = 0; i < 4; i++) {
                const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
                float sum = ((A*)s[lane])->c[i];
                for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
                ((A*)s[lane])->c[i] = sum;
            }
    });
}

// ---- hopper.cu -----------------------------------------------------------------------------------

static inline void barrier_init(u32 address, u32 arrivals) {
    auto& b = machine::barrier(address);
    b.expected = b.pending = arrivals, b.transactions = 0, b.phase = 0;
}
static inline void barrier_init_fence() {}
static inline void barrier_arrive(u32 address) {
    auto& b = machine::barrier(address);
    if (b.pending == 0) machine::fail("too many arrivals at a barrier");
    b.pending--;
    b.settle();
}
static inline void barrier_arrive_expect(u32 address, u32 bytes) {
    machine::barrier(address).transactions += bytes;
    barrier_arrive(address);
}
static inline void barrier_wait(u32 address, u32 parity) {
    while (machine::barrier(address).phase == parity) machine::yield();
}
static inline void threads_sync(int id, int threads) { machine::named_sync(id, threads); }
static inline void threads_arrive(int id, int threads) { machine::named_arrive(id, threads); }

struct alignas(64) TensorMap { // what the emulated copy engine needs to know of a tensor [token, head, element]
    const bf16* data;
    u64 elements, heads, tokens, head_stride, token_stride; // strides in elements
    u32 box_elements, box_tokens;
    u64 rest[8];
};
static_assert(sizeof(TensorMap) == 128);
static inline void prefetch_map(const TensorMap*) {}

static inline void bring(u32 barrier, u32 bytes) {
    auto& b = machine::barrier(barrier);
    b.transactions -= bytes;
    b.settle();
}
static inline void copy_box(u32 destination, const TensorMap* map, u32 barrier, int element, int head, int token) {
    const TensorMap m = *map;
    machine::engine.push_back([=] {
        for (u32 row = 0; row < m.box_tokens; row++)
            for (u32 column = 0; column < m.box_elements; column++) {
                const long long t = token + (long long)row, e = element + (long long)column;
                const bool inside = t >= 0 && t < (long long)m.tokens && e < (long long)m.elements && head < (int)m.heads;
                u32 offset = row * m.box_elements * 2 + column * 2;
                offset ^= offset >> 3 & 0x70;
                const bf16 x = inside ? m.data[t * m.token_stride + head * m.head_stride + e] : 0;
                std::memcpy(machine::at(destination + offset, 2), &x, 2);
            }
        bring(barrier, m.box_tokens * m.box_elements * 2);
    });
}
static inline void copy_row(u32 destination, const void* source, u32 bytes, u32 barrier) {
    if (destination % 16 || (uintptr_t)source % 16 || bytes % 16) machine::fail("bulk copy is not aligned");
    machine::engine.push_back([=] {
        std::memcpy(machine::at(destination, bytes), source, bytes);
        bring(barrier, bytes);
    });
}
static inline void fence_async() {}
template <int COUNT> static inline void registers_raise() {}
template <int COUNT> static inline void registers_lower() {}

static inline u64 operand(u32 address, u32 panel_bytes) {
    return u64((address & 0x3ffff) >> 4) | u64(panel_bytes >> 4) << 16 | u64(1024 >> 4) << 32 | u64(1) << 62;
}
static inline void products_fence() {}
static inline void products_commit() {
    machine::meet_warpgroup(nullptr, [](void**) {
        auto& p = machine::products[machine::current / 128];
        p.groups.push_back(std::move(p.open));
        p.open.clear();
    });
}
template <int PENDING> static inline void products_wait() {
    machine::meet_warpgroup(nullptr, [](void**) {
        auto& p = machine::products[machine::current / 128];
        if (!p.open.empty()) machine::fail("products that were not committed");
        while (p.groups.size() > PENDING) p.run_first_group();
    });
}
template <int N> static inline void pin(float (&)[N]) {}

namespace machine {
// Element (outer, inner) of an operand with 128-byte swizzle; inner runs along K.
static float fetch(u64 descriptor, bool transposed, int outer, int k) {
    const u32 base = u32(descriptor & 0x3fff) << 4, panel = u32(descriptor >> 16 & 0x3fff) << 4, eight = u32(descriptor >> 32 & 0x3fff) << 4;
    u32 address = transposed ? base + outer / 64 * panel + k / 8 * eight + k % 8 * 128 + outer % 64 * 2
                             : base + outer / 8 * eight + outer % 8 * 128 + k * 2;
    address ^= (address - SHARED_BASE) >> 3 & 0x70; // SHARED_BASE is a multiple of 1024
    bf16 x;
    std::memcpy(&x, at(address, 2), 2);
    return widen(x);
}
struct ProductArguments {
    float* c;
    const u32* a_registers;
    u64 a, b;
    bool add;
};
static void product(const ProductArguments& x, int n, bool b_transposed) {
    meet_warpgroup((void*)&x, [=](void** s) {
        std::vector<ProductArguments> all(128);
        for (int i = 0; i < 128; i++) {
            all[i] = *(ProductArguments*)s[i];
            if (all[i].a != all[0].a || all[i].b != all[0].b || all[i].add != all[0].add) fail("threads disagree about a product");
        }
        products[current / 128].open.push_back([=] {
            std::vector<float> a(64 * 16), b(16 * n);
            for (int row = 0; row < 64; row++)
                for (int k = 0; k < 16; k++)
                    if (!all[0].a_registers) a[row * 16 + k] = fetch(all[0].a, false, row, k);
            if (all[0].a_registers)
                for (int t = 0; t < 128; t++)
                    for (int i = 0; i < 4; i++) {
                        const int row = t / 32 * 16 + t % 32 / 4 + i % 2 * 8, k = t % 4 * 2 + i / 2 * 8;
                        a[row * 16 + k] = low_half(all[t].a_registers[i]), a[row * 16 + k + 1] = high_half(all[t].a_registers[i]);
                    }
            for (int k = 0; k < 16; k++)
                for (int column = 0; column < n; column++) b[k * n + column] = fetch(all[0].b, b_transposed, column, k);
            std::vector<float> sums(n);
            for (int row = 0; row < 64; row++) {
                std::fill(sums.begin(), sums.end(), 0.0f);
                for (int k = 0; k < 16; k++)
                    for (int column = 0; column < n; column++) sums[column] += a[row * 16 + k] * b[k * n + column];
                for (int column = 0; column < n; column++) {
                    const int t = row / 16 * 32 + row % 8 * 4 + column % 8 / 2;
                    float& c = all[t].c[column / 8 * 4 + row % 16 / 8 * 2 + column % 2];
                    c = (all[0].add ? c : 0.0f) + sums[column];
                }
            }
        });
    });
}
} // namespace machine

template <bool B_TRANSPOSED> struct Product {
    template <int N> static inline void run(float (&c)[N], u64 a, u64 b, bool add) {
        machine::product({c, nullptr, a, b, add}, 2 * N, B_TRANSPOSED);
    }
    template <int N> static inline void run(float (&c)[N], const u32 (&a)[4], u64 b, bool add) {
        machine::product({c, a, 0, b, add}, 2 * N, B_TRANSPOSED);
    }
};

// ---- launching -------------------------------------------------------------------------------------

namespace machine {
template <class... A, size_t... I> static void call(void (*kernel)(A...), void** arguments, std::index_sequence<I...>) {
    body = [=] { kernel(*(std::remove_const_t<A>*)arguments[I]...); };
}
template <class... A>
static void launch(void (*kernel)(A...), dim3 grid, dim3 block, void** arguments, unsigned seed) {
    random_bits.seed(seed);
    grid_size = grid, block_size = block;
    call(kernel, arguments, std::index_sequence_for<A...>());
    for (unsigned z = 0; z < grid.z; z++)
        for (unsigned y = 0; y < grid.y; y++)
            for (unsigned x = 0; x < grid.x; x++) {
                block_index = {x, y, z};
                run_block(block.x * block.y * block.z);
            }
}
} // namespace machine

// Exports `emulate_NAME` beside a kernel.
#define EMULATED(name)                                                                                         \
    extern "C" void emulate_##name(const unsigned* grid, const unsigned* block, void** arguments, unsigned seed) { \
        machine::launch(name, {grid[0], grid[1], grid[2]}, {block[0], block[1], block[2]}, arguments, seed);     \
    }
