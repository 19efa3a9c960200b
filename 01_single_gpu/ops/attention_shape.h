#pragma once
// The sizes of one attention call. A header of its own without Tensor: attention_tiled_kernel.cpp includes it.
#include <cstdint>

namespace train70b {

constexpr int kMaxHeadDim = 256;

struct AttentionShape {
    int64_t batch, query_len, key_len, heads, kv_heads, head_dim;  // B, Tq, Tk, H, K, D
    bool causal = true;
    int64_t key_offset = 0;  // index in the sequence of the first key; used with documents only
};

}  // namespace train70b
