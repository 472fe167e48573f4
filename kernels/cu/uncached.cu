// (c) A block reads a row from memory three times, and keeps nothing of it.
#include "common.cuh"

// One block computes one row, of any length.
template <typename T, int PACK, int UNROLL>
__global__ void __launch_bounds__(1024)
softmax_uncached(T* output, const T* input, long long output_row_stride,
                 long long input_row_stride, long long n_rows, long long n_cols) {
    __shared__ float maxima[32], sums[32];  // one for each warp
    const int packs = n_cols / PACK;
    const Pack<T, PACK>* x = reinterpret_cast<const Pack<T, PACK>*>(
        input + blockIdx.x * input_row_stride);
    Pack<T, PACK>* y =
        reinterpret_cast<Pack<T, PACK>*>(output + blockIdx.x * output_row_stride);

    float row_max = -CUDART_INF_F;
#pragma unroll UNROLL
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        row_max = max_with(row_max, x[i]);
    }
    row_max = block_reduce<Max>(row_max, maxima);

    float row_sum = 0.0f;
#pragma unroll UNROLL
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        row_sum = sum_with(row_sum, x[i], row_max);
    }
    row_sum = block_reduce<Sum>(row_sum, sums);

    const float factor = 1.0f / row_sum;
#pragma unroll UNROLL
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        y[i] = scaled(x[i], row_max, factor);
    }
}
