#pragma once
// Tensor parallelism's options; flags.h has their flags.

namespace train70b {

struct TensorParallelOptions {
    bool sequence_parallel = false;
    bool overlap = false;  // overlap.h
};

}  // namespace train70b
