#pragma once
// The optimizers, as data: what --optimizer chooses from, and what a plan and a checkpoint have to know of them.
#include <string>
#include <vector>

#include "01_single_gpu/complete/optimizer.h"

namespace train70b {

// One value of --optimizer. To add one, add it to the list in flags.cpp: memory, plans and checkpoints follow.
struct OptimizerEntry {
    std::string name;
    MakeOptimizer (*maker)(const AdamW::Hyper& hyper);
    DType (*moments)(DType dtype);  // the dtype of both moments; dtype: of the parameters
    int64_t scale_block = 0;        // elements of a row whose moments share two fp32 scales; 0: no scales
};
const std::vector<OptimizerEntry>& optimizers();
const OptimizerEntry& find_optimizer(const std::string& name);  // usage error for an unknown name
MakeOptimizer make_optimizer_of(const std::string& name, const AdamW::Hyper& hyper);
// Per parameter: of the two moments and their scales; and with the master weight where dtype needs one.
double moment_bytes(const std::string& optimizer, DType dtype);
double state_bytes(const std::string& optimizer, DType dtype);

}  // namespace train70b
