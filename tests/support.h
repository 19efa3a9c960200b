#pragma once
// What the tests share. doctest's macros are used with these names, because CHECK belongs to the programs (check.h).
#define DOCTEST_CONFIG_NO_SHORT_MACRO_NAMES
#include <doctest/doctest.h>

#include <cmath>
#include <cstdlib>
#include <functional>
#include <vector>

#include "01_single_gpu/core/random.h"
#include "01_single_gpu/ops/ops.h"

#define TEST_CASE(name) DOCTEST_TEST_CASE(name)
#define SUBCASE(name) DOCTEST_SUBCASE(name)
#define EXPECT(...) DOCTEST_CHECK(__VA_ARGS__)
#define REQUIRE(...) DOCTEST_REQUIRE(__VA_ARGS__)
#define EXPECT_THROWS_AS(expression, type) DOCTEST_CHECK_THROWS_AS(expression, type)
#define INFO(...) DOCTEST_INFO(__VA_ARGS__)
// The expression must end in a usage error whose line contains `part`.
#define EXPECT_USAGE_ERROR(expression, part) \
    DOCTEST_CHECK_THROWS_WITH_AS((void)(expression), doctest::Contains(part), train70b::UsageError)

namespace train70b::test {

// Under the sanitizers everything takes many times as long: grids of layouts leave out what only repeats.
#ifdef TRAIN70B_POISON
constexpr bool kThorough = false;
#else
constexpr bool kThorough = true;
#endif

// Long grids run an eighth of their layouts on each commit, and all of them with tests/run.sh --all, which sets
// TRAIN70B_TEST_SLICE: "all", or which eighth (0).
inline bool in_slice(int64_t layout) {
    const char* slice = std::getenv("TRAIN70B_TEST_SLICE");
    if (slice && std::string(slice) == "all") return true;
    return layout % 8 == (slice ? std::atoll(slice) % 8 : 0);
}
inline bool all_slices() { return in_slice(0) && in_slice(1); }
// Of each four layouts one, another one in the next four; and of each two.
inline bool in_quarter(int64_t layout) {
    const int64_t turn = layout + layout / 4;
    return in_slice(turn) || in_slice(turn + 4);
}
inline bool in_half(int64_t layout) { return in_quarter(2 * layout) || in_quarter(2 * layout + 1); }

// Under the sanitizers grids whose layouts run the same code take a quarter of them: of each four another one.
inline bool in_sanitized_slice(int64_t layout) { return kThorough || in_quarter(layout); }

// On the emulated GPU (tests/emulate), which is some 100 times slower than the CPU, every grid is long, and outside of
// `all` the models are small. The symbol is there if the program is linked with it.
extern "C" __attribute__((weak)) const int emulated_gpu;
inline const bool kEmulated = &emulated_gpu != nullptr;
// There, too: operations whose name begins so wait until another call; how many have been performed (runtime.cpp).
extern "C" __attribute__((weak)) void emulated_hold(const char* name);
extern "C" __attribute__((weak)) uint64_t emulated_performed(const char* name);
extern "C" __attribute__((weak)) void emulated_fast_algorithm(int n);  // cublaslt.cpp
extern "C" __attribute__((weak)) uint64_t emulated_nccl_bytes(
    int blocks);  // sent, by communicators of so many (nccl.cpp)
inline bool in_gpu_slice(int64_t layout) { return !kEmulated || in_slice(layout); }
inline const bool kSmall = kEmulated && !all_slices();

// Numbers in [-1, 1), the same everywhere; key tells one array from another. Exact in dtype, fp32 or fp64: references
// in double start from the very same numbers.
inline std::vector<double> randoms(int64_t count, uint64_t key, DType dtype = DType::f32) {
    std::vector<double> values(count);
    for (int64_t i = 0; i < count; ++i) {
        const double x = double(random_bits(key, i) >> 11) * 0x1p-52 - 1;
        values[i] = dtype == DType::f64 ? x : double(float(x));
    }
    return values;
}

inline Tensor tensor(const std::vector<double>& values, Shape shape, DType dtype = DType::f32,
                     Device device = Device::cpu) {
    Tensor wide(shape, DType::f64, Device::cpu), host(shape, dtype, Device::cpu);
    REQUIRE(host.size() == int64_t(values.size()));
    std::copy(values.begin(), values.end(), wide.data<double>());
    copy(host, wide);
    if (device == Device::cpu) return host;
    Tensor result(std::move(shape), dtype, device);
    copy(result, host);
    return result;
}

inline std::vector<double> values(const Tensor& x) { return read(x); }

// ||a - b|| / ||b||: infinite or NaN never passes a comparison written as !(error <= bound).
inline double distance(const std::vector<double>& a, const std::vector<double>& b) {
    REQUIRE(a.size() == b.size());
    double difference = 0, size = 0;
    for (size_t i = 0; i < a.size(); ++i) {
        difference += (a[i] - b[i]) * (a[i] - b[i]);
        size += b[i] * b[i];
    }
    return std::sqrt(difference / (size > 0 ? size : 1));
}
inline double distance(const Tensor& a, const std::vector<double>& b) { return distance(values(a), b); }

// What an op on the CPU computes in, and how far from its definition in double it may be, relative to the norm of what
// is expected: gradients are held to finite differences.
struct Accuracy {
    DType dtype;
    double forward, gradient;
};
constexpr Accuracy kAccuracies[] = {{DType::f32, 2e-6, 5e-6}, {DType::f64, 1e-14, 1e-10}};

// d f / d x[i] for every i, by central differences in double: of sixth order, so that the error is 1e-12 or so.
inline std::vector<double> differentiate(const std::function<double(const std::vector<double>&)>& f,
                                         std::vector<double> x) {
    constexpr double h = 2e-3;
    std::vector<double> gradient(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
        const double kept = x[i];
        const auto difference = [&](double step) {
            x[i] = kept + step;
            const double above = f(x);
            x[i] = kept - step;
            return above - f(x);
        };
        gradient[i] = (45 * difference(h) - 9 * difference(2 * h) + difference(3 * h)) / (60 * h);
        x[i] = kept;
    }
    return gradient;
}

inline double dot(const std::vector<double>& a, const std::vector<double>& b) {
    double sum = 0;
    for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
    return sum;
}

// While alive, a failed CHECK throws CheckFailed instead of ending the process.
struct CheckFailed {};
class CatchChecks {
  public:
    CatchChecks() : before_(end_all_ranks) {
        end_all_ranks = [](int) { throw CheckFailed(); };
    }
    ~CatchChecks() { end_all_ranks = before_; }

  private:
    std::function<void(int)> before_;
};
#define EXPECT_CHECK_FAILS(expression)                                            \
    do {                                                                          \
        train70b::test::CatchChecks catching;                                     \
        DOCTEST_CHECK_THROWS_AS((void)(expression), train70b::test::CheckFailed); \
    } while (0)

}  // namespace train70b::test
