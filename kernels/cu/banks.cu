// Bank conflicts: lane i of a warp reads word i * STRIDE of shared memory.

constexpr int WORDS = 32 * 33, READS = 256;

// One warp. `cycles` gets the clock cycles of READS reads that wait for each other.
template <int STRIDE>
__global__ void banks(int* cycles, int* sink) {
    __shared__ volatile int words[WORDS];  // volatile: every read happens
    for (int i = threadIdx.x; i < WORDS; i += 32) words[i] = 0;
    __syncthreads();
    int place = threadIdx.x * STRIDE % WORDS;
    const long long begin = clock64();
#pragma unroll 1
    for (int i = 0; i < READS; ++i) place += words[place];  // adds 0, but must wait
    const long long end = clock64();
    if (threadIdx.x == 0) *cycles = int(end - begin);
    sink[threadIdx.x] = place;  // or the compiler would drop the loop
}
