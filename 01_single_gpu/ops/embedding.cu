// embedding.h on a GPU: one block per row.
#include "01_single_gpu/core/cuda.cuh"
#include "01_single_gpu/ops/embedding.h"
#include "01_single_gpu/ops/transfer.h"

namespace train70b::cuda {
namespace {

template <class T>
__global__ void embedding_kernel(T* y, const int32_t* tokens, const T* table, int64_t cols, int64_t table_rows,
                                 int64_t first_row) {
    const int64_t row = tokens[blockIdx.x] - first_row;
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
        float v[kPack] = {};
        if (row >= 0 && row < table_rows) load(v, table + row * cols, c, cols);
        store(y + blockIdx.x * cols, c, cols, v);
    }
}

// The gradient. `order` is the rows sorted by token. The run of a token in it is cut wherever a multiple of kRows lies,
// and blocks sum the parts. The sum of a whole run is added to the table at once; those of parts wait in partial
// (blocks of kRows, 2, cols): of a part that begins its run in row 1, of others in row 0.
constexpr int64_t kRows = 64;

__device__ inline int32_t token_at(const int32_t* tokens, const int32_t* order, int64_t rows, int64_t i) {
    return i >= 0 && i < rows ? tokens[order[i]] : -1;
}

// The block of a part's first row sums all of it, in the order of the rows; those of the other rows return.
template <class W, class T, bool wide>
__global__ void embedding_backward_kernel(W* dtable, float* partial, const int32_t* tokens, const int32_t* order,
                                          const T* dy, int64_t rows, int64_t cols, int64_t table_rows,
                                          int64_t first_row) {
    __shared__ int32_t row_at[kRows];
    const int64_t first = blockIdx.x, room = min(kRows - first % kRows, rows - first);
    const int32_t token = token_at(tokens, order, rows, first);
    const int64_t row = token - first_row;
    const bool began = token_at(tokens, order, rows, first - 1) == token;
    if (row < 0 || row >= table_rows || (began && first % kRows != 0)) return;
    const int32_t mine = threadIdx.x < room ? order[first + threadIdx.x] : -1;
    if (mine >= 0) row_at[threadIdx.x] = mine;
    const int count = block_reduce(int(mine >= 0 && tokens[mine] == token), Sum());
    const bool whole = !began && token_at(tokens, order, rows, first + count) != token;
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
        float sum[kPack] = {}, v[kPack];
#pragma unroll 4
        for (int i = 0; i < count; ++i) {
            load<wide>(v, dy + row_at[i] * cols, c, cols);
            for (int j = 0; j < kPack; ++j) sum[j] += v[j];
        }
        if (whole) {
            load(v, dtable + row * cols, c, cols);
            for (int j = 0; j < kPack; ++j) sum[j] += v[j];
            store(dtable + row * cols, c, cols, sum);
        } else
            store(partial + (2 * (first / kRows) + !began) * cols, c, cols, sum);
    }
}

// Sums the parts, in their order, of the run that begins in the blockIdx.x-th kRows rows and goes on behind them.
template <class W>
__global__ void embedding_parts_kernel(W* dtable, const float* partial, const int32_t* tokens, const int32_t* order,
                                       int64_t rows, int64_t cols, int64_t table_rows, int64_t first_row) {
    const auto token_of = [&](int64_t i) { return token_at(tokens, order, rows, i); };
    const int64_t c = int64_t(blockIdx.y) * blockDim.x + threadIdx.x;
    int64_t part = blockIdx.x;
    const int32_t token = token_of(part * kRows + kRows - 1);
    const int64_t row = token - first_row;
    if (c >= cols || row < 0 || row >= table_rows || token_of(part * kRows - 1) == token) return;
    if (token_of((part + 1) * kRows) != token) return;
    float sum = partial[(2 * part + 1) * cols + c];
    while (token_of(++part * kRows) == token) sum += partial[2 * part * cols + c];
    dtable[row * cols + c] = from_float<W>(to_float(dtable[row * cols + c]) + sum);
}

}  // namespace

void embedding(Tensor& y, const Tensor& tokens, const Tensor& table, int64_t first_row) {
    with_float(y.dtype(), [&]<class T>(T) {
        launch(embedding_kernel<T>, {blocks_for(y.rows(), 1)}, y, tokens, table, y.cols(), table.rows(), first_row);
    });
}

void embedding_backward(Tensor& dtable, const Tensor& tokens, const Tensor& dy, int64_t first_row,
                        const Tensor& order) {
    if (!order) {
        const std::vector<double> ids = read(tokens);
        const std::vector<int32_t> sorted = rows_by_token({ids.begin(), ids.end()});
        return cuda::embedding_backward(dtable, tokens, dy, first_row, upload(sorted, {tokens.size()}, Device::cuda));
    }
    const unsigned parts = blocks_for(dy.rows(), kRows);
    Tensor partial({parts, 2, dy.cols()}, DType::f32, Device::cuda, Memory::workspace);
    with_float(dtable.dtype(), dy.dtype(), [&]<class W, class T>(W, T) {
        const bool wide = in_packs({&dy});
        launch(wide ? embedding_backward_kernel<W, T, true> : embedding_backward_kernel<W, T, false>,
               {blocks_for(dy.rows(), 1)}, dtable, partial, tokens, order, dy, dy.rows(), dy.cols(), dtable.rows(),
               first_row);
        launch(embedding_parts_kernel<W>, {{parts, blocks_for(dy.cols(), kThreads)}}, dtable, partial, tokens, order,
               dy.rows(), dy.cols(), dtable.rows(), first_row);
    });
}

}  // namespace train70b::cuda
