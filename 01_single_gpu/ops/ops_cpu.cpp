// The ops on the CPU: the definition that the CUDA kernels are tested against. Attention has a file of its own.
#include <cmath>
#include <cstring>
#include <numbers>

#include "01_single_gpu/core/random.h"
#include "01_single_gpu/ops/cpu.h"
#include "01_single_gpu/ops/kernels.h"
#include "01_single_gpu/ops/ops.h"

namespace train70b {

namespace cpu {
namespace {

// x itself when it is fp32 or fp64, else an fp32 copy of it: what the BLAS can read.
Tensor for_blas(const Tensor& x) {
    if (x.dtype() == stats_dtype(x.dtype())) return x;
    Tensor wide(x.shape(), DType::f32, Device::cpu, Memory::workspace);
    cpu::copy(wide, x);
    return wide;
}

}  // namespace

void matmul_into(Tensor& c, const Tensor& a, const Tensor& b, Transpose transpose, float beta) {
    const bool ta = transpose == Transpose::a, tb = transpose == Transpose::b;
    const int64_t m = c.rows(), n = c.cols(), k = ta ? a.rows() : a.cols();
    const Tensor wide_a = for_blas(a), wide_b = for_blas(b);
    const bool narrow = c.dtype() != wide_a.dtype();
    Tensor wide_c = narrow ? Tensor(c.shape(), wide_a.dtype(), Device::cpu, Memory::workspace) : c;
    if (narrow && beta != 0) cpu::copy(wide_c, c);
    with_wide(wide_a.dtype(), [&](auto zero) {
        using C = decltype(zero);
        gemm(ta, tb, m, n, k, C(1), wide_a.data<C>(), a.cols(), wide_b.data<C>(), b.cols(), C(beta), wide_c.data<C>(),
             n);
    });
    if (narrow) cpu::copy(c, wide_c);
}

void fill(Tensor& x, double value) {
    if (x.dtype() == DType::i32) {
        std::fill_n(x.data<int32_t>(), x.size(), static_cast<int32_t>(value));
        return;
    }
    if (x.dtype() == DType::u8) {
        std::fill_n(x.data<uint8_t>(), x.size(), static_cast<uint8_t>(value));
        return;
    }
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        T* p = x.data<T>();
        const T v(static_cast<Wide<T>>(value));
        parallel_elements(x.size(), [=](int64_t i) { p[i] = v; });
    });
}

void copy(Tensor& to, const Tensor& from) {
    if (to.dtype() == from.dtype()) {
        std::memcpy(to.raw(), from.raw(), from.bytes());
        return;
    }
    with_float(to.dtype(), [&](auto to_zero) {
        with_float(from.dtype(), [&](auto from_zero) {
            using To = decltype(to_zero);
            To* t = to.data<To>();
            const auto* f = from.data<decltype(from_zero)>();
            parallel_elements(to.size(), [=](int64_t i) { t[i] = To(f[i]); });
        });
    });
}

void scale(Tensor& x, double factor) {
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using C = Wide<T>;
        T* p = x.data<T>();
        const C by(factor);
        parallel_elements(x.size(), [=](int64_t i) { p[i] = T(C(p[i]) * by); });
    });
}

void add(Tensor& sum, const Tensor& a, const Tensor& b) {
    with_float(sum.dtype(), [&](auto sum_zero) {
        with_float(a.dtype(), [&](auto a_zero) {
            with_float(b.dtype(), [&](auto b_zero) {
                using T = decltype(sum_zero);
                using C = Wide<T, decltype(a_zero), decltype(b_zero)>;
                T* s = sum.data<T>();
                const auto* x = a.data<decltype(a_zero)>();
                const auto* y = b.data<decltype(b_zero)>();
                parallel_elements(sum.size(), [=](int64_t i) { s[i] = T(C(x[i]) + C(y[i])); });
            });
        });
    });
}

void swap_blocks(Tensor& to, const Tensor& from, int64_t a, int64_t b) {
    const int64_t width = from.bytes() / (a * b);
    parallel_rows(a * b, width, [&](int64_t i) {
        std::memcpy(to.data<char>() + (i % b * a + i / b) * width, from.data<char>() + i * width, size_t(width));
    });
}

