// cross_entropy.h on the CPU: the definition that cross_entropy.cu is tested against. Then checks and dispatch.
#include "01_single_gpu/ops/cross_entropy.h"

#include <cmath>

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/dispatch.h"

namespace train70b {

namespace cpu {

void softmax_stats(Tensor& row_max, Tensor& row_sum, Tensor& target_logit, const Tensor& logits, const Tensor& targets,
                   int64_t first_vocab, int64_t vocab, double logit_scale) {
    with_float(logits.dtype(), [&]<class T>(T) {
        using C = Wide<T>;
        const int64_t cols = logits.cols(), real = std::clamp<int64_t>(vocab - first_vocab, 0, cols);
        const C multiplier(logit_scale);
        parallel_rows(logits.rows(), cols, [&](int64_t r) {
            const int32_t id = targets.data<int32_t>()[r];
            if (id == kIgnored) {
                row_max.data<C>()[r] = target_logit.data<C>()[r] = 0;
                row_sum.data<C>()[r] = first_vocab == 0 ? 1 : 0;
                return;
            }
            const T* x = logits.data<T>() + r * cols;
            const auto logit = [x, multiplier](int64_t c) { return C(x[c]) * multiplier; };
            const auto larger = [](C a, C b) { return b > a ? b : a; };  // a where b is NaN
            const C max = reduced<C>(0, real, logit, -INFINITY, larger);
            const C sum = reduced<C>(0, real, [&](int64_t c) { return exp_simd(logit(c) - max); });
            const int64_t target = id - first_vocab;
            row_max.data<C>()[r] = max;
            row_sum.data<C>()[r] = sum;
            target_logit.data<C>()[r] = target >= 0 && target < real ? C(x[target]) * multiplier : C(0);
        });
    });
}

void rescale_sums(Tensor& row_sum, const Tensor& row_max, const Tensor& whole_max) {
    with_wide(row_sum.dtype(), [&]<class C>(C) {
        for (int64_t r = 0; r < row_sum.size(); ++r)
            row_sum.data<C>()[r] *= exp_simd(row_max.data<C>()[r] - whole_max.data<C>()[r]);
    });
}

void cross_entropy(Tensor& loss, Tensor& lse, const Tensor& row_max, const Tensor& row_sum, const Tensor& target_logit,
                   double scale, double z_loss) {
    with_wide(loss.dtype(), [&]<class C>(C) {
        double sum = 0, squares = 0;
        for (int64_t r = 0; r < lse.size(); ++r) {
            const double log_sum = double(row_max.data<C>()[r]) + std::log(double(row_sum.data<C>()[r]));
            lse.data<C>()[r] = C(log_sum);
            sum += log_sum - double(target_logit.data<C>()[r]);
            squares += log_sum * log_sum;
        }
        *loss.data<C>() = C(sum * double(C(scale)));
        if (loss.size() > 1) loss.data<C>()[1] = C(squares * double(C(scale)) * double(C(z_loss)));
    });
}

void cross_entropy_backward(Tensor& logits, const Tensor& targets, const Tensor& lse, double scale, int64_t first_vocab,
                            int64_t vocab, double logit_scale, double z_loss) {
    with_float(logits.dtype(), [&]<class T>(T) {
        using C = Wide<T>;
        const int64_t cols = logits.cols(), real = std::clamp<int64_t>(vocab - first_vocab, 0, cols);
        const C factor = C(scale) * C(logit_scale), multiplier(logit_scale), twice_z(2 * z_loss);
        parallel_rows(logits.rows(), cols, [&](int64_t r) {
            T* x = logits.data<T>() + r * cols;
            const int32_t id = targets.data<int32_t>()[r];
            if (id == kIgnored) {
                std::fill(x, x + cols, T(0.0f));
                return;
            }
            const int64_t target = id - first_vocab;
            const C row_lse = lse.data<C>()[r];
            const C weight = twice_z == 0 ? C(1) : 1 + twice_z * row_lse;  // of the softmax
            const C at_target = target >= 0 && target < real ? C(x[target]) * multiplier : C(0);
            vectorized(0, real,
                       [&](int64_t c) { x[c] = T(exp_simd(C(x[c]) * multiplier - row_lse) * weight * factor); });
            std::fill(x + real, x + cols, T(0.0f));
            if (target >= 0 && target < real) x[target] = T((exp_simd(at_target - row_lse) * weight - 1) * factor);
        });
    });
}

}  // namespace cpu

namespace cuda {  // cross_entropy.cu
decltype(train70b::softmax_stats) softmax_stats;
decltype(train70b::rescale_sums) rescale_sums;
decltype(train70b::cross_entropy) cross_entropy;
decltype(train70b::cross_entropy_backward) cross_entropy_backward;
}  // namespace cuda

void softmax_stats(Tensor& row_max, Tensor& row_sum, Tensor& target_logit, const Tensor& logits, const Tensor& targets,
                   int64_t first_vocab, int64_t vocab, double logit_scale) {
    for (const Tensor& part : List{row_max, row_sum, target_logit})
        expect("row_max, row_sum or target_logit", part, {logits.rows()}, stats_dtype(logits.dtype()));
    expect("targets", targets, {logits.rows()}, DType::i32);
    Span span("softmax_stats", "op", 0, bytes_of({logits}));
    DISPATCH(device_of({row_max, row_sum, target_logit, logits, targets}),
             softmax_stats(row_max, row_sum, target_logit, logits, targets, first_vocab, vocab, logit_scale));
}

void rescale_sums(Tensor& row_sum, const Tensor& row_max, const Tensor& whole_max) {
    for (const Tensor& part : List{row_sum, row_max, whole_max})
        expect("row_sum, row_max or whole_max", part, {row_sum.size()}, stats_dtype(row_sum.dtype()));
    Span span("rescale_sums", "op", 0, bytes_of({row_sum, row_sum, row_max, whole_max}));
    DISPATCH(device_of({row_sum, row_max, whole_max}), rescale_sums(row_sum, row_max, whole_max));
}

void cross_entropy(Tensor& loss, Tensor& lse, const Tensor& row_max, const Tensor& row_sum, const Tensor& target_logit,
                   double scale, double z_loss) {
    expect("loss", loss, {z_loss == 0 ? 1 : 2}, stats_dtype(loss.dtype()));
    for (const Tensor& part : List{lse, row_max, row_sum, target_logit})
        expect("lse, row_max, row_sum or target_logit", part, {lse.size()}, loss.dtype());
    Span span("cross_entropy", "op", 0, bytes_of({lse, row_max, row_sum, target_logit}));
    DISPATCH(device_of({loss, lse, row_max, row_sum, target_logit}),
             cross_entropy(loss, lse, row_max, row_sum, target_logit, scale, z_loss));
}

void cross_entropy_backward(Tensor& logits, const Tensor& targets, const Tensor& lse, double scale, int64_t first_vocab,
                            int64_t vocab, double logit_scale, double z_loss) {
    expect("targets", targets, {logits.rows()}, DType::i32);
    expect("lse", lse, {logits.rows()}, stats_dtype(logits.dtype()));
    Span span("cross_entropy_backward", "op", 0, 2 * bytes_of({logits}));
    DISPATCH(device_of({logits, targets, lse}),
             cross_entropy_backward(logits, targets, lse, scale, first_vocab, vocab, logit_scale, z_loss));
}

}  // namespace train70b
