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

}  // namespace train70b
