// embedding.h on the CPU: the definition that embedding.cu is tested against. Then checks and dispatch.
#include "01_single_gpu/ops/embedding.h"

#include <algorithm>
#include <array>

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/dispatch.h"

namespace train70b {

namespace cpu {

void embedding(Tensor& y, const Tensor& tokens, const Tensor& table, int64_t first_row) {
    with_float(y.dtype(), [&]<class T>(T) {
        const int64_t cols = y.cols();
        parallel_rows(y.rows(), cols, [&](int64_t r) {
            const int64_t row = tokens.data<int32_t>()[r] - first_row;
            T* out = y.data<T>() + r * cols;
            if (row >= 0 && row < table.rows())
                std::copy_n(table.data<T>() + row * cols, cols, out);
            else
                std::fill_n(out, cols, T(0.0f));
        });
    });
}

void embedding_backward(Tensor& dtable, const Tensor& tokens, const Tensor& dy, int64_t first_row, const Tensor&) {
    with_float(dtable.dtype(), dy.dtype(), [&]<class W, class T>(W, T) {
        using C = Wide<W, T>;
        const int64_t cols = dy.cols();
        // Threads share the columns, so that each element of a row sums its tokens in their order.
        parallel_ranges(cols, 16, [&](int64_t begin, int64_t end) {
            for (int64_t r = 0; r < dy.rows(); ++r) {
                const int64_t row = tokens.data<int32_t>()[r] - first_row;
                if (row < 0 || row >= dtable.rows()) continue;
                W* out = dtable.data<W>() + row * cols;
                const T* in = dy.data<T>() + r * cols;
                vectorized(begin, end, [&](int64_t c) { out[c] = W(C(out[c]) + C(in[c])); });
            }
        });
    });
}

}  // namespace cpu

namespace cuda {  // embedding.cu
decltype(train70b::embedding) embedding;
decltype(train70b::embedding_backward) embedding_backward;
}  // namespace cuda

void embedding(Tensor& y, const Tensor& tokens, const Tensor& table, int64_t first_row) {
    expect("tokens", tokens, {y.rows()}, DType::i32);
    expect_rows("y", y, tokens.size(), table.cols(), table.dtype());
    Span span("embedding", "op", 0, 2 * bytes_of({y}));
    DISPATCH(device_of({y, tokens, table}), embedding(y, tokens, table, first_row));
}

void embedding_backward(Tensor& dtable, const Tensor& tokens, const Tensor& dy, int64_t first_row,
                        const Tensor& order) {
    expect("tokens", tokens, {dy.rows()}, DType::i32);
    if (order) expect("order", order, {dy.rows()}, DType::i32);
    CHECK(dtable.cols() == dy.cols() && is_float(dtable.dtype()), "dtable {}", to_string(dtable.shape()));
    Span span("embedding_backward", "op", 0, bytes_of({dy}));
    DISPATCH(device_of({dtable, tokens, dy}), embedding_backward(dtable, tokens, dy, first_row, order));
}

// A radix sort, kBits at a time.
std::vector<int32_t> rows_by_token(const std::vector<int32_t>& tokens) {
    constexpr int kBits = 9, kValues = 1 << kBits;
    int32_t largest = 0;
    for (const int32_t token : tokens) {
        CHECK(token >= 0, "token {}", token);
        largest = std::max(largest, token);
    }
    std::vector<int32_t> order(tokens.size()), before;
    for (size_t row = 0; row < order.size(); ++row) order[row] = int32_t(row);
    for (int shift = 0; shift < 31 && largest >> shift > 0; shift += kBits) {
        before = order;
        const auto digit = [&](int32_t row) { return size_t(tokens[size_t(row)] >> shift & (kValues - 1)); };
        std::array<size_t, kValues + 1> begin{};
        for (const int32_t row : before) ++begin[digit(row) + 1];
        for (size_t value = 0; value < kValues; ++value) begin[value + 1] += begin[value];
        for (const int32_t row : before) order[begin[digit(row)]++] = row;
    }
    return order;
}

}  // namespace train70b