void sum_squares(Tensor& out, const Tensor& x) {
    with_float(x.dtype(), [&](auto zero) {
        const auto* p = x.data<decltype(zero)>();
        constexpr int64_t kChunk = 16384;  // partial sums of fixed ranges, added in order: any number of threads agrees
        std::vector<double> partial((x.size() + kChunk - 1) / kChunk);
        parallel_ranges(partial.size(), 1, [&](int64_t begin, int64_t end) {
            for (int64_t c = begin; c < end; ++c) {
                double sum = 0;
                const int64_t last = std::min(x.size(), (c + 1) * kChunk);
#pragma omp simd reduction(+ : sum)
                for (int64_t i = c * kChunk; i < last; ++i) sum += double(p[i]) * double(p[i]);
                partial[c] = sum;
            }
        });
        double total = 0;
        for (double sum : partial) total += sum;
        *out.data<double>() = total;
    });
}

void embedding(Tensor& y, const Tensor& tokens, const Tensor& table, int64_t first_row) {
    with_float(y.dtype(), [&](auto zero) {
        using T = decltype(zero);
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

void embedding_backward(Tensor& dtable, const Tensor& tokens, const Tensor& dy, int64_t first_row) {
    with_float(dtable.dtype(), [&](auto table_zero) {
        with_float(dy.dtype(), [&](auto dy_zero) {
            using T = decltype(table_zero);
            using C = Wide<T, decltype(dy_zero)>;
            const int64_t cols = dy.cols();
            // Threads share the columns, so that each element of a row sums its tokens in their order.
            parallel_ranges(cols, 16, [&](int64_t begin, int64_t end) {
                for (int64_t r = 0; r < dy.rows(); ++r) {
                    const int64_t row = tokens.data<int32_t>()[r] - first_row;
                    if (row < 0 || row >= dtable.rows()) continue;
                    T* out = dtable.data<T>() + row * cols;
                    const auto* in = dy.data<decltype(dy_zero)>() + r * cols;
#pragma omp simd
                    for (int64_t c = begin; c < end; ++c) out[c] = T(C(out[c]) + C(in[c]));
                }
            });
        });
    });
}

namespace {
template <class T>
void norm_row(T* y, const T* x, const T* weight, Wide<T> inv, int64_t cols) {
    using C = Wide<T>;
#pragma omp simd
    for (int64_t c = 0; c < cols; ++c) y[c] = T(C(x[c]) * inv * C(weight[c]));
}

template <class T>
Wide<T> inv_rms_of(const T* x, int64_t cols, double eps) {
    using C = Wide<T>;
    C sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t c = 0; c < cols; ++c) sum += C(x[c]) * C(x[c]);
    return C(1) / std::sqrt(sum / C(cols) + C(eps));
}
}  // namespace

void rmsnorm(Tensor& y, Tensor& inv_rms, const Tensor& x, const Tensor& weight, double eps) {
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const int64_t cols = x.cols();
        parallel_rows(x.rows(), cols, [&](int64_t r) {
            const T* in = x.data<T>() + r * cols;
            const auto inv = inv_rms.data<Wide<T>>()[r] = inv_rms_of(in, cols, eps);
            norm_row(y.data<T>() + r * cols, in, weight.data<T>(), inv, cols);
        });
    });
}

void add_rmsnorm(Tensor& sum, Tensor& y, Tensor& inv_rms, const Tensor& a, const Tensor& b, const Tensor& weight,
                 double eps) {
    cpu::add(sum, a, b);
    cpu::rmsnorm(y, inv_rms, sum, weight, eps);
}

void rmsnorm_again(Tensor& y, const Tensor& x, const Tensor& inv_rms, const Tensor& weight) {
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const int64_t cols = x.cols();
        parallel_rows(x.rows(), cols, [&](int64_t r) {
            norm_row(y.data<T>() + r * cols, x.data<T>() + r * cols, weight.data<T>(), inv_rms.data<Wide<T>>()[r],
                     cols);
        });
    });
}

