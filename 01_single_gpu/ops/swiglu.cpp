// swiglu.h on the CPU: the definition that swiglu.cu is tested against. Then checks and dispatch.
#include "01_single_gpu/ops/swiglu.h"

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/dispatch.h"

namespace train70b {

namespace cpu {

void swiglu(Tensor& h, const Tensor& gate_up) {
    with_float(h.dtype(), [&]<class T>(T) {
        const int64_t cols = h.cols();
        parallel_rows(h.rows(), cols, [&](int64_t r) {
            const T *gate = gate_up.data<T>() + r * 2 * cols, *up = gate + cols;
            T* out = h.data<T>() + r * cols;
            vectorized(0, cols, [&](int64_t c) {
                const Wide<T> g = gate[c];
                out[c] = T(g / (1 + exp_simd(-g)) * Wide<T>(up[c]));
            });
        });
    });
}

void swiglu_backward(Tensor& dgate_up, const Tensor& dh, const Tensor& gate_up) {
    with_float(dh.dtype(), [&]<class T>(T) {
        const int64_t cols = dh.cols();
        parallel_rows(dh.rows(), cols, [&](int64_t r) {
            const T *gate = gate_up.data<T>() + r * 2 * cols, *up = gate + cols, *d = dh.data<T>() + r * cols;
            T *dgate = dgate_up.data<T>() + r * 2 * cols, *dup = dgate + cols;
            vectorized(0, cols, [&](int64_t c) {
                const Wide<T> g = gate[c], u = up[c], dy = d[c], s = 1 / (1 + exp_simd(-g));
                dgate[c] = T(dy * u * s * (1 + g * (1 - s)));
                dup[c] = T(dy * g * s);
            });
        });
    });
}

}  // namespace cpu

namespace cuda {  // swiglu.cu
decltype(train70b::swiglu) swiglu;
decltype(train70b::swiglu_backward) swiglu_backward;
}  // namespace cuda

void swiglu(Tensor& h, const Tensor& gate_up) {
    expect_rows("gate_up", gate_up, h.rows(), 2 * h.cols(), h.dtype());
    Span span("swiglu", "op", 0, bytes_of({h, gate_up}));
    DISPATCH(device_of({h, gate_up}), swiglu(h, gate_up));
}

void swiglu_backward(Tensor& dgate_up, const Tensor& dh, const Tensor& gate_up) {
    expect_rows("gate_up", gate_up, dh.rows(), 2 * dh.cols(), dh.dtype());
    expect_rows("dgate_up", dgate_up, gate_up.rows(), gate_up.cols(), gate_up.dtype());
    Span span("swiglu_backward", "op", 0, bytes_of({dgate_up, dh, gate_up}));
    DISPATCH(device_of({dgate_up, dh, gate_up}), swiglu_backward(dgate_up, dh, gate_up));
}

}  // namespace train70b
