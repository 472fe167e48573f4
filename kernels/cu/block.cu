// (b) A block holds a row in shared memory.
#include "common.cuh"

// One block computes one row. It asks for n_cols * sizeof(T) bytes of shared memory.
template <typename T, int PACK, int UNROLL>
__global__ void __launch_bounds__(1024)
softmax_block(T* output, const T* input, long long output_row_stride,
              long long input_row_stride, long long n_rows, long long n_cols) {
    extern __shared__ __align__(32) unsigned char shared[];
    __shared__ float maxima[32], sums[32];  // one for each warp
    Pack<T, PACK>* row = reinterpret_cast<Pack<T, PACK>*>(shared);
    const int packs = n_cols / PACK;
    const Pack<T, PACK>* x = reinterpret_cast<const Pack<T, PACK>*>(
        input + blockIdx.x * input_row_stride);
    Pack<T, PACK>* y =
        reinterpret_cast<Pack<T, PACK>*>(output + blockIdx.x * output_row_stride);

    float row_max = -CUDART_INF_F;
    for (int first = threadIdx.x; first < packs; first += UNROLL * blockDim.x) {
        Pack<T, PACK> loaded[UNROLL];  // so many loads are under way at once
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            const int i = first + k * blockDim.x;
            if (i < packs) loaded[k] = x[i];
        }
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            const int i = first + k * blockDim.x;
            if (i < packs) {
                row[i] = loaded[k];
                row_max = max_with(row_max, loaded[k]);
            }
        }
    }
    row_max = block_reduce<Max>(row_max, maxima);

    // A thread reads only the packs that it wrote, so no barrier is needed for `row`.
    float row_sum = 0.0f;
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        row_sum = sum_with(row_sum, row[i], row_max);
    }
    row_sum = block_reduce<Sum>(row_sum, sums);

    const float factor = 1.0f / row_sum;
    for (int i = threadIdx.x; i < packs; i += blockDim.x) {
        y[i] = scaled(row[i], row_max, factor);
    }
}
