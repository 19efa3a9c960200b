#pragma once
// What a comparison shows about the place of a difference, in the order in which a training step is computed: forward,
// backward, update. Only what the numbers say; no cause is guessed.
#include "01_single_gpu/report/comparison.h"

namespace train70b {

// One line each, for instance
//     forward: right (the loss of step 1)
//     backward: right down to model.layers.3.self_attn.o_proj.weight; first wrong: model.layers.3.self_attn.v_proj.weight
//     gradients: all 39 are 4 x the reference's, nothing else
//     first wrong norm: step 2
// Empty if everything is within the tolerance.
std::vector<std::string> facts(const Comparison& comparison, double tolerance);

}  // namespace train70b
