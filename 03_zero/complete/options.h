#pragma once
// ZeRO's options; flags.h has their flags.
#include <cstdint>

namespace train70b {

enum class Offload { none, optimizer, all };

struct ZeroOptions {
    int stage = 3;
    int64_t hybrid_shard = 0;  // ranks of a shard group; 0: all
    Offload offload = Offload::none;
    int64_t prefetch = 1;         // units unsharded ahead of the one in use (stage 3)
    bool prefetch_given = false;  // by --prefetch
    double bucket_mb = -1;        // MiB of gradients per bucket, in whole units; < 0: 25, and 0 from stage 2 on
    bool overlap = true;  // false: wait for each reduction where it starts; stages 0, 1: after the backward pass
};

}  // namespace train70b
