#include "07_fp8/complete/compose.h"

#include "02_data_parallel/runtime/comm_roles.h"
#include "07_fp8/complete/flags.h"
#include "07_fp8/complete/zero_cast.h"

namespace train70b {

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
    if (fp8.step_state()) trainer.step_states.push_back(fp8.step_state());
}

}  // namespace train70b
