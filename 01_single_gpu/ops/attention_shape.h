#pragma once
#include <cstdint>

namespace train70b {

struct AttentionShape {
    int64_t batch, query_len, key_len, heads, kv_heads, head_dim;
    bool causal = true;
};

}  // namespace train70b
