// The butterfly at any width: right for powers of two only.

// One warp. Each lane reads a value and writes what the butterfly of WIDTH lanes finds.
template <int WIDTH>
__global__ void widths(float* maxima, float* sums, const float* input) {
    float maximum = input[threadIdx.x], sum = input[threadIdx.x];
    for (int distance = WIDTH / 2; distance > 0; distance /= 2) {
        maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffff, maximum, distance));
        sum += __shfl_xor_sync(0xffffffff, sum, distance);
    }
    maxima[threadIdx.x] = maximum;
    sums[threadIdx.x] = sum;
}
