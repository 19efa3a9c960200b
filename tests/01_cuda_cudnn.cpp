// Attention by cuDNN against the CPU and, where that would take too long, against the program's own kernels. Where
// there is no cuDNN, as on the emulated GPU, only pack_lse() is tested.
#include "01_single_gpu/ops/attention_cudnn.h"
#include "tests/cuda_ops.h"

using namespace train70b;
using namespace train70b::test;

namespace {

using By = Chosen<attention_by>;

// The forward results, of the inputs; then the gradients, of the inputs and of `given` forward results.
Results run(const AttentionShape& s, Device device, DType grad, const Results& given) {
    const Maker make{device, DType::bf16};
    const int64_t rows = s.batch * s.query_len, keys = s.batch * s.key_len, E = s.heads * s.head_dim,
                  K = s.kv_heads * s.head_dim;
    const Tensor q = make.random({rows, E}, 1, 2), k = make.random({keys, K}, 2, 2), v = make.random({keys, K}, 3);
    Tensor out = make.empty({rows, E}), lse = make.floats({rows, s.heads});
    if (given.empty()) {
        attention(out, lse, q, k, v, s);
        return {out, lse};
    }
    copy(out, given[0]);
    copy(lse, given[1]);
    Tensor dq(q.shape(), grad, device), dk(k.shape(), grad, device), dv(v.shape(), grad, device);
    attention_backward(dq, dk, dv, make.random({rows, E}, 4), q, k, v, out, lse, s);
    return {dq, dk, dv};
}

// P, dS and the sums over a group's heads pass through bf16, whose last bit is 2^-8: four halves of it. lse does not.
void expect_bf16(const Results& found, const Results& expected) {
    double largest = 0;
    for (const Tensor& x : expected) largest = std::max(largest, norm(values(x)));
    for (size_t i = 0; i < found.size(); ++i) {
        const std::vector<double> right = values(expected[i]);
        const bool lse = expected.size() == 2 && i == 1;
        // Where each query sees one key at most, dq and dk are 0 but for rounding.
        const double scale = lse ? 1 : norm(right) / std::max(norm(right), 0.1 * largest);
        INFO("result " << i);
        EXPECT(scale * distance(values(found[i]), right) <= (lse ? 1e-4 : 8e-3));
    }
}

void expect_same(const std::string& what, const Results& once, const Results& again) {
    INFO(what << ", twice");
    for (size_t i = 0; i < once.size(); ++i) EXPECT(same_bits(once[i], again[i]));
}

// On `expected`'s device or kernels, and twice by cuDNN.
void compare_cudnn(const AttentionShape& s, DType grad, const std::function<Results(const Results&)>& expected) {
    const std::string what = ops("attention by cuDNN, B Tq Tk H K D causal",
                                 {s.batch, s.query_len, s.key_len, s.heads, s.kv_heads, s.head_dim, s.causal});
    INFO(what);
    const auto by_cudnn = [&](const Results& given) {
        const By by(AttentionBy::cudnn);
        return run(s, Device::cuda, grad, given);
    };
    try {
        const Results forward = expected({}), found = by_cudnn({});
        expect_bf16(found, forward);
        expect_same(what, found, by_cudnn({}));
        const Results gradient = by_cudnn(forward);
        expect_bf16(gradient, expected(forward));
        expect_same(what + ", gradient", gradient, by_cudnn(forward));
    } catch (const UsageError& error) { DOCTEST_FAIL_CHECK(error.what()); }
}

bool have_cudnn() {
    if (!have_gpu()) return false;
    const std::string why = why_not_cudnn(Device::cuda, DType::bf16, 64, false);
    if (!why.empty()) fmt::print("NOT TESTED: attention by cuDNN ({})\n", why);
    return why.empty();
}

}  // namespace

TEST_CASE("cuda: attention and its gradient by cuDNN") {
    if (!have_cudnn()) return;
    for (int64_t D : {64, 96, 128})
        for (const AttentionShape& s : {AttentionShape{2, 128, 128, 4, 4, D, true},
                                        {2, 65, 65, 6, 2, D, true},
                                        {1, 1000, 1000, 8, 2, D, true},
                                        {1, 256, 256, 8, 1, D, false},  // a step of the ring off the diagonal
                                        {1, 130, 70, 4, 1, D, false},
                                        {2, 96, 384, 4, 2, D, true},  // an all-gather's keys
                                        {1, 33, 140, 2, 1, D, true}})
            for (DType grad : {DType::bf16, DType::f32})
                compare_cudnn(s, grad, [&](const Results& given) { return run(s, Device::cpu, grad, given); });
}

TEST_CASE("cuda: the gradient by cuDNN in several calls, of one key/value head each") {
    if (!have_cudnn()) return;
    const AttentionShape s{1, 16384, 16384, 12, 3, 64, true};  // 2 GiB for each
    compare_cudnn(s, DType::bf16, [&](const Results& given) {
        const By own(AttentionBy::own);
        return run(s, Device::cuda, DType::bf16, given);
    });
}

TEST_CASE("cuda: columns of lse, packed and back") {
    if (!have_gpu()) return;
#if TRAIN70B_CUDA
    const AttentionShape s{2, 5, 5, 6, 3, 64};
    const Maker make{Device::cuda, DType::f32};
    const Tensor lse = make.random({10, 6}, 1);
    Tensor packed = make.floats({2, 2, 5}), back = make.zeros({10, 6});
    cuda::pack_lse(packed, lse, s, 3, cuda::PackLse::there);
    cuda::pack_lse(packed, back, s, 3, cuda::PackLse::back);
    const std::vector<double> from = values(lse), to = values(packed), returned = values(back);
    for (size_t b = 0; b < 2; ++b)
        for (size_t t = 0; t < 5; ++t)
            for (size_t head = 0; head < 6; ++head) {
                const size_t at = (b * 5 + t) * 6 + head;
                const bool taken = head == 3 || head == 4;
                if (taken) EXPECT(to[(b * 2 + head - 3) * 5 + t] == from[at]);
                EXPECT(returned[at] == (taken ? from[at] : 0));
            }
#endif
}
