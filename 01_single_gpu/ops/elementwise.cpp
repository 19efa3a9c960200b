// elementwise.h on the CPU: the definition that elementwise.cu is tested against. Then checks and dispatch.
#include "01_single_gpu/ops/elementwise.h"

#include <cstring>

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/core/dispatch.h"

namespace train70b {

namespace cpu {

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
    with_float(to.dtype(), from.dtype(), [&](auto to_zero, auto from_zero) {
        using To = decltype(to_zero);
        To* t = to.data<To>();
        const auto* f = from.data<decltype(from_zero)>();
        parallel_elements(to.size(), [=](int64_t i) { t[i] = To(f[i]); });
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
        with_float(a.dtype(), b.dtype(), [&](auto a_zero, auto b_zero) {
            using T = decltype(sum_zero);
            using C = Wide<T, decltype(a_zero), decltype(b_zero)>;
            T* s = sum.data<T>();
            const auto* x = a.data<decltype(a_zero)>();
            const auto* y = b.data<decltype(b_zero)>();
            parallel_elements(sum.size(), [=](int64_t i) { s[i] = T(C(x[i]) + C(y[i])); });
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
    with_float(x.dtype(), [&](auto zero) {
        const auto* p = x.data<decltype(zero)>();
        constexpr int64_t kChunk = 16384;  // the same partial sums for any number of threads
        std::vector<double> partial((x.size() + kChunk - 1) / kChunk);
        parallel_ranges(partial.size(), 1, [&](int64_t begin, int64_t end) {
            for (int64_t c = begin; c < end; ++c) {
                const auto square = [p](int64_t i) { return double(p[i]) * double(p[i]); };
                partial[c] = reduced<double>(c * kChunk, std::min(x.size(), (c + 1) * kChunk), square);
            }
        });
        double total = 0;
        for (double sum : partial) total += sum;
        *out.data<double>() = total;
    });
}

}  // namespace cpu

namespace cuda {  // elementwise.cu
decltype(train70b::fill) fill;
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

namespace {
// Between two devices, same dtype.
void move([[maybe_unused]] Tensor& to, [[maybe_unused]] const Tensor& from) {
    CHECK(to.device() != Device::meta && from.device() != Device::meta, "{} to {}", name_of(from.device()),
          name_of(to.device()));
#if TRAIN70B_CUDA
    cuda_copy(to.raw(), from.raw(), from.bytes(), to.device() == Device::cpu ? CopyKind::to_host : CopyKind::to_device);
#endif
}
}  // namespace

void copy(Tensor& to, const Tensor& from) {
    CHECK(to.size() == from.size(), "{} to {}", to_string(from.shape()), to_string(to.shape()));
    CHECK(to.dtype() == from.dtype() || (is_float(to.dtype()) && is_float(from.dtype())), "{} to {}",
          name_of(from.dtype()), name_of(to.dtype()));
    Span span("copy", "op", 0, bytes_of({to, from}));
    if (to.device() == from.device()) {
        DISPATCH(to.device(), copy(to, from));
    } else if (to.dtype() != from.dtype()) {  // cast on the source device, then move
        Tensor cast(from.shape(), to.dtype(), from.device(), Memory::workspace);
        copy(cast, from);
        move(to, cast);
    } else {
        move(to, from);
    }
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
