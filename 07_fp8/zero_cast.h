#pragma once
// ZeRO-3 with FP8 all-gathers: the weights of FP8 layers are cast on the shard and gathered as E4M3, half or a quarter
// of the bytes. All ranks need the same scale for a layer, so there is one per layer, from the amax over all its
// shards. Parameters that are not weights of FP8 layers are gathered in a second message, in their own dtype.
#include "03_zero/flat_param.h"
#include "07_fp8/fp8.h"

namespace train70b {

// Null where nothing is cast: no FP8 layers, or a recipe whose weights have more than one scale. Shards that are
// offloaded to the host are gathered in their own dtype.
std::unique_ptr<Unsharder> make_fp8_unsharder(const Fp8& fp8);

}  // namespace train70b