// With n = x * inv the normalised row and g = dy * weight:  dx = inv * (g - n * mean(g n)),  dweight = sum over rows dy
// n.
void rmsnorm_backward(Tensor& dx, Tensor& dweight, const Tensor& dy, const Tensor& x, const Tensor& inv_rms,
                      const Tensor& weight) {
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using C = Wide<T>;
        const int64_t rows = x.rows(), cols = x.cols();
        const C* inv = inv_rms.data<C>();
        parallel_rows(rows, cols, [&](int64_t r) {
            const T *in = x.data<T>() + r * cols, *d = dy.data<T>() + r * cols, *w = weight.data<T>();
            T* out = dx.data<T>() + r * cols;
            C dot = 0;
#pragma omp simd reduction(+ : dot)
            for (int64_t c = 0; c < cols; ++c) dot += C(d[c]) * C(w[c]) * C(in[c]);
            const C mean = dot * inv[r] * inv[r] / C(cols);
#pragma omp simd
            for (int64_t c = 0; c < cols; ++c) out[c] = T(inv[r] * (C(d[c]) * C(w[c]) - C(in[c]) * mean));
        });
        with_float(dweight.dtype(), [&](auto dweight_zero) {
            using W = decltype(dweight_zero);
            parallel_ranges(cols, 16, [&](int64_t begin, int64_t end) {  // columns: each sums its rows in order
                std::vector<C> sum(end - begin);
                for (int64_t r = 0; r < rows; ++r) {
                    const T *in = x.data<T>() + r * cols + begin, *d = dy.data<T>() + r * cols + begin;
#pragma omp simd
                    for (int64_t c = 0; c < end - begin; ++c) sum[c] += C(d[c]) * C(in[c]) * inv[r];
                }
                W* out = dweight.data<W>() + begin;
                for (int64_t c = 0; c < end - begin; ++c) out[c] = W(C(out[c]) + sum[c]);
            });
        });
    });
}

namespace {
// cos and sin of position * inv_freq, one pair for each (i, i + D/2); in double, because positions may be a million.
template <class C>
struct Rotation {
    C cos[kMaxHeadDim / 2], sin[kMaxHeadDim / 2];
    Rotation(const Rope& rope, int32_t position) {
        for (int i = 0; i < rope.head_dim / 2; ++i) {
            const double angle = position * rope.inv_freq[i];
            cos[i] = C(std::cos(angle));
            sin[i] = C(std::sin(angle));
        }
    }
};

// direction +1: forward; -1: the transposed (inverse) rotation, which is the gradient.
template <class T>
void rotate_heads(T* out, const T* in, int64_t heads, int half, const Rotation<Wide<T>>& rotation, int direction) {
    for (int64_t h = 0; h < heads; ++h, in += 2 * half, out += 2 * half) {
#pragma omp simd
        for (int i = 0; i < half; ++i) {
            const Wide<T> a = in[i], b = in[i + half], c = rotation.cos[i], s = Wide<T>(direction) * rotation.sin[i];
            out[i] = T(a * c - b * s);
            out[i + half] = T(b * c + a * s);
        }
    }
}
}  // namespace

void split_rope(Tensor& q, Tensor& k, Tensor& v, const Tensor& qkv, const Tensor& positions, const Rope& rope) {
    with_float(qkv.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const int64_t q_cols = q.cols(), kv_cols = k.cols();
        const int half = rope.head_dim / 2;
        parallel_rows(qkv.rows(), qkv.cols(), [&](int64_t r) {
            const Rotation<Wide<T>> rotation(rope, positions.data<int32_t>()[r]);
            const T* in = qkv.data<T>() + r * (q_cols + 2 * kv_cols);
            rotate_heads(q.data<T>() + r * q_cols, in, q_cols / rope.head_dim, half, rotation, 1);
            rotate_heads(k.data<T>() + r * kv_cols, in + q_cols, kv_cols / rope.head_dim, half, rotation, 1);
            std::copy_n(in + q_cols + kv_cols, kv_cols, v.data<T>() + r * kv_cols);
        });
    });
}

