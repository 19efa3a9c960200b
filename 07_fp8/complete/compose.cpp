#include "07_fp8/complete/compose.h"

#include "02_data_parallel/runtime/comm_roles.h"
#include "03_zero/complete/matrix_owners.h"
#include "07_fp8/complete/flags.h"
#include "07_fp8/complete/zero_cast.h"

namespace train70b {

// Not in optimizers.cpp: readers of files need that table where nothing communicates.
MakeOptimizer make_optimizer_of(const std::string& name, const AdamW::Hyper& hyper, const Comm& world, int64_t copy,
                                Llama& model) {
    const OptimizerEntry& entry = find_optimizer(name);
    if (!entry.muon) return entry.maker(hyper, nullptr);
    const Comm ranks = world.split([copy](int rank) { return int(rank / copy); }, "matrices", GroupLoad::alone);
    return entry.maker(hyper, std::make_shared<MatrixOwners>(ranks, model));
}

Fp8Trainer::Fp8Trainer(Llama& model, Trainer& trainer, const TrainOptions& options, const Comm& ranks,
                       const TensorComms& layout, const ZeroOptions& zero_options, const Precision& precision)
    : tensor_parallel(model, layout.tensor_ranks),
      fp8(apply_fp8(model, precision.fp8, options.micro_batch * options.seq_len, layout.tensor_ranks,
                    layout.data_ranks.rank())),
      zero(model, layout.data_ranks, zero_options,
           make_optimizer_of(precision.optimizer, options.adamw(), ranks,
                             layout.tensor_ranks.size() * zero_options.shards(layout.data_ranks.size()), model),
           make_fp8_unsharder(fp8)) {
    trainer.store = &zero;
    trainer.groups.dp = trainer.groups.dp_cp = group_of(layout.data_ranks);
    trainer.groups.tp = group_of(layout.tensor_ranks);
    if (fp8.recipe) trainer.step_states.push_back(fp8.recipe.get());
}

}  // namespace train70b
