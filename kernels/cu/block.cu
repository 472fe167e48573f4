// (b) A block holds a row in shared memory.
#include "block_reduce.cuh"
#include "pack.cuh"

// One block computes one row. The launch asks for n_cols * sizeof(T) bytes of shared
// memory.
template <typename T, int PACK, int UNROLL>
__global__ void __launch_bounds__(1024)
softmax_block(T* output, const T* input, long long output_row_stride,
              long long input_row_stride, long long n_rows, long long n_cols) {
    extern __shared__ __align__(32) unsigned char shared[];
    __shared__ float maxima[32], sums[32];  // one for each warp
    using P = Pack<T, PACK>;
    P* row = reinterpret_cast<P*>(shared);
    const P* x = reinterpret_cast<const P*>(input + blockIdx.x * input_row_stride);
    P* y = reinterpret_cast<P*>(output + blockIdx.x * output_row_stride);
    const unsigned packs = n_cols / PACK, threads = blockDim.x;

    float row_max = Max::identity();
    for (unsigned first = threadIdx.x; first < packs; first += UNROLL * threads) {
        P loaded[UNROLL];  // so many loads are under way before the first is used
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            const unsigned i = first + k * threads;
            if (i < packs) loaded[k] = x[i];
        }
#pragma unroll
        for (int k = 0; k < UNROLL; ++k) {
            const unsigned i = first + k * threads;
            if (i < packs) {
                row[i] = loaded[k];
                row_max = max_with(row_max, loaded[k]);
            }
        }
    }
    row_max = block_reduce<Max>(row_max, maxima);

    // A thread reads only packs that it wrote itself: they need no barrier.
    float row_sum = 0.0f;
    for (unsigned i = threadIdx.x; i < packs; i += threads) {
        row_sum = sum_with(row_sum, row[i], row_max);
    }
    row_sum = block_reduce<Sum>(row_sum, sums);

    const float factor = 1.0f / row_sum;
    for (unsigned i = threadIdx.x; i < packs; i += threads) {
        y[i] = softmax_of(row[i], row_max, factor);
    }
}
