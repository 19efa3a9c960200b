// embedding.h on a GPU: one block per row.
#include "01_single_gpu/core/cuda.cuh"
#include "01_single_gpu/ops/embedding.h"

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

// The block of a token's first row sums over all its rows, in their order; the blocks of the later ones return. In
// `order`, the rows sorted by token, those of a token follow each other. Without it (not sorted) they lie anywhere.
template <class W, class T, bool sorted>
__global__ void embedding_backward_kernel(W* dtable, const int32_t* tokens, const int32_t* order, const T* dy,
                                          int64_t rows, int64_t cols, int64_t table_rows, int64_t first_row) {
    const int64_t first = blockIdx.x;
    const auto row_at = [&](int64_t i) { return sorted ? int64_t(order[i]) : i; };
    const int32_t token = tokens[row_at(first)];
    const int64_t row = token - first_row;
    if (row < 0 || row >= table_rows) return;
    int seen_before = 0;
    for (int64_t i = sorted ? max(first - 1, int64_t(0)) : threadIdx.x; i < first; i += blockDim.x)
        seen_before |= tokens[row_at(i)] == token;
    if (__syncthreads_or(seen_before)) return;
    for (int64_t c = int64_t(threadIdx.x) * kPack; c < cols; c += int64_t(blockDim.x) * kPack) {
        float sum[kPack] = {}, v[kPack];
        for (int64_t i = first; i < rows; ++i) {
            const int64_t r = row_at(i);
            if (tokens[r] != token) {
                if (sorted) break;
                continue;
            }
            load(v, dy + r * cols, c, cols);
            for (int j = 0; j < kPack; ++j) sum[j] += v[j];
        }
        load(v, dtable + row * cols, c, cols);
        for (int j = 0; j < kPack; ++j) sum[j] += v[j];
        store(dtable + row * cols, c, cols, sum);
    }
}

}  // namespace

void embedding(Tensor& y, const Tensor& tokens, const Tensor& table, int64_t first_row) {
    with_float(y.dtype(), [&](auto zero) {
        using T = decltype(zero);
        launch(embedding_kernel<T>, {blocks_for(y.rows(), 1)}, y.data<T>(), tokens.data<int32_t>(), table.data<T>(),
               y.cols(), table.rows(), first_row);
    });
}

void embedding_backward(Tensor& dtable, const Tensor& tokens, const Tensor& dy, int64_t first_row,
                        const Tensor& order) {
    with_float(dtable.dtype(), dy.dtype(), [&](auto table_zero, auto dy_zero) {
        using W = decltype(table_zero);
        using T = decltype(dy_zero);
        launch(order ? embedding_backward_kernel<W, T, true> : embedding_backward_kernel<W, T, false>,
               {blocks_for(dy.rows(), 1)}, dtable.data<W>(), tokens.data<int32_t>(),
               order ? order.data<int32_t>() : nullptr, dy.data<T>(), dy.rows(), dy.cols(), dtable.rows(), first_row);
    });
}

}  // namespace train70b::cuda
