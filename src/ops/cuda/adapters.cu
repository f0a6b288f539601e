// Adapters into their places beside stacked weights. After elements.cu.

struct Block { // 40 bytes
    const float* from;
    element* to;
    int from_stride, to_stride, rows, columns;
    float scale;
    int unused;
};
struct Blocks {
    Block blocks[16];
    int count, unused;
};

// to[r, c] = scale · from[r, c], all blocks at once. grid = a multiple of count, 256 threads.
KERNEL __launch_bounds__(256) pack_adapters(const __grid_constant__ Blocks table) {
    const Block& b = table.blocks[blockIdx.x % table.count];
    const int first = blockIdx.x / table.count * 256 + threadIdx.x, step = gridDim.x / table.count * 256;
    for (int i = first; i < b.rows * b.columns; i += step) {
        const long long row = i / b.columns, column = i % b.columns;
        put(b.to + row * b.to_stride + column, b.scale * b.from[row * b.from_stride + column]);
    }
}

struct Copy { // 32 bytes
    const float* from;
    float* to;
    int from_stride, to_stride, rows, columns;
};

// to[r, c] = from[r, c] of each entry. grid = their number, 256 threads.
KERNEL __launch_bounds__(256) copy_blocks(const Copy* table) {
    const Copy copy = table[blockIdx.x];
    for (int i = threadIdx.x; i < copy.rows * copy.columns; i += 256) {
        const long long row = i / copy.columns, column = i % copy.columns;
        copy.to[row * copy.to_stride + column] = copy.from[row * copy.from_stride + column];
    }
}
