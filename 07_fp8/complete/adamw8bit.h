#pragma once
// AdamW with moments in 8 bits, so 2.03 bytes per parameter instead of 8. After Dettmers et al. 2022: a table of levels
// (dynamic quantization), and one scale per block of values.
//
//     256 values of a parameter share a scale, the largest magnitude among them;  value = scale * level[code]
//
// The levels are evenly spaced within each of seven decades, twice as many in each as in the one below: the moments
// span many orders of magnitude, and the large ones matter most. The paper's blocks have 2048 values and its codes are
// rounded to nearest, and it reports the quality of 32-bit states, with a layer norm after the embedding and its
// moments in 32 bits ("stable embedding layer"), which this course does not have. Blocks of 256 are the practice of
// bitsandbytes and torchao; the two rules below are this course's choice:
//   - stochastic rounding: a code is one of the two nearest at random, so that the mean is right. With rounding to
//     nearest, a second moment far below its block's maximum may never decay: without a gradient it shrinks to beta2 of
//     itself, and if that is nearer to its own level than to the next one, it stays. With beta2 0.95, beside a maximum
//     that persists, that holds for none of the 128 levels of the upper decade, 2 of 64 in the next, 6 of 32, 8 of 16,
//     and all 14 below; with 0.999 for all 254. (Where the whole block decays, so does its scale: nothing is stuck.)
//   - a second moment above 0 never becomes 0: the update is divided by its root.
// Blocks and random numbers depend on the parameter's global coordinates, not on where a rank stores it. So layouts
// agree except for blocks that they cut: at the end of a shard, and in rows whose columns tensor parallelism shards at
// other points than multiples of 256.
#include <array>

#include "01_single_gpu/complete/optimizer.h"
#include "01_single_gpu/core/random.h"

namespace train70b {

// The levels by code, ascending; 255 of 256 are used.
struct MomentLevels {
    std::array<float, 256> first{}, second{};  // [-1, 1], and [0, 1]
};
constexpr MomentLevels moment_levels() {
    MomentLevels levels;
    constexpr int kZero = 127;  // the code of 0 among the signed ones
    int positive = 1, unsigned_code = 1;
    double top = 1e-6;
    for (int decade = 0; decade < 7; ++decade, top *= 10) {
        const int signed_count = 1 << decade;
        for (int i = 1; i <= signed_count; ++i, ++positive) {
            const double level = top * (0.1 + 0.9 * i / signed_count);
            levels.first[std::size_t(kZero + positive)] = float(level);
            levels.first[std::size_t(kZero - positive)] = float(-level);
        }
        for (int i = 1; i <= 2 * signed_count; ++i, ++unsigned_code)
            levels.second[std::size_t(unsigned_code)] = float(top * (0.1 + 0.9 * i / (2 * signed_count)));
    }
    levels.first[255] = levels.second[255] = 1;  // unused
    return levels;
}

// The code of x in ascending levels: one of the two levels around x, the nearer one more probable. u: random, in [0,
// 1).
constexpr uint8_t random_code(const float* levels, float x, float u) {
    int below = 0, above = 254;
    while (above - below > 1) {
        const int middle = (below + above) / 2;
        (levels[middle] <= x ? below : above) = middle;
    }
    return uint8_t(u * (levels[above] - levels[below]) < x - levels[below] ? above : below);
}

constexpr int64_t kMomentBlock = 256;

// The blocks of a piece of a parameter: element i of the global parameter belongs to block i / 256. A piece with all
// columns is one run of elements; a piece with some of the columns has one run per row.
struct BlockLayout {
    GlobalIndex index;
    int64_t size = 0;  // elements of the piece

    struct Range {
        int64_t begin, end;  // elements of the piece
        int64_t global;      // index of the first in the global parameter
    };
    constexpr bool one_run() const { return index.cols == index.global_cols; }
    constexpr int64_t first_row() const { return index.offset / index.cols; }
    constexpr int64_t runs() const {
        return size == 0 ? 0 : one_run() ? 1 : (index.offset + size - 1) / index.cols - first_row() + 1;
    }
    constexpr Range run(int64_t i) const {
        const int64_t row = one_run() ? 0 : first_row() + i;
        const int64_t from = one_run() || row * index.cols < index.offset ? index.offset : row * index.cols;
        const int64_t last = index.offset + size, row_end = (row + 1) * index.cols;
        const int64_t to = one_run() || row_end > last ? last : row_end;
        const int64_t r = from / index.cols, c = from % index.cols;
        return {from - index.offset, to - index.offset,
                (index.row_begin + r) * index.global_cols + index.col_begin + c};
    }
    constexpr int64_t blocks_per_run() const {  // at most; a run of few columns may touch one less
        if (!one_run()) return (index.cols + kMomentBlock - 2) / kMomentBlock + 1;
        const int64_t begin = run(0).global;
        return (begin + size - 1) / kMomentBlock - begin / kMomentBlock + 1;
    }
    constexpr int64_t blocks() const { return size == 0 ? 0 : runs() * blocks_per_run(); }
    constexpr Range block(int64_t i) const {  // may be empty
        const Range all = run(i / blocks_per_run());
        const int64_t number = all.global / kMomentBlock + i % blocks_per_run();
        const int64_t end = all.global + (all.end - all.begin);
        const auto inside = [&](int64_t i) { return i < all.global ? all.global : i > end ? end : i; };
        const int64_t from = inside(number * kMomentBlock), to = inside((number + 1) * kMomentBlock);
        return {all.begin + from - all.global, all.begin + to - all.global, from};
    }
};

struct Moments {
    Tensor exp_avg, exp_avg_sq;  // u8
    Tensor scale;                // (2, blocks) fp32
};
// As adamw() of ops.h. key: of the random numbers; depends on the parameter and the step.
void adamw8bit(Tensor& param, Tensor& master, Moments& moments, const Tensor& grad, const BlockLayout& blocks,
               const AdamWStep& step, uint64_t key);

class AdamW8bit : public AdamW {  // besides the codes a state "scale", (2, blocks)
  public:
    AdamW8bit(std::vector<Segment> segments, const Hyper& hyper, Memory states = Memory::optimizer);
    static MakeOptimizer maker(const Hyper& hyper) { return maker_of<AdamW8bit>(hyper); }

  private:
    void update_segment(State& state, const AdamWStep& step) override;
};

// ---- 8-bit moments in checkpoints: from blocks of one layout to those of another (moments.cpp) ----

// The blocks of a rectangle of a parameter that is stored by itself.
BlockLayout blocks_of(const Rect& rect, const Shape& global_shape);

// The block in which element i of the piece lies.
int64_t block_of(const BlockLayout& layout, int64_t element);

// Codes of a piece of a parameter and the scale with which each was stored, gathered from anywhere; scale < 0: not
// stored, counts as 0. Writes codes and scales, (blocks), of the piece's own blocks. A block whose codes all have one
// scale keeps codes and scale bit for bit; the others are quantized again, to the nearest level, with the largest
// magnitude among them as the scale. second: second moments, of which none above 0 becomes 0.
void join_blocks(std::vector<uint8_t>& codes, const std::vector<float>& scale_of_element, const BlockLayout& layout,
                 bool second, float* scales);

}  // namespace train70b
