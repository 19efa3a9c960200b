#pragma once
// What a step computes, without how it is divided: what the planner knows of TrainOptions.
#include "01_single_gpu/config.h"

namespace train70b {

struct Workload {
    LlamaConfig model;
    int64_t seq_len = 0, micro_batch = 1, global_batch = 0;  // tokens; sequences
    DType dtype = DType::bf16, grad_dtype = DType::f32;
    Recompute recompute = Recompute::none;

    int64_t micro_batches(int64_t dp) const { return global_batch / (micro_batch * dp); }
    double tokens() const { return double(global_batch) * double(seq_len); }  // of a step
};

}  // namespace train70b
