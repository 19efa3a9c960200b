#pragma once
// Which elements of a tensor in 8 bits share a scale, and where that is stored.
#include <cstdint>

namespace train70b {

// Which elements of a (rows, cols) tensor share a scale.
enum class Scaling {
    tensor,    // all of them
    row,       // those of a row
    vec128,    // 128 neighbours in a row
    block128,  // 128 x 128
    vec32,     // 32 neighbours in a row: MXFP8, E8M0
    vec16,     // 16 neighbours in a row: NVFP4, E4M3 times an fp32 of the tensor
    block16    // 16 x 16, of the same
};

// The index of element (r, c)'s scale in scale_inv. The layouts are cuBLASLt's: vec128 has the row index innermost,
// block128 pads its rows of scales to a multiple of 4; those of the last three, for CPUs alone, are row-major.
struct ScaleLayout {
    Scaling scaling;
    int64_t rows, cols;

    constexpr bool is_small() const { return scaling >= Scaling::vec32; }
    constexpr int64_t width() const { return scaling == Scaling::vec32 ? 32 : is_small() ? 16 : 128; }  // at most
    constexpr int64_t height() const { return scaling == Scaling::block16 ? 16 : 1; }                   // of small ones
    constexpr int64_t blocks_in_row() const { return (cols + width() - 1) / width(); }
    constexpr int64_t padded_blocks() const { return (blocks_in_row() + 3) / 4 * 4; }
    constexpr int64_t size() const {
        return is_small()                   ? (rows + height() - 1) / height() * blocks_in_row()
               : scaling == Scaling::tensor ? 1
               : scaling == Scaling::row    ? rows
               : scaling == Scaling::vec128 ? blocks_in_row() * rows
                                            : (rows + 127) / 128 * padded_blocks();
    }
    constexpr int64_t index(int64_t r, int64_t c) const {
        return is_small()                   ? r / height() * blocks_in_row() + c / width()
               : scaling == Scaling::tensor ? 0
               : scaling == Scaling::row    ? r
               : scaling == Scaling::vec128 ? c / 128 * rows + r
                                            : r / 128 * padded_blocks() + c / 128;
    }
};

}  // namespace train70b
