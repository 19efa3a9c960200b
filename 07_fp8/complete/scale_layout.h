#pragma once
// Which elements of a tensor in 8 bits share a scale, and where that is stored.
#include <cstdint>

namespace train70b {

// Which elements of a (rows, cols) tensor share a scale.
enum class Scaling {
    tensor,   // all of them
    row,      // those of a row
    vec128,   // 128 neighbours in a row
    block128  // 128 x 128
};

// The index of element (r, c)'s scale in scale_inv. The layouts are cuBLASLt's: vec128 has the row index innermost,
// block128 pads its rows of scales to a multiple of 4.
struct ScaleLayout {
    Scaling scaling;
    int64_t rows, cols;

    constexpr int64_t blocks_in_row() const { return (cols + 127) / 128; }
    constexpr int64_t padded_blocks() const { return (blocks_in_row() + 3) / 4 * 4; }
    constexpr int64_t size() const {
        return scaling == Scaling::tensor   ? 1
               : scaling == Scaling::row    ? rows
               : scaling == Scaling::vec128 ? blocks_in_row() * rows
                                            : (rows + 127) / 128 * padded_blocks();
    }
    constexpr int64_t index(int64_t r, int64_t c) const {
        return scaling == Scaling::tensor   ? 0
               : scaling == Scaling::row    ? r
               : scaling == Scaling::vec128 ? c / 128 * rows + r
                                            : r / 128 * padded_blocks() + c / 128;
    }
};

}  // namespace train70b