void split_rope_backward(Tensor& dqkv, const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& positions,
                         const Rope& rope) {
    with_float(dqkv.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const int64_t q_cols = dq.cols(), kv_cols = dk.cols();
        const int half = rope.head_dim / 2;
        parallel_rows(dqkv.rows(), dqkv.cols(), [&](int64_t r) {
            const Rotation<Wide<T>> rotation(rope, positions.data<int32_t>()[r]);
            T* out = dqkv.data<T>() + r * (q_cols + 2 * kv_cols);
            rotate_heads(out, dq.data<T>() + r * q_cols, q_cols / rope.head_dim, half, rotation, -1);
            rotate_heads(out + q_cols, dk.data<T>() + r * kv_cols, kv_cols / rope.head_dim, half, rotation, -1);
            std::copy_n(dv.data<T>() + r * kv_cols, kv_cols, out + q_cols + kv_cols);
        });
    });
}

void merge_attention(Tensor& out, Tensor& lse, const Tensor& part_out, const Tensor& part_lse) {
    with_float(part_out.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using C = Wide<T>;
        const int64_t heads = lse.cols(), width = out.cols() / heads;
        parallel_rows(lse.size(), width, [&](int64_t i) {  // row by row, head by head
            C &l1 = lse.data<C>()[i], l2 = part_lse.data<C>()[i];
            const C most = std::max(l1, l2);
            if (most == -INFINITY) return;  // no keys in either
            const C l = most + std::log(std::exp(l1 - most) + std::exp(l2 - most));
            const C keep = std::exp(l1 - l), take = std::exp(l2 - l);
            C* o = out.data<C>() + i * width;
            const T* part = part_out.data<T>() + i * width;
#pragma omp simd
            for (int64_t d = 0; d < width; ++d) o[d] = o[d] * keep + C(part[d]) * take;
            l1 = l;
        });
    });
}

void swiglu(Tensor& h, const Tensor& gate_up) {
    with_float(h.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const int64_t cols = h.cols();
        parallel_rows(h.rows(), cols, [&](int64_t r) {
            const T *gate = gate_up.data<T>() + r * 2 * cols, *up = gate + cols;
            T* out = h.data<T>() + r * cols;
#pragma omp simd
            for (int64_t c = 0; c < cols; ++c) {
                const Wide<T> g = gate[c];
                out[c] = T(g / (1 + exp_simd(-g)) * Wide<T>(up[c]));
            }
        });
    });
}

// With s = sigmoid(gate): d silu / d gate = s * (1 + gate * (1 - s)).
void swiglu_backward(Tensor& dgate_up, const Tensor& dh, const Tensor& gate_up) {
    with_float(dh.dtype(), [&](auto zero) {
        using T = decltype(zero);
        const int64_t cols = dh.cols();
        parallel_rows(dh.rows(), cols, [&](int64_t r) {
            const T *gate = gate_up.data<T>() + r * 2 * cols, *up = gate + cols, *d = dh.data<T>() + r * cols;
            T *dgate = dgate_up.data<T>() + r * 2 * cols, *dup = dgate + cols;
#pragma omp simd
            for (int64_t c = 0; c < cols; ++c) {
                const Wide<T> g = gate[c], u = up[c], dy = d[c], s = 1 / (1 + exp_simd(-g));
                dgate[c] = T(dy * u * s * (1 + g * (1 - s)));
                dup[c] = T(dy * g * s);
            }
        });
    });
}

void softmax_stats(Tensor& row_max, Tensor& row_sum, Tensor& target_logit, const Tensor& logits, const Tensor& targets,
                   int64_t first_vocab, int64_t vocab) {
    with_float(logits.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using C = Wide<T>;
        const int64_t cols = logits.cols(), real = std::clamp<int64_t>(vocab - first_vocab, 0, cols);
        parallel_rows(logits.rows(), cols, [&](int64_t r) {
            const T* x = logits.data<T>() + r * cols;
            C max = -INFINITY, sum = 0;
#pragma omp simd reduction(max : max)
            for (int64_t c = 0; c < real; ++c) max = std::max(max, C(x[c]));
#pragma omp simd reduction(+ : sum)
            for (int64_t c = 0; c < real; ++c) sum += exp_simd(C(x[c]) - max);
            const int64_t target = targets.data<int32_t>()[r] - first_vocab;
            row_max.data<C>()[r] = max;
            row_sum.data<C>()[r] = sum;
            target_logit.data<C>()[r] = target >= 0 && target < real ? C(x[target]) : C(0);
        });
    });
}

