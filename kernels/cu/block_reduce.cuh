// The reduction of a block: butterflies in the warps, shared memory between them.
#pragma once
#include "butterfly.cuh"

// All threads get the combination of the block's values. `partial` is in shared memory,
// with room for 32 values. The block must consist of whole warps.
template <typename Op>
__device__ float block_reduce(float value, float* partial) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    value = group_reduce<Op, 32>(value);
    if (lane == 0) partial[warp] = value;
    __syncthreads();  // wait until every warp has written
    // Every warp reduces the partial results again, so that no thread has to be told.
    return group_reduce<Op, 32>(lane < warps ? partial[lane] : Op::identity());
}
