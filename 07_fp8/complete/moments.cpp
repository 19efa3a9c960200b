#include <algorithm>
#include <cmath>

#include "07_fp8/complete/adamw8bit.h"

namespace train70b {

BlockLayout blocks_of(const Rect& rect, const Shape& global_shape) {
    const int64_t global_cols = global_shape.size() == 2 ? global_shape[1] : 1;
    return {{rect.row_begin, rect.col_begin, rect.cols, global_cols, 0}, rect.size()};
}

int64_t block_of(const BlockLayout& layout, int64_t element) {
    const int64_t run = layout.one_run() ? 0 : (layout.index.offset + element) / layout.index.cols - layout.first_row();
    const BlockLayout::Range range = layout.run(run);
    const int64_t global = range.global + element - range.begin;
    return run * layout.blocks_per_run() + global / kMomentBlock - range.global / kMomentBlock;
}

void join_blocks(std::vector<uint8_t>& codes, const std::vector<float>& scale_of_element, const BlockLayout& layout,
                 bool second, float* scales) {
    static constexpr MomentLevels kLevels = moment_levels();
    const float* levels = second ? kLevels.second.data() : kLevels.first.data();
    const uint8_t zero = second ? 0 : 127;
    for (int64_t block = 0; block < layout.blocks(); ++block) {
        const BlockLayout::Range range = layout.block(block);
        float min_scale = INFINITY, max_scale = -1;  // of the scales
        for (int64_t i = range.begin; i < range.end; ++i) {
            const float scale = scale_of_element[size_t(i)];
            if (scale < 0) {
                codes[size_t(i)] = zero;
                continue;
            }
            min_scale = std::min(min_scale, scale);
            max_scale = std::max(max_scale, scale);
        }
        scales[block] = std::max(max_scale, 0.0f);
        if (!(min_scale < max_scale)) continue;
        float largest = 0;
        const auto value = [&](int64_t i) {
            return scale_of_element[size_t(i)] < 0 ? 0 : scale_of_element[size_t(i)] * levels[codes[size_t(i)]];
        };
        for (int64_t i = range.begin; i < range.end; ++i) largest = std::max(largest, std::abs(value(i)));
        scales[block] = largest;
        for (int64_t i = range.begin; i < range.end; ++i) {
            const float x = largest > 0 ? value(i) / largest : 0;
            const auto above = std::lower_bound(levels, levels + 254, x) - levels;  // the first level >= x
            const auto below = std::max<std::ptrdiff_t>(above - 1, 0);
            uint8_t code = uint8_t(x - levels[below] < levels[above] - x ? below : above);
            if (second && x > 0 && code == 0) code = 1;
            codes[size_t(i)] = code;
        }
    }
}

}  // namespace train70b
