#pragma once
// Shared by the CPU ops: dispatch over element types and parallel loops. The counterpart of cuda.cuh.
#include <omp.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <type_traits>

#include "01_single_gpu/core/bf16.h"
#include "01_single_gpu/core/exponential.h"
#include "01_single_gpu/core/tensor.h"

namespace train70b::cpu {

// Calls body with a value of the element type: with_float(x.dtype(), [&]<class T>(T) { ... })
template <class Body>
void with_float(DType dtype, Body&& body) {
    if (dtype == DType::f32)
        body(float{});
    else if (dtype == DType::bf16)
        body(bf16{});
    else if (dtype == DType::f64)
        body(double{});
    else
        CHECK(false, "no CPU kernel for {}", name_of(dtype));
}
template <class Body>
void with_float(DType first, DType second, Body&& body) {  // with a value of each type
    with_float(first, [&](auto a) { with_float(second, [&](auto b) { body(a, b); }); });
}

// The same for a stats_dtype: float or double.
template <class Body>
void with_wide(DType dtype, Body&& body) {
    if (dtype == DType::f64)
        body(double{});
    else
        body(float{});
}

// The type an op computes in: double if it reads or writes fp64, else float.
template <class... T>
using Wide = std::conditional_t<(std::is_same_v<T, double> || ...), double, float>;

// Calls body(begin, end) in parallel for contiguous parts of [0, count), each of at least `at_least` elements. Results
// must not depend on the bounds of the parts: each sum must lie within one part.
template <class Body>
void parallel_ranges(int64_t count, int64_t at_least, Body&& body) {
    const int64_t wanted = std::max<int64_t>(1, count / std::max<int64_t>(at_least, 1));
#pragma omp parallel for schedule(static) if (wanted > 1)
    for (int64_t part = 0; part < wanted; ++part) body(count * part / wanted, count * (part + 1) / wanted);
}

// Calls body(row) for each row in parallel; a part has at least about 4096 elements.
template <class Body>
void parallel_rows(int64_t rows, int64_t cols, Body&& body) {
    parallel_ranges(rows, 1 + 4096 / std::max<int64_t>(cols, 1), [&](int64_t begin, int64_t end) {
        for (int64_t row = begin; row < end; ++row) body(row);
    });
}

// Calls body(i) for each i of [begin, end), vectorized. Written as a loop where it stands, a body that rounds to bf16
// or FP8 would run one by one: OpenMP gives the rounded object a place in memory for each lane.
template <class Body>
void vectorized(int64_t begin, int64_t end, const Body& body) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) body(i);
}

// The sum of term(i) over [begin, end), or another reduction of it, vectorized; start is what the reduction begins
// with, 0 for a sum. In 16 lanes on every machine, so that a sum's order does not depend on the width of its vectors.
template <class C, class Term, class Op = std::plus<C>>
C reduced(int64_t begin, int64_t end, const Term& term, C start = 0, const Op& op = {}) {
    constexpr int kLanes = 16;
    C lanes[kLanes];
    std::fill_n(lanes, kLanes, start);
    int64_t i = begin;
    for (; i + kLanes <= end; i += kLanes)
#pragma omp simd
        for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = op(lanes[lane], term(i + lane));
    for (; i < end; ++i) lanes[0] = op(lanes[0], term(i));
    return std::accumulate(lanes, lanes + kLanes, start, op);
}

// Calls body(i) for each element in parallel, vectorized.
template <class Body>
void parallel_elements(int64_t count, Body&& body) {
    parallel_ranges(count, 8192, [&](int64_t begin, int64_t end) { vectorized(begin, end, body); });
}

// out_c += the sum over the rows, in their order. add(sum, row, begin, end) adds a row's columns [begin, end) to sum,
// in C; a thread has columns of its own, as many beside each other as it can.
template <class C, class Add>
void add_column_sums(Tensor& out, int64_t rows, const Add& add) {
    with_float(out.dtype(), [&](auto zero) {
        using T = decltype(zero);
        parallel_ranges(out.size(), std::max<int64_t>(16, (out.size() - 1) / omp_get_max_threads() + 1),
                        [&](int64_t begin, int64_t end) {
                            std::vector<C> sum(end - begin);
                            for (int64_t r = 0; r < rows; ++r) add(sum.data(), r, begin, end);
                            T* to = out.data<T>() + begin;
                            for (int64_t c = 0; c < end - begin; ++c) to[c] = T(C(to[c]) + sum[c]);
                        });
    });
}

}  // namespace train70b::cpu
