#pragma once
// A pseudorandom permutation of [0, n): a four-round Feistel network over the next even power of two, applied until the
// result is below n ("cycle walking", Black & Rogaway 2002).
#include <cstdint>

#include "01_single_gpu/core/random.h"

namespace train70b {

inline int64_t permute(int64_t index, int64_t n, uint64_t key) {
    int half = 1;
    while ((int64_t(1) << (2 * half)) < n) ++half;
    const uint64_t mask = (uint64_t(1) << half) - 1;
    uint64_t x = index;
    do {
        uint64_t left = x >> half, right = x & mask;
        for (int round = 0; round < 4; ++round) {
            const uint64_t next = left ^ (random_bits(key + round, right) & mask);
            left = right;
            right = next;
        }
        x = (left << half) | right;
    } while (x >= uint64_t(n));
    return x;
}

}  // namespace train70b
