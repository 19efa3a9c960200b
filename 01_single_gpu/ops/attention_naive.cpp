// Attention as the textbook has it, per sequence and query head h (with key/value head h / (H / K)):
//   forward    S = q k^T / sqrt(D), -inf where the mask hides a key;  lse = log sum_j e^S;  P = e^(S - lse);  out = P v
//   backward   dP = dout v^T;  dS = P (dP - sum(dout * out))
//              dq = dS k / sqrt(D);  dk = dS^T q / sqrt(D);  dv = P^T dout
#include "01_single_gpu/ops/attention_naive.h"

#include <cmath>

namespace train70b {
namespace {

// A tensor in double, addressed by (row, head, d).
struct Doubles {
    Tensor values;
    int64_t head_dim;
    Doubles(const Tensor& x, int64_t head_dim)
        : values(x.shape(), DType::f64, Device::cpu, Memory::workspace), head_dim(head_dim) {
        copy(values, x);
    }
    Doubles(const Shape& shape, int64_t head_dim)
        : values(shape, DType::f64, Device::cpu, Memory::workspace), head_dim(head_dim) {
        fill(values, 0);
    }
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
Doubles scores(const Doubles& q, const Doubles& k, const AttentionShape& s, int64_t b, int64_t h, int64_t kv) {
    Doubles S({s.query_len, s.key_len}, 1);
    for (int64_t i = 0; i < s.query_len; ++i)
        for (int64_t j = 0; j < s.key_len; ++j) {
            for (int64_t d = 0; d < s.head_dim; ++d)
                S(i, j) += q(b * s.query_len + i, h, d) * k(b * s.key_len + j, kv, d);
            S(i, j) /= std::sqrt(double(s.head_dim));
            if (s.causal && j > i + s.key_len - s.query_len) S(i, j) = -INFINITY;
        }
    return S;
}

// e^(score - lse); a row that sees no key has lse = -inf and no probabilities.
double probability(double score, double lse) { return score == -INFINITY ? 0 : std::exp(score - lse); }

}  // namespace

void naive_attention(Tensor& out, Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                     const AttentionShape& s) {
    const Doubles Q(q, s.head_dim), K(k, s.head_dim), V(v, s.head_dim);
    const Doubles O(out.shape(), s.head_dim), L(lse.shape(), 1);
    for_each_head(s, [&](int64_t b, int64_t h, int64_t kv) {
        const Doubles S = scores(Q, K, s, b, h, kv);
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
                              const Tensor& v, const Tensor& out, const Tensor& lse, const AttentionShape& s) {
    const int64_t D = s.head_dim;
    const Doubles Q(q, D), K(k, D), V(v, D), O(out, D), L(lse, 1), dO(dout, D);
    const Doubles dQ(q.shape(), D), dK(k.shape(), D), dV(v.shape(), D);
    for_each_head(s, [&](int64_t b, int64_t h, int64_t kv) {
        const Doubles S = scores(Q, K, s, b, h, kv);
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

}  // namespace train70b
