#pragma once
// What the tests of the ops share. Each op's result is compared with a definition in double in its test, and its
// gradient with finite differences of that definition. Odd sizes on purpose.
#include <algorithm>

#include "tests/support.h"

namespace train70b::test {

using Doubles = std::vector<double>;
constexpr double kForward = kAccuracies[0].forward;  // of fp32

inline Tensor empty(Shape shape, DType dtype = DType::f32) { return Tensor(std::move(shape), dtype, Device::cpu); }

inline Tensor zeros(Shape shape, DType dtype = DType::f32) {
    Tensor x = empty(std::move(shape), dtype);
    fill(x, 0);
    return x;
}

// Starts of the documents of s.batch sequences of queries, the first of which is at `query_offset` in the sequence.
// mean: tokens of a document. ordered: as a batch has them, no document begins behind its own tokens; otherwise any
// ascending numbers around the keys, so that some queries see nothing.
inline std::vector<int32_t> random_starts(const AttentionShape& s, int64_t query_offset, int64_t mean, bool ordered,
                                          uint64_t seed) {
    std::vector<int32_t> all;
    for (int64_t b = 0; b < s.batch; ++b) {
        std::vector<int32_t> starts;
        int64_t start = 0;
        for (int64_t t = 0; t < query_offset + s.query_len; ++t) {
            const uint64_t bits = random_bits(seed, uint64_t(b * 10000 + t));
            if (bits % uint64_t(mean) == 0) start = t;
            const int64_t any = s.key_offset - 3 + int64_t(bits >> 32) % (s.key_len + 6);
            if (t >= query_offset) starts.push_back(int32_t(ordered ? start : std::max<int64_t>(any, 0)));
        }
        std::sort(starts.begin(), starts.end());
        all.insert(all.end(), starts.begin(), starts.end());
    }
    return all;
}

}  // namespace train70b::test
