// The butterfly: lanes of a warp combine their values, without shared memory.
#pragma once
#include <math_constants.h>

struct Max {
    static __device__ float identity() { return -CUDART_INF_F; }
    static __device__ float combine(float a, float b) { return fmaxf(a, b); }
};

struct Sum {
    static __device__ float identity() { return 0.0f; }
    static __device__ float combine(float a, float b) { return a + b; }
};

// All lanes of a group of LANES get the combination of the group's values.
template <typename Op, int LANES>
__device__ float group_reduce(float value) {
    static_assert((LANES & (LANES - 1)) == 0, "a butterfly needs a power of two");
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        // The first argument has a bit for each lane that takes part: all 32.
        float other = __shfl_xor_sync(0xffffffff, value, distance);
        value = Op::combine(value, other);
    }
    return value;
}
