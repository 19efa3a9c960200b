#pragma once
// ZeRO-3 with FP8 all-gathers: the weights of FP8 layers are cast on the shard and gathered as E4M3, half or a quarter
// of the bytes. All ranks need the same scale for a layer, so there is one per layer, from the amax over all its
// shards. Parameters that are not weights of FP8 layers are gathered in a second message, in their own dtype.
#include "03_zero/complete/flat_param.h"
#include "07_fp8/complete/fp8.h"

namespace train70b {

// Stages 0 to 2: tells the recipe that the weights have changed. Null without FP8 layers. Weights that have more than
// one scale, and shards that are offloaded to the host, are gathered in their own dtype; under tensor parallelism the
// amax of such a weight is exchanged for each product, because no rank has it before.
std::unique_ptr<Unsharder> make_fp8_unsharder(const Fp8& fp8);

}  // namespace train70b
