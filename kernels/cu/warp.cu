// (a) A group of lanes holds a row in its registers.
#include "butterfly.cuh"
#include "pack.cuh"

// A block of (LANES, rows) threads: each group of LANES lanes computes one row. A lane
// holds PACKS packs, which all lie in the row, except perhaps the last.
template <typename T, int PACK, int LANES, int PACKS>
__global__ void softmax_warp(T* output, const T* input, long long output_row_stride,
                             long long input_row_stride, long long n_rows,
                             long long n_cols) {
    const long long row = (long long)blockIdx.x * blockDim.y + threadIdx.y;
    // A group without a row reads the last one: the butterfly needs all 32 lanes.
    const T* x = input + min(row, n_rows - 1) * input_row_stride;

    float values[PACKS][PACK];
    float row_max = Max::identity();
#pragma unroll  // or `values` would be indexed at run time, as registers can't be
    for (int i = 0; i < PACKS; ++i) {
        // Neighbouring lanes load neighbouring packs, so the load is coalesced.
        const int col = (i * LANES + threadIdx.x) * PACK;
        const bool inside = i < PACKS - 1 || col < n_cols;
        Pack<T, PACK> pack;
        if (inside) pack = *reinterpret_cast<const Pack<T, PACK>*>(x + col);
#pragma unroll
        for (int j = 0; j < PACK; ++j) {
            values[i][j] = inside ? float(pack.values[j]) : Max::identity();
            row_max = fmaxf(row_max, values[i][j]);
        }
    }
    row_max = group_reduce<Max, LANES>(row_max);

    float row_sum = 0.0f;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
#pragma unroll
        for (int j = 0; j < PACK; ++j) {
            values[i][j] = __expf(values[i][j] - row_max);  // 0 outside of the row
            row_sum += values[i][j];
        }
    }
    row_sum = group_reduce<Sum, LANES>(row_sum);

    if (row >= n_rows) return;  // no shuffle follows
    T* y = output + row * output_row_stride;
    const float factor = 1.0f / row_sum;  // one division a row
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
        const int col = (i * LANES + threadIdx.x) * PACK;
        Pack<T, PACK> pack;
#pragma unroll
        for (int j = 0; j < PACK; ++j) pack.values[j] = T(values[i][j] * factor);
        if (i < PACKS - 1 || col < n_cols) {
            *reinterpret_cast<Pack<T, PACK>*>(y + col) = pack;
        }
    }
}
