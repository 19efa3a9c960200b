// sinks.h on the CPU: the definition that attention_cuda.cu is tested against. Then checks and dispatch.
#include "01_single_gpu/ops/sinks.h"

#include <cmath>

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/dispatch.h"
#include "01_single_gpu/ops/bias.h"

namespace train70b {

namespace cpu {

void add_sinks(Tensor& out, Tensor& lse, const Tensor& sinks) {
    const int64_t heads = lse.cols(), width = out.cols() / heads;
    with_float(out.dtype(), [&]<class T>(T) {
        using C = Wide<T>;
        parallel_rows(lse.rows(), out.cols(), [&](int64_t r) {
            for (int64_t h = 0; h < heads; ++h) {
                C& l = lse.data<C>()[r * heads + h];
                const C sink = C(sinks.data<T>()[h]), largest = std::max(l, sink);
                const C with_sink = largest + std::log(std::exp(l - largest) + std::exp(sink - largest));
                const C keep = std::exp(std::exchange(l, with_sink) - with_sink);
                T* o = out.data<T>() + (r * heads + h) * width;
                vectorized(0, width, [&](int64_t d) { o[d] = T(C(o[d]) * keep); });
            }
        });
    });
}

// terms (R, H): of the sum over the rows.
void sink_terms(Tensor& terms, const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& sinks) {
    const int64_t heads = lse.cols(), width = out.cols() / heads;
    with_float(out.dtype(), [&]<class T>(T) {
        using C = Wide<T>;
        parallel_rows(lse.rows(), out.cols(), [&](int64_t r) {
            for (int64_t i = r * heads; i < (r + 1) * heads; ++i) {
                const T *o = out.data<T>(), *d = dout.data<T>();
                const C delta = reduced<C>(i * width, (i + 1) * width, [&](int64_t j) { return C(o[j]) * C(d[j]); });
                terms.data<C>()[i] = -std::exp(C(sinks.data<T>()[i % heads]) - lse.data<C>()[i]) * delta;
            }
        });
    });
}

}  // namespace cpu

namespace cuda {  // attention_cuda.cu
decltype(train70b::add_sinks) add_sinks;
decltype(cpu::sink_terms) sink_terms;
}  // namespace cuda

namespace {
void check_sinks(const Tensor& out, const Tensor& lse, const Tensor& sinks) {
    expect("sinks", sinks, {lse.cols()}, out.dtype());
    expect("lse", lse, {out.rows(), lse.cols()}, stats_dtype(out.dtype()));
    CHECK(out.cols() % lse.cols() == 0, "out {}, lse {}", to_string(out.shape()), to_string(lse.shape()));
}
}  // namespace

void add_sinks(Tensor& out, Tensor& lse, const Tensor& sinks) {
    check_sinks(out, lse, sinks);
    Span span("add_sinks", "op", 0, 2 * bytes_of({out, lse}));
    DISPATCH(device_of({out, lse, sinks}), add_sinks(out, lse, sinks));
}

void add_sinks_backward(Tensor& dsinks, const Tensor& dout, const Tensor& out, const Tensor& lse, const Tensor& sinks) {
    check_sinks(out, lse, sinks);
    expect("dout", dout, out.shape(), out.dtype());
    Tensor terms = Tensor::like(lse, Memory::workspace);
    {
        Span span("add_sinks_backward", "op", 0, bytes_of({dout, out, lse, terms}));
        DISPATCH(device_of({dout, out, lse, sinks}), sink_terms(terms, dout, out, lse, sinks));
    }
    add_bias_backward(dsinks, terms);
}

}  // namespace train70b
