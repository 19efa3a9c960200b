#pragma once
// RoPE's rotation at one position, on the CPU: for rope.cpp and latent_heads.cpp, which pair other numbers.
#include <algorithm>
#include <cmath>

#include "01_single_gpu/core/cpu.h"
#include "01_single_gpu/ops/rope.h"

namespace train70b::cpu {

// cos and sin of position * inv_freq, one for each pair; in double, because positions may be a million.
template <class C>
struct Rotation {
    C cos[kMaxHeadDim / 2], sin[kMaxHeadDim / 2];
    Rotation(const Rope& rope, int32_t position) {
        for (int i = 0; i < rope.head_dim / 2; ++i) {
            const double angle = position * rope.inv_freq[i];
            cos[i] = C(std::cos(angle));
            sin[i] = C(std::sin(angle));
        }
    }
};

// Calls body(row, rotation) for every row in parallel. Where all sequences have the same positions, an angle is
// computed once for all of them: half of the op's time.
template <class C, class Body>
void rotate_rows(const Rope& rope, const Tensor& positions, int64_t cols, const Body& body) {
    const int32_t* of_row = positions.data<int32_t>();
    const int64_t rows = positions.size();
    if (rows == 0) return;
    int64_t period = std::find(of_row + 1, of_row + rows, of_row[0]) - of_row;
    if (!std::equal(of_row + period, of_row + rows, of_row)) period = rows;
    const int64_t alike = rows / period, elements = std::max<int64_t>(alike * cols, 1);
    const int64_t adjacent = std::min<int64_t>(16, (period - 1) / omp_get_max_threads() + 1);
    parallel_ranges(period, std::max(adjacent, 1 + 4096 / elements), [&](int64_t begin, int64_t end) {
        std::vector<Rotation<C>> rotations;
        for (int64_t i = begin; i < end; ++i) rotations.emplace_back(rope, of_row[i]);
        for (int64_t sequence = 0; sequence < rows; sequence += period)
            for (int64_t i = begin; i < std::min(end, rows - sequence); ++i) body(sequence + i, rotations[i - begin]);
    });
}

}  // namespace train70b::cpu