void rescale_sums(Tensor& row_sum, const Tensor& row_max, const Tensor& whole_max) {
    with_wide(row_sum.dtype(), [&](auto zero) {
        using C = decltype(zero);
        for (int64_t r = 0; r < row_sum.size(); ++r)
            row_sum.data<C>()[r] *= exp_simd(row_max.data<C>()[r] - whole_max.data<C>()[r]);
    });
}

void cross_entropy(Tensor& loss, Tensor& lse, const Tensor& row_max, const Tensor& row_sum, const Tensor& target_logit,
                   double scale) {
    with_wide(loss.dtype(), [&](auto zero) {
        using C = decltype(zero);
        double sum = 0;
        for (int64_t r = 0; r < lse.size(); ++r) {
            const double log_sum = double(row_max.data<C>()[r]) + std::log(double(row_sum.data<C>()[r]));
            lse.data<C>()[r] = C(log_sum);
            sum += log_sum - double(target_logit.data<C>()[r]);
        }
        *loss.data<C>() = C(sum * double(C(scale)));
    });
}

void cross_entropy_backward(Tensor& logits, const Tensor& targets, const Tensor& lse, double scale, int64_t first_vocab,
                            int64_t vocab) {
    with_float(logits.dtype(), [&](auto zero) {
        using T = decltype(zero);
        using C = Wide<T>;
        const int64_t cols = logits.cols(), real = std::clamp<int64_t>(vocab - first_vocab, 0, cols);
        const C factor(scale);
        parallel_rows(logits.rows(), cols, [&](int64_t r) {
            T* x = logits.data<T>() + r * cols;
            const int64_t target = targets.data<int32_t>()[r] - first_vocab;
            const C row_lse = lse.data<C>()[r];
            const C at_target = target >= 0 && target < real ? C(x[target]) : C(0);
#pragma omp simd
            for (int64_t c = 0; c < real; ++c) x[c] = T(exp_simd(C(x[c]) - row_lse) * factor);
            std::fill(x + real, x + cols, T(0.0f));
            if (target >= 0 && target < real) x[target] = T((exp_simd(at_target - row_lse) - 1) * factor);
        });
    });
}

void adamw(Tensor& param, Tensor& master, Tensor& exp_avg, Tensor& exp_avg_sq, const Tensor& grad,
           const AdamWStep& step) {
    with_float(param.dtype(), [&](auto param_zero) {
        with_float(grad.dtype(), [&](auto grad_zero) {
            using P = decltype(param_zero);
            using C = Wide<P>;
            constexpr bool has_master = !std::is_same_v<P, C>;
            P* p = param.data<P>();
            C* w = (has_master ? master : param).template data<C>();
            C *m = exp_avg.data<C>(), *v = exp_avg_sq.data<C>();
            const auto* g = grad.data<decltype(grad_zero)>();
            const AdamWFactors<C> f(step);
            parallel_elements(param.size(), [=](int64_t i) {
                const C gradient = C(g[i]) * f.grad_scale;
                m[i] = f.beta1 * m[i] + (1 - f.beta1) * gradient;
                v[i] = f.beta2 * v[i] + (1 - f.beta2) * gradient * gradient;
                w[i] = w[i] * f.keep - f.step_size * m[i] / (std::sqrt(v[i]) * f.inv_sqrt_correction2 + f.eps);
                if constexpr (has_master) p[i] = P(w[i]);
            });
        });
    });
}

void fill_normal(Tensor& x, uint64_t key, const GlobalIndex& index, float std) {
    with_float(x.dtype(), [&](auto zero) {
        using T = decltype(zero);
        T* p = x.data<T>();
        parallel_ranges(x.size(), 1024, [=](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                const int64_t row = (index.offset + i) / index.cols, col = (index.offset + i) % index.cols;
                const uint64_t global = (index.row_begin + row) * index.global_cols + index.col_begin + col;
                const uint64_t bits = random_bits(key, global);
                const double u1 = (double(bits >> 32) + 0.5) * 0x1p-32, u2 = double(bits & 0xffffffff) * 0x1p-32;
                const double normal = std::sqrt(-2 * std::log(u1)) * std::cos(2 * std::numbers::pi * u2);
                p[i] = T(float(std * normal));
            }
        });
    });
}

}  // namespace cpu
}  // namespace train70b
