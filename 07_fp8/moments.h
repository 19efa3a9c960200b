#pragma once
// 8-bit moments in checkpoints: from blocks of one layout to those of another.
#include "07_fp8/adamw8bit.h"

namespace train70b {

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
