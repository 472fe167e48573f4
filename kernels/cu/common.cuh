// What the three kernels share: a pack of values, the exponential, and the reductions.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <math_constants.h>

// PACK neighbours of a row. The alignment lets the compiler load and store a whole pack
// by one instruction of up to 16 bytes.
template <typename T, int PACK>
struct alignas(sizeof(T) * PACK) Pack {
    T values[PACK];
};

struct Max {
    static __device__ float identity() { return -CUDART_INF_F; }
    static __device__ float combine(float a, float b) { return fmaxf(a, b); }
};

struct Sum {
    static __device__ float identity() { return 0.0f; }
    static __device__ float combine(float a, float b) { return a + b; }
};

// The butterfly. Each lane combines its value with that of the lane whose number differs
// in one bit; after log2(LANES) steps every lane of the group has the group's result.
template <typename Op, int LANES>
__device__ float group_reduce(float value) {
    static_assert((LANES & (LANES - 1)) == 0, "a butterfly needs a power of two");
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        // The mask names the lanes that take part: all 32 of the warp.
        float other = __shfl_xor_sync(0xffffffff, value, distance);
        value = Op::combine(value, other);
    }
    return value;
}

// The reduction of a block. Each warp writes its result to shared memory; then every
// warp reduces the results of all warps, so that every thread has the block's.
template <typename Op>
__device__ float block_reduce(float value, float* partial) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    value = group_reduce<Op, 32>(value);
    if (lane == 0) partial[warp] = value;
    __syncthreads();  // until here, some warps may not have written
    const int warps = blockDim.x / 32;  // at most 32, so that one warp holds them
    return group_reduce<Op, 32>(lane < warps ? partial[lane] : Op::identity());
}

// The largest value of a pack and of what came before; the sum of its exponentials.
template <typename T, int PACK>
__device__ float max_with(float value, Pack<T, PACK> pack) {
#pragma unroll
    for (int j = 0; j < PACK; ++j) value = fmaxf(value, float(pack.values[j]));
    return value;
}

template <typename T, int PACK>
__device__ float sum_with(float value, Pack<T, PACK> pack, float row_max) {
#pragma unroll
    for (int j = 0; j < PACK; ++j) value += __expf(float(pack.values[j]) - row_max);
    return value;
}

// The softmax of a pack. `factor` is 1 / sum: one division a row, not one a value.
template <typename T, int PACK>
__device__ Pack<T, PACK> scaled(Pack<T, PACK> pack, float row_max, float factor) {
#pragma unroll
    for (int j = 0; j < PACK; ++j) {
        pack.values[j] = T(__expf(float(pack.values[j]) - row_max) * factor);
    }
    return pack;
}
