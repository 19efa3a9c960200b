// c (M, N) = a (M, K) b (N, K)^T, in fp32, all row-major. A block has 1,024 threads and computes 32 x 32 elements of c,
// one in each thread: for 32 k at a time it brings a tile of a and one of b to shared memory, and multiplies them.
#include <cuda_runtime.h>

constexpr int kSide = 32;

__global__ void product(float* c, const float* a, const float* b, int M, int N, int K) {
    __shared__ float a_tile[kSide][kSide];
    __shared__ float b_tile[kSide][kSide];
    const int x = threadIdx.x % kSide, y = threadIdx.x / kSide;
    const int row = blockIdx.y * kSide + y, col = blockIdx.x * kSide + x, col_of_tile = blockIdx.x * kSide + y;
    float sum = 0;
    for (int k = 0; k < K; k += kSide) {
        a_tile[y][x] = row < M && k + x < K ? a[row * K + k + x] : 0;
        b_tile[y][x] = col_of_tile < N && k + x < K ? b[col_of_tile * K + k + x] : 0;
        __syncthreads();
        for (int j = 0; j < kSide; ++j) sum += a_tile[y][j] * b_tile[x][j];
    }
    if (row < M && col < N) c[row * N + col] = sum;
}
