// The definition of attention, then checks and dispatch. What cpu::attention() computes is in attention_tiled.cpp.
#include "01_single_gpu/ops/attention.h"

#include <cmath>

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/dispatch.h"
#include "01_single_gpu/ops/elementwise.h"
#include "01_single_gpu/ops/transfer.h"

namespace train70b {

// ---- documents -----------------------------------------------------------------------------------------------------

DocumentStarts::DocumentStarts(const std::vector<int32_t>& starts, Device device)
    : on_device(upload(starts, {int64_t(starts.size())}, device)) {
    const auto copied = std::make_shared<const std::vector<int32_t>>(starts);
    on_host = {copied, copied->data()};
}

DocumentStarts DocumentStarts::rows(int64_t begin, int64_t end) const {
    DocumentStarts part;
    if (!*this) return part;
    part.on_device = on_device.row_slice(begin, end);
    part.on_host = {on_host, on_host.get() + begin};
    return part;
}

// ---- the definition ------------------------------------------------------------------------------------------------
namespace {

// A tensor in double, addressed by (row, head, d).
struct Doubles {
    Tensor values;
    int64_t head_dim;
    Doubles(const Shape& shape, int64_t head_dim)
        : values(shape, DType::f64, Device::cpu, Memory::workspace), head_dim(head_dim) {
        fill(values, 0);
    }
    Doubles(const Tensor& x, int64_t head_dim) : Doubles(x.shape(), head_dim) { copy(values, x); }
    double& operator()(int64_t row, int64_t head, int64_t d = 0) const {
        return values.data<double>()[row * values.cols() + head * head_dim + d];
    }
};

// body(sequence, query head, key/value head)
template <class Body>
void for_each_head(const AttentionShape& s, const Body& body) {
    for (int64_t b = 0; b < s.batch; ++b)
        for (int64_t h = 0; h < s.heads; ++h) body(b, h, h / (s.heads / s.kv_heads));
}

// The T x T matrix of one head: (Tq, Tk).
Doubles scores(const Doubles& q, const Doubles& k, const AttentionShape& s, const DocumentStarts& documents, int64_t b,
               int64_t h, int64_t kv) {
    Doubles S({s.query_len, s.key_len}, 1);
    for (int64_t i = 0; i < s.query_len; ++i) {
        const int64_t start = documents ? documents.on_host.get()[b * s.query_len + i] : 0;
        for (int64_t j = 0; j < s.key_len; ++j) {
            for (int64_t d = 0; d < s.head_dim; ++d)
                S(i, j) += q(b * s.query_len + i, h, d) * k(b * s.key_len + j, kv, d);
            S(i, j) /= std::sqrt(double(s.head_dim));
            if (s.causal && j > i + s.key_len - s.query_len) S(i, j) = -INFINITY;
            if (documents && j + s.key_offset < start) S(i, j) = -INFINITY;
        }
    }
    return S;
}

// e^(score - lse); a row that sees no key has lse = -inf and no probabilities.
double probability(double score, double lse) { return score == -INFINITY ? 0 : std::exp(score - lse); }

}  // namespace

void naive_attention(Tensor& out, Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                     const AttentionShape& s, const DocumentStarts& documents) {
    const Doubles Q(q, s.head_dim), K(k, s.head_dim), V(v, s.head_dim);
    const Doubles O(out.shape(), s.head_dim), L(lse.shape(), 1);
    for_each_head(s, [&](int64_t b, int64_t h, int64_t kv) {
        const Doubles S = scores(Q, K, s, documents, b, h, kv);
        for (int64_t i = 0; i < s.query_len; ++i) {
            const int64_t row = b * s.query_len + i;
            double max = -INFINITY, sum = 0;
            for (int64_t j = 0; j < s.key_len; ++j) max = std::max(max, S(i, j));
            for (int64_t j = 0; j < s.key_len; ++j) sum += probability(S(i, j), max);
            L(row, h) = max + std::log(sum);
            for (int64_t j = 0; j < s.key_len; ++j)
                for (int64_t d = 0; d < s.head_dim; ++d)
                    O(row, h, d) += probability(S(i, j), L(row, h)) * V(b * s.key_len + j, kv, d);
        }
    });
    copy(out, O.values);
    copy(lse, L.values);
}

void naive_attention_backward(Tensor& dq, Tensor& dk, Tensor& dv, const Tensor& dout, const Tensor& q, const Tensor& k,
                              const Tensor& v, const Tensor& out, const Tensor& lse, const AttentionShape& s,
                              const DocumentStarts& documents) {
    const int64_t D = s.head_dim;
    const Doubles Q(q, D), K(k, D), V(v, D), O(out, D), L(lse, 1), dO(dout, D);
    const Doubles dQ(q.shape(), D), dK(k.shape(), D), dV(v.shape(), D);
    for_each_head(s, [&](int64_t b, int64_t h, int64_t kv) {
        const Doubles S = scores(Q, K, s, documents, b, h, kv);
        for (int64_t i = 0; i < s.query_len; ++i) {
            const int64_t row = b * s.query_len + i;
            double delta = 0;
            for (int64_t d = 0; d < D; ++d) delta += dO(row, h, d) * O(row, h, d);
            for (int64_t j = 0; j < s.key_len; ++j) {
                const int64_t key = b * s.key_len + j;
                double dP = 0;
                for (int64_t d = 0; d < D; ++d) dP += dO(row, h, d) * V(key, kv, d);
                const double P = probability(S(i, j), L(row, h)), dS = P * (dP - delta) / std::sqrt(double(D));
                for (int64_t d = 0; d < D; ++d) {
                    dQ(row, h, d) += dS * K(key, kv, d);
                    dK(key, kv, d) += dS * Q(row, h, d);
                    dV(key, kv, d) += P * dO(row, h, d);
                }
            }
        }
    });
    copy(dq, dQ.values);
    copy(dk, dK.values);
    copy(dv, dV.values);
}

// ---- merging two sets of keys --------------------------------------------------------------------------------------

namespace cpu {
void merge_attention(Tensor& out, Tensor& lse, const Tensor& part_out, const Tensor& part_lse) {
    with_float(part_out.dtype(), [&]<class T>(T) {
        using C = Wide<T>;
        const int64_t width = out.cols() / lse.cols();  // of a head
        // tag::lab-lse-merge[]
        parallel_rows(lse.size(), width, [&](int64_t i) {  // row by row, head by head
            C &l1 = lse.data<C>()[i], l2 = part_lse.data<C>()[i];
            const C row_max = std::max(l1, l2);
            if (row_max == -INFINITY) return;  // no keys in either
            const C l = row_max + std::log(std::exp(l1 - row_max) + std::exp(l2 - row_max));
            const C keep = std::exp(l1 - l), take = std::exp(l2 - l);
            C* o = out.data<C>() + i * width;
            const T* part = part_out.data<T>() + i * width;
#pragma omp simd
            for (int64_t d = 0; d < width; ++d) o[d] = o[d] * keep + C(part[d]) * take;
            l1 = l;
        });
        // end::lab-lse-merge[]
    });
}
}  // namespace cpu

// ---- cuDNN or own kernels ------------------------------------------------------------------------------------------

namespace cuda {              // attention_cuda.cu
std::string why_no_cudnn();   // in a build with cuDNN: attention_cudnn.cpp
std::string cudnn_version();  // the same
decltype(train70b::attention) attention;
decltype(train70b::attention_backward) attention_backward;
decltype(train70b::merge_attention) merge_attention;
}  // namespace cuda

std::string why_not_cudnn(Device device, DType dtype, int64_t head_dim, bool documents) {
    if (dtype != DType::bf16) return fmt::format("cuDNN's is for --dtype bf16, not {}", name_of(dtype));
    if (documents) return "cuDNN's has no mask for --document-token or --window";
    if (head_dim != 64 && head_dim != 96 && head_dim != 128)
        return fmt::format("cuDNN's is used for head sizes of 64, 96 and 128, not {}", head_dim);
    if (device == Device::cpu) return "cuDNN's is for --device cuda, not cpu";
#if TRAIN70B_CUDA
    if (device == Device::cuda) return cuda::why_no_cudnn();
#endif
    return "";
}

std::string attention_text(Device device, DType dtype, int64_t head_dim, bool documents) {
    if (attention_by == AttentionBy::own) return "own kernels";
    const std::string why = why_not_cudnn(device, dtype, head_dim, documents);
#if TRAIN70B_CUDA
    if (why.empty() && device == Device::cuda) return "cuDNN " + cuda::cudnn_version();
#endif
    return why.empty() ? "cuDNN" : fmt::format("own kernels ({})", why);
}

// ---- checks and dispatch -------------------------------------------------------------------------------------------

namespace cpu {  // attention_tiled.cpp
decltype(train70b::attention) attention;
decltype(train70b::attention_backward) attention_backward;
}  // namespace cpu

namespace {

void check_attention(const Tensor& out, const Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                     const AttentionShape& s, const DocumentStarts& documents) {
    CHECK(s.kv_heads > 0 && s.heads % s.kv_heads == 0, "{} query heads, {} key/value heads", s.heads, s.kv_heads);
    CHECK(s.head_dim > 0 && s.head_dim <= kMaxHeadDim, "head_dim {}", s.head_dim);
    for (const Tensor& part : List{q, out})
        expect_rows("q or out", part, s.batch * s.query_len, s.heads * s.head_dim, q.dtype());
    for (const Tensor& part : List{k, v})
        expect_rows("k or v", part, s.batch * s.key_len, s.kv_heads * s.head_dim, q.dtype());
    expect("lse", lse, {s.batch * s.query_len, s.heads}, stats_dtype(q.dtype()));
    if (!documents) return;
    expect("document starts", documents.on_device, {s.batch * s.query_len}, DType::i32);
    device_of({q, documents.on_device});
    for (int64_t b = 0; b < s.batch; ++b) {
        const int32_t* starts = documents.on_host.get() + b * s.query_len;
        CHECK(std::is_sorted(starts, starts + s.query_len), "the document starts of sequence {} are not ascending", b);
    }
}

}  // namespace

double visible_pairs(const AttentionShape& s, const DocumentStarts& documents) {
    if (!documents) {  // the last query sees all keys, the one before it one less, ...
        const auto triangle = [](int64_t n) { return n > 0 ? double(n) * double(n + 1) / 2 : 0; };
        const double seen = triangle(s.key_len) - triangle(s.key_len - s.query_len);
        return (s.causal ? seen : double(s.query_len) * double(s.key_len)) * double(s.heads) * double(s.batch);
    }
    double pairs = 0;
    for (int64_t row = 0; row < s.batch * s.query_len; ++row) {
        const int64_t limit = s.causal ? row % s.query_len + 1 + s.key_len - s.query_len : s.key_len;
        const int64_t first = documents.on_host.get()[row] - s.key_offset;
        pairs += std::max<int64_t>(std::min(limit, s.key_len) - std::max<int64_t>(first, 0), 0);
    }
    return pairs * s.heads;
}

void attention(Tensor& out, Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape,
               const DocumentStarts& documents) {
    check_attention(out, lse, q, k, v, shape, documents);
    Span span("attention", "op", 4 * visible_pairs(shape, documents) * shape.head_dim, bytes_of({out, q, k, v}),
              {{shape.batch, shape.query_len, shape.key_len, shape.heads, shape.kv_heads, shape.head_dim, shape.causal},
               q.dtype()});
    DISPATCH(device_of({out, lse, q, k, v}), attention(out, lse, q, k, v, shape, documents));
}

void attention_backward(Tensor& dq, Tensor& dk, Tensor& dv, const Tensor& dout, const Tensor& q, const Tensor& k,
                        const Tensor& v, const Tensor& out, const Tensor& lse, const AttentionShape& shape,
                        const DocumentStarts& documents) {
    check_attention(out, lse, q, k, v, shape, documents);
    expect_rows("dout", dout, q.rows(), q.cols(), q.dtype());
    CHECK(dq.size() == q.size() && dk.size() == k.size() && dv.size() == v.size());
    for (const Tensor& part : List{dq, dk, dv})
        CHECK(part.dtype() == q.dtype() || part.dtype() == stats_dtype(q.dtype()), "{}", name_of(part.dtype()));
    Span span("attention_backward", "op", 10 * visible_pairs(shape, documents) * shape.head_dim,
              bytes_of({dq, dk, dv, dout, q, k, v, out}),
              {{shape.batch, shape.query_len, shape.key_len, shape.heads, shape.kv_heads, shape.head_dim, shape.causal},
               q.dtype()});
    DISPATCH(device_of({dq, dk, dv, dout, q, k, v, out, lse}),
             attention_backward(dq, dk, dv, dout, q, k, v, out, lse, shape, documents));
}

void merge_attention(Tensor& out, Tensor& lse, const Tensor& part_out, const Tensor& part_lse) {
    const DType stats = stats_dtype(part_out.dtype());
    expect("lse", lse, {lse.rows(), lse.cols()}, stats);
    expect("part_lse", part_lse, lse.shape(), stats);
    CHECK(out.dtype() == stats && out.cols() % lse.cols() == 0, "out {} {}", name_of(out.dtype()),
          to_string(out.shape()));
    for (const Tensor& part : List{out, part_out})
        expect_rows("out or part_out", part, lse.rows(), out.cols(), part.dtype());
    Span span("merge_attention", "op", 0, bytes_of({out, out, part_out, lse, lse, part_lse}));
    DISPATCH(device_of({out, lse, part_out, part_lse}), merge_attention(out, lse, part_out, part_lse));
}

}  // namespace train70b
