// Apart from the table of optimizers, which readers of files need where nothing communicates.
#include "02_data_parallel/comm.h"
#include "03_zero/complete/matrix_owners.h"
#include "07_fp8/complete/optimizers.h"

namespace train70b {

MakeOptimizer make_optimizer_of(const std::string& name, const AdamW::Hyper& hyper, const Comm& world, int64_t copy,
                                Llama& model) {
    const OptimizerEntry& entry = find_optimizer(name);
    if (!entry.muon) return entry.maker(hyper, nullptr);
    const Comm ranks = world.split([copy](int rank) { return int(rank / copy); }, "matrices", GroupLoad::alone);
    return entry.maker(hyper, std::make_shared<MatrixOwners>(ranks, model));
}

}  // namespace train70b
