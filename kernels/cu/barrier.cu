// The reduction of a block, with its barrier or without it.
#include "butterfly.cuh"

// Each block reduces its own values; every thread writes the result that it found.
template <typename Op, bool WAIT>
__global__ void reduce(float* output, const float* input) {
    __shared__ float partial[32];
    const int place = blockIdx.x * blockDim.x + threadIdx.x;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float value = group_reduce<Op, 32>(input[place]);
    if (lane == 0) partial[warp] = value;
    if (WAIT) __syncthreads();
    const int warps = (blockDim.x + 31) / 32;  // the last may have fewer than 32 lanes
    value = lane < warps ? partial[lane] : Op::identity();
    output[place] = group_reduce<Op, 32>(value);
}
