// (c) A block reads a row three times and keeps nothing of it.
#include "block_reduce.cuh"
#include "pack.cuh"

// One block computes one row, of any length.
template <typename T, int PACK, int UNROLL>
__global__ void __launch_bounds__(1024)
softmax_uncached(T* output, const T* input, long long output_row_stride,
                 long long input_row_stride, long long n_rows, long long n_cols) {
    __shared__ float maxima[32], sums[32];  // one for each warp
    using P = Pack<T, PACK>;
    const P* x = reinterpret_cast<const P*>(input + blockIdx.x * input_row_stride);
    P* y = reinterpret_cast<P*>(output + blockIdx.x * output_row_stride);
    const unsigned packs = n_cols / PACK, threads = blockDim.x;

    float row_max = Max::identity();
#pragma unroll UNROLL
    for (unsigned i = threadIdx.x; i < packs; i += threads) {
        row_max = max_with(row_max, x[i]);
    }
    row_max = block_reduce<Max>(row_max, maxima);

    float row_sum = 0.0f;
#pragma unroll UNROLL
    for (unsigned i = threadIdx.x; i < packs; i += threads) {
        row_sum = sum_with(row_sum, x[i], row_max);
    }
    row_sum = block_reduce<Sum>(row_sum, sums);

    const float factor = 1.0f / row_sum;
#pragma unroll UNROLL
    for (unsigned i = threadIdx.x; i < packs; i += threads) {
        y[i] = softmax_of(x[i], row_max, factor);
    }
}
