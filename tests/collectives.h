#pragma once
// Small integers for the tests of collectives: they are exact in bf16, and any order of a sum is exact.
#include "01_single_gpu/core/bf16.h"
#include "01_single_gpu/ops/ops.h"
#include "tests/ranks.h"

namespace train70b::test {

// Element i on rank r, in [-8, 7]: even the sum over 8 ranks has at most 8 bits.
inline int64_t element(int rank, int64_t i) { return (i * 5 + rank * 3) % 16 - 8; }

inline int64_t sum_of(int ranks, int64_t i) {
    int64_t sum = 0;
    for (int r = 0; r < ranks; ++r) sum += element(r, i);
    return sum;
}

inline Tensor numbers(DType dtype, int64_t count, const std::function<int64_t(int64_t)>& value) {
    std::vector<int32_t> list;
    for (int64_t i = 0; i < count; ++i) list.push_back(int32_t(value(i)));
    if (dtype == DType::i32) return upload(list, {count}, Device::cpu);
    return tensor(std::vector<double>(list.begin(), list.end()), {count}, dtype);
}

// The first element of a CPU tensor that is not as expected, in words; empty if there is none.
inline std::string difference(const Tensor& x, const std::function<int64_t(int64_t)>& value) {
    for (int64_t i = 0; i < x.size(); ++i) {
        const double found = x.dtype() == DType::i32    ? double(x.data<int32_t>()[i])
                             : x.dtype() == DType::bf16 ? double(float(x.data<bf16>()[i]))
                             : x.dtype() == DType::f64  ? x.data<double>()[i]
                                                        : double(x.data<float>()[i]);
        if (found != double(value(i))) return fmt::format("element {} is {}, not {}", i, found, value(i));
    }
    return {};
}

inline bool equals(const Tensor& x, const std::function<int64_t(int64_t)>& value) {
    const std::string text = difference(x, value);
    if (!text.empty()) fmt::print(stderr, "rank {}: {} {}: {}\n", this_rank, x.size(), name_of(x.dtype()), text);
    return text.empty();
}

}  // namespace train70b::test
