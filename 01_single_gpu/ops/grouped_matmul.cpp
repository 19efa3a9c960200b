#include "01_single_gpu/ops/grouped_matmul.h"

#include <numeric>

#include "01_single_gpu/core/dispatch.h"

namespace train70b {
namespace {

// body(group, its first row, the one behind its last), of those that have rows
template <class Body>
void for_groups(const std::vector<int64_t>& rows, const Body& body) {
    int64_t begin = 0;
    for (size_t g = 0; g < rows.size(); ++g) {
        if (rows[g] > 0) body(int64_t(g), begin, begin + rows[g]);
        begin += rows[g];
    }
}

void check_groups(const std::vector<int64_t>& rows, const Tensor& a, const Tensor& w) {
    CHECK(std::accumulate(rows.begin(), rows.end(), int64_t(0)) == a.rows(), "groups of other rows than {}", a.rows());
    CHECK(!rows.empty() && w.rows() % int64_t(rows.size()) == 0, "{} groups, w {}", rows.size(), to_string(w.shape()));
}

Tensor matrix(const Tensor& w, int64_t group, const std::vector<int64_t>& rows) {
    const int64_t out = w.rows() / int64_t(rows.size());
    return w.row_slice(group * out, (group + 1) * out);
}

// c_g = a_g op(W_g)
void products(Tensor& c, const Tensor& a, const Tensor& w, const std::vector<int64_t>& rows, Transpose transpose) {
    check_groups(rows, a, w);
#if TRAIN70B_CUDA
    if (c.device() == Device::cuda && cuda::in_one_call(c, a, w, rows)) {
        const int64_t out = w.rows() / int64_t(rows.size());
        expect_rows("a", a, a.rows(), transpose == Transpose::b ? w.cols() : out, w.dtype());
        expect_rows("c", c, a.rows(), transpose == Transpose::b ? out : w.cols(), w.dtype());
        Span span("grouped_matmul", "op", 2.0 * double(a.rows()) * double(a.cols()) * double(c.cols()),
                  bytes_of({c, a, w}));
        return cuda::grouped_matmul(c, a, w, rows, transpose);
    }
#endif
    for_groups(rows, [&](int64_t g, int64_t begin, int64_t end) {
        Tensor part = c.row_slice(begin, end);
        matmul_into(part, a.row_slice(begin, end), matrix(w, g, rows), transpose, 0, Rows::vary);
    });
}

}  // namespace

void grouped_forward(Tensor& y, const Tensor& x, const Tensor& w, const std::vector<int64_t>& rows) {
    products(y, x, w, rows, Transpose::b);
}

void grouped_dgrad(Tensor& dx, const Tensor& dy, const Tensor& w, const std::vector<int64_t>& rows) {
    products(dx, dy, w, rows, Transpose::none);
}

void grouped_wgrad(Tensor& dw, const Tensor& dy, const Tensor& x, const std::vector<int64_t>& rows) {
    check_groups(rows, x, dw);
    for_groups(rows, [&](int64_t g, int64_t begin, int64_t end) {
        Tensor part = matrix(dw, g, rows);
        matmul_into(part, dy.row_slice(begin, end), x.row_slice(begin, end), Transpose::a, 1, Rows::vary);
    });
}

}  // namespace train70b
