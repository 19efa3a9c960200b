#pragma once
// A small training run in 8 bits.
#include "01_single_gpu/core/registry.h"
#include "07_fp8/complete/flags.h"
#include "tests/training.h"

namespace train70b::test {

inline const std::vector<std::string> kRecipes = names_of(fp8_recipes());

// Every dimension divides by 128.
inline TrainOptions divisible(const Text& text) {
    return of_model(tiny(text), {.layers = 2, .hidden = 128, .heads = 4, .kv_heads = 2, .ffn = 256, .vocab = 256}, 32,
                    8);
}

}  // namespace train70b::test
