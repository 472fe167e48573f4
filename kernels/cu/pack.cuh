// Packs: neighbours of a row that a thread loads, computes on and stores at once.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>

// The alignment tells the compiler that one instruction may move all values, if they
// have 16 bytes or less.
template <typename T, int PACK>
struct alignas(sizeof(T) * PACK) Pack {
    T values[PACK];
};

// The maximum of `so_far` and a pack.
template <typename T, int PACK>
__device__ float max_with(float so_far, Pack<T, PACK> pack) {
#pragma unroll
    for (int j = 0; j < PACK; ++j) so_far = fmaxf(so_far, float(pack.values[j]));
    return so_far;
}

// `so_far`, and the exponentials of a pack.
template <typename T, int PACK>
__device__ float sum_with(float so_far, Pack<T, PACK> pack, float row_max) {
#pragma unroll
    for (int j = 0; j < PACK; ++j) so_far += __expf(float(pack.values[j]) - row_max);
    return so_far;
}

// The softmax of a pack. `factor` is 1 / sum, so that a row has one division.
template <typename T, int PACK>
__device__ Pack<T, PACK> softmax_of(Pack<T, PACK> pack, float row_max, float factor) {
#pragma unroll
    for (int j = 0; j < PACK; ++j) {
        pack.values[j] = T(__expf(float(pack.values[j]) - row_max) * factor);
    }
    return pack;
}
