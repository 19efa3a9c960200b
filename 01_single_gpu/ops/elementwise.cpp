// elementwise.h on the CPU: the definition that elementwise.cu is tested against. Then checks and dispatch.
#include "01_single_gpu/ops/elementwise.h"

#include <cmath>
#include <cstring>
#include <numbers>

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/dispatch.h"
#include "01_single_gpu/core/random.h"
#include "01_single_gpu/ops/transfer.h"

namespace train70b {

namespace cpu {

void fill(Tensor& x, double value) {
    const auto fill_as = [&]<class T>(T v) { std::fill_n(x.data<T>(), x.size(), v); };
    if (x.dtype() == DType::i32) return fill_as(static_cast<int32_t>(value));
    if (x.dtype() == DType::u8) return fill_as(static_cast<uint8_t>(value));
    with_float(x.dtype(), [&]<class T>(T) {
        T* p = x.data<T>();
        const T v(static_cast<Wide<T>>(value));
        parallel_elements(x.size(), [=](int64_t i) { p[i] = v; });
    });
}

void fill_normal(Tensor& x, uint64_t key, const GlobalIndex& index, float std) {
    with_float(x.dtype(), [&]<class T>(T) {
        T* p = x.data<T>();
        parallel_ranges(x.size(), 1024, [=](int64_t begin, int64_t end) {
            for (int64_t i = begin; i < end; ++i) {
                const uint64_t bits = random_bits(key, index.of(i));
                const double u1 = (double(bits >> 32) + 0.5) * 0x1p-32, u2 = double(bits & 0xffffffff) * 0x1p-32;
                const double normal = std::sqrt(-2 * std::log(u1)) * std::cos(2 * std::numbers::pi * u2);
                p[i] = T(float(std * normal));
            }
        });
    });
}

void copy(Tensor& to, const Tensor& from) {
    if (to.dtype() == from.dtype()) {
        std::memcpy(to.raw(), from.raw(), from.bytes());
        return;
    }
    with_float(to.dtype(), from.dtype(), [&]<class To, class From>(To, From) {
        To* t = to.data<To>();
        const From* f = from.data<From>();
        parallel_elements(to.size(), [=](int64_t i) { t[i] = To(f[i]); });
    });
}

void scale(Tensor& x, double factor) {
    with_float(x.dtype(), [&]<class T>(T) {
        using C = Wide<T>;
        T* p = x.data<T>();
        const C by(factor);
        parallel_elements(x.size(), [=](int64_t i) { p[i] = T(C(p[i]) * by); });
    });
}

void add(Tensor& sum, const Tensor& a, const Tensor& b) {
    with_float(sum.dtype(), [&]<class S>(S) {
        with_float(a.dtype(), b.dtype(), [&]<class A, class B>(A, B) {
            using C = Wide<S, A, B>;
            S* s = sum.data<S>();
            const A* x = a.data<A>();
            const B* y = b.data<B>();
            parallel_elements(sum.size(), [=](int64_t i) { s[i] = S(C(x[i]) + C(y[i])); });
        });
    });
}

void swap_blocks(Tensor& to, const Tensor& from, int64_t a, int64_t b) {
    const int64_t width = from.bytes() / std::max<int64_t>(a * b, 1);
    parallel_rows(a * b, width, [&](int64_t i) {
        std::memcpy(to.data<char>() + (i % b * a + i / b) * width, from.data<char>() + i * width, size_t(width));
    });
}

void sum_squares(Tensor& out, const Tensor& x) {
    with_float(x.dtype(), [&]<class T>(T) {
        const T* p = x.data<T>();
        constexpr int64_t kChunk = 16384;  // the same partial sums for any number of threads
        std::vector<double> partial((x.size() + kChunk - 1) / kChunk);
        parallel_rows(partial.size(), kChunk, [&](int64_t c) {
            const auto square = [p](int64_t i) { return double(p[i]) * double(p[i]); };
            partial[c] = reduced<double>(c * kChunk, std::min(x.size(), (c + 1) * kChunk), square);
        });
        *out.data<double>() = std::accumulate(partial.begin(), partial.end(), 0.0);
    });
}

}  // namespace cpu

namespace cuda {  // elementwise.cu
decltype(train70b::fill) fill;
decltype(train70b::fill_normal) fill_normal;
decltype(train70b::copy) copy;
decltype(train70b::scale) scale;
decltype(train70b::add) add;
decltype(train70b::swap_blocks) swap_blocks;
decltype(train70b::sum_squares) sum_squares;
}  // namespace cuda

void fill(Tensor& x, double value) {
    Span span("fill", "op", 0, bytes_of({x}));
    DISPATCH(x.device(), fill(x, value));
}

void fill_normal(Tensor& x, uint64_t key, const GlobalIndex& index, float std) {
    CHECK(is_float(x.dtype()) && index.cols > 0 && index.col_begin + index.cols <= index.global_cols);
    Span span("fill_normal", "op", 0, bytes_of({x}));
    DISPATCH(x.device(), fill_normal(x, key, index, std));
}

void copy(Tensor& to, const Tensor& from) {
    CHECK(to.size() == from.size(), "{} to {}", to_string(from.shape()), to_string(to.shape()));
    CHECK(to.dtype() == from.dtype() || (is_float(to.dtype()) && is_float(from.dtype())), "{} to {}",
          name_of(from.dtype()), name_of(to.dtype()));
    Span span("copy", "op", 0, bytes_of({to, from}));
    if (to.device() != from.device()) {
        const Tensor cast = converted(from, to.dtype(), from.device());
        CHECK(to.device() != Device::meta && from.device() != Device::meta, "{} to {}", name_of(from.device()),
              name_of(to.device()));
#if TRAIN70B_CUDA
        cuda_copy(to.raw(), cast.raw(), to.bytes(),
                  to.device() == Device::cpu ? CopyKind::to_host : CopyKind::to_device);
#endif
        return;
    }
    DISPATCH(to.device(), copy(to, from));
}

void scale(Tensor& x, double factor) {
    CHECK(is_float(x.dtype()), "{}", name_of(x.dtype()));
    Span span("scale", "op", 0, 2 * bytes_of({x}));
    DISPATCH(x.device(), scale(x, factor));
}

void add(Tensor& sum, const Tensor& a, const Tensor& b) {
    CHECK(is_float(a.dtype()) && is_float(b.dtype()) && is_float(sum.dtype()));
    CHECK(sum.size() == a.size() && a.size() == b.size(), "{} + {}", to_string(a.shape()), to_string(b.shape()));
    Span span("add", "op", 0, bytes_of({sum, a, b}));
    DISPATCH(device_of({sum, a, b}), add(sum, a, b));
}

void swap_blocks(Tensor& to, const Tensor& from, int64_t a, int64_t b) {
    CHECK(to.dtype() == from.dtype() && to.size() == from.size() && from.size() % std::max<int64_t>(a * b, 1) == 0 &&
              !to.overlaps(from),
          "{} to {} in blocks of {} x {}", to_string(from.shape()), to_string(to.shape()), a, b);
    Span span("swap_blocks", "op", 0, bytes_of({to, from}));
    DISPATCH(device_of({to, from}), swap_blocks(to, from, a, b));
}

void sum_squares(Tensor& out, const Tensor& x) {
    expect("out", out, {1}, DType::f64);
    CHECK(is_float(x.dtype()), "{}", name_of(x.dtype()));
    Span span("sum_squares", "op", 0, bytes_of({x}));
    DISPATCH(device_of({out, x}), sum_squares(out, x));
}

}  // namespace train70b
