#pragma once
// Requests and clusters for tests of the planner.
#include "08_3d_full/complete/layout/config.h"
#include "08_3d_full/plan/explain.h"
#include "tests/support.h"

namespace train70b::test {

inline PlanRequest small_request(int64_t gpus) {
    PlanRequest r;
    r.model = {.name = "small", .layers = 6, .hidden = 96, .heads = 12, .kv_heads = 4, .ffn = 192, .vocab = 256};
    r.gpus = gpus;
    r.gpus_per_node = 4;
    r.seq_len = 48;
    r.global_batch = 24;
    for (int64_t cp = 1; cp <= 64; ++cp) r.cp.push_back(cp);  // asked for, because such calls of attention are small
    return r;
}

// Eight experts, two of a token; shared ones and a dense layer if asked for.
inline PlanRequest small_sparse_request(int64_t gpus, bool mixed = false) {
    PlanRequest r = small_request(gpus);
    r.model.experts = {.count = 8, .top_k = 2, .ffn = 48, .shared = mixed ? 1 : 0, .dense_layers = mixed ? 1 : 0};
    return r;
}

// A device that computes everything at one rate, and moves bytes in no time; a network without latency.
inline ClusterModel ideal(int64_t gpus, double flops_per_s = 1e6) {
    ClusterModel c;
    c.name = "ideal";
    c.device = {
        .name = "D", .peak_bf16 = flops_per_s, .product_efficiency = 1, .copy_bytes_per_s = 1e18, .memory_bytes = 1e12};
    for (const char* op : {"matmul", "attention", "attention_backward"}) c.device.measured[op] = {flops_per_s, 0};
    c.device.measured["pointwise"] = {0, 1e18};
    c.nodes = gpus;
    c.gpus_per_node = 1;
    c.nvlink = c.rail = c.host = {1e30, 0, "wire"};
    c.rails = 1;
    return c;
}

}  // namespace train70b::test
