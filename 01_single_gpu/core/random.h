#pragma once
// Counter-based random numbers: a pure function of (key, counter), so any rank can compute any of them. SplitMix64's
// output function (Steele, Lea & Flood 2014), a bijection that mixes all 64 bits.
#include <cstdint>

namespace train70b {

constexpr uint64_t random_bits(uint64_t key, uint64_t counter) {
    uint64_t z = key + (counter + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

// A pseudorandom permutation of [0, n): a four-round Feistel network over the next even power of two, applied until the
// result is below n ("cycle walking", Black & Rogaway 2002).
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
