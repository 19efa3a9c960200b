// bias.h on the CPU: the definition that bias.cu is tested against. Then checks and dispatch.
#include "01_single_gpu/ops/bias.h"

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/dispatch.h"

namespace train70b {

namespace cpu {

void add_bias(Tensor& y, const Tensor& bias) {
    with_float(y.dtype(), [&]<class T>(T) {
        using C = Wide<T>;
        const int64_t cols = y.cols();
        const T* b = bias.data<T>();
        parallel_rows(y.rows(), cols, [&](int64_t r) {
            T* out = y.data<T>() + r * cols;
            vectorized(0, cols, [&](int64_t c) { out[c] = T(C(out[c]) + C(b[c])); });
        });
    });
}

void add_bias_backward(Tensor& dbias, const Tensor& dy) {
    with_float(dy.dtype(), [&]<class T>(T) {
        using C = Wide<T>;
        const int64_t cols = dy.cols();
        add_column_sums<C>(dbias, dy.rows(), [&](C* sum, int64_t r, int64_t begin, int64_t end) {
            const T* d = dy.data<T>() + r * cols + begin;
#pragma omp simd
            for (int64_t c = 0; c < end - begin; ++c) sum[c] += C(d[c]);
        });
    });
}

}  // namespace cpu

namespace cuda {  // bias.cu
decltype(train70b::add_bias) add_bias;
decltype(train70b::add_bias_backward) add_bias_backward;
}  // namespace cuda

void add_bias(Tensor& y, const Tensor& bias) {
    expect("bias", bias, {y.cols()}, y.dtype());
    Span span("add_bias", "op", 0, 2 * bytes_of({y}));
    DISPATCH(device_of({y, bias}), add_bias(y, bias));
}

void add_bias_backward(Tensor& dbias, const Tensor& dy) {
    CHECK(dbias.shape() == Shape{dy.cols()} && is_float(dbias.dtype()), "dbias {}", to_string(dbias.shape()));
    Span span("add_bias_backward", "op", 0, bytes_of({dy}));
    DISPATCH(device_of({dbias, dy}), add_bias_backward(dbias, dy));
}

}  // namespace train70b
