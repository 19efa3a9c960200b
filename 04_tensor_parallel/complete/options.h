#pragma once

namespace train70b {

struct TensorParallelOptions {
    bool sequence_parallel = false;
    bool overlap = false;  // overlap.h
};

}  // namespace train70b
