#pragma once
// ZeRO-3 with FP8 all-gathers: the weights of FP8 layers are cast on the shard and travel as E4M3, a half or a quarter of
// the bytes. Every rank needs the same scale for a layer, so there is one per layer, from the amax of all its shards. What
// is not an FP8 layer's weight travels in a second message, in its own dtype.
#include "03_zero/flat_param.h"
#include "07_fp8/fp8.h"

namespace train70b {

// Null where there is nothing to cast: no FP8 layers, or a recipe whose weights have more than one scale. Shards that are
// offloaded to the host are gathered as they are.
std::unique_ptr<Unsharder> make_fp8_unsharder(const Fp8& fp8);

}  // namespace train70b
