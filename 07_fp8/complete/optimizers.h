#pragma once
// The optimizers, as data: what --optimizer chooses from, and what a plan and a checkpoint have to know of them.
#include <string>
#include <vector>

#include "01_single_gpu/complete/llama.h"
#include "01_single_gpu/complete/muon.h"

namespace train70b {

class Comm;

// One value of --optimizer. To add one, add it to the list in optimizers.cpp: memory, plans and checkpoints follow.
struct OptimizerEntry {
    std::string name;
    // matrices: who orthogonalizes, for muon; otherwise null.
    MakeOptimizer (*maker)(const AdamW::Hyper& hyper, std::shared_ptr<Orthogonalizer> matrices);
    DType (*moments)(DType dtype);  // the dtype of the moments; dtype: of the parameters
    int64_t scale_block = 0;        // elements of a row whose moments share two fp32 scales; 0: no scales
    bool masters = true;            // fp32 copies of bf16 weights; false: only for --dtype bf16
    bool muon = false;              // what takes_muon() has one moment only, and is updated as whole matrices

    // Of a parameter: "exp_avg", and "exp_avg_sq" perhaps.
    int moments_of(const Param& param) const { return muon && takes_muon(param) ? 1 : 2; }
};
const std::vector<OptimizerEntry>& optimizers();
std::vector<std::string> optimizer_names();                       // of --optimizer
inline constexpr const char* kStochasticRounding = "adamw-bf16";  // of --stochastic-rounding on, not of --optimizer
const OptimizerEntry& find_optimizer(const std::string& name);    // usage error for an unknown name
// copy: so many consecutive ranks of `world` hold the states of a pipeline stage once. Collective.
MakeOptimizer make_optimizer_of(const std::string& name, const AdamW::Hyper& hyper, const Comm& world, int64_t copy,
                                Llama& model);
// Bytes per parameter: of the moments, their scales, and the master weight where there is one; of a checkpoint: of the
// weights in the dtype in which they are updated, the moments and their scales. muon_share: the share of parameters
// that takes_muon().
double state_bytes(const std::string& optimizer, DType dtype, double muon_share);
double checkpoint_bytes(const std::string& optimizer, DType dtype, double muon_share);

}  // namespace train70b
