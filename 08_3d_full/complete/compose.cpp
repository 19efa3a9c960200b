#include "08_3d_full/complete/compose.h"

#include "07_fp8/complete/flags.h"
#include "07_fp8/complete/zero_cast.h"

namespace train70b {

// tag::compose[]
Composed::Composed(Llama& model, Trainer& trainer, const TrainOptions& o, const ParallelConfig& config,
                   const Comm& world)
    : ranks(split(world, config.mesh, model.config.is_sparse())),
      context(context_layout(config, o)),
      tensor_parallel(model, ranks.tp, config.tensor),
      expert_parallel(model, {ranks.tp, ranks.cp, ranks.ep}, context),
      fp8(apply_fp8(model, config.fp8, o.micro_batch * o.seq_len / config.mesh.cp, ranks.tp, ranks.dp_cp.rank())),
      zero(model, ranks.dp_cp, config.zero,
           make_optimizer_of(config.optimizer, o.adamw(), world,
                             config.mesh.tp * config.zero.shards(ranks.dp_cp.size()), model),
           make_fp8_unsharder(fp8), ranks.own_edp ? std::optional(ranks.edp) : std::nullopt),
      pipeline(model, ranks.pp, schedule_of(config, o), config.tensor.sequence_parallel ? config.mesh.tp : 1) {
    apply_context_parallel(model, ranks.cp, context);
    trainer.store = &zero;
    trainer.loop = &pipeline;
    trainer.groups = {.dp = std::make_shared<Coordinate>(config.mesh.coordinate(world.rank()).dp, config.mesh.dp),
                      .cp = group_of(ranks.cp),
                      .dp_cp = group_of(ranks.dp_cp),
                      .tp = group_of(ranks.tp),
                      .pp = group_of(ranks.pp),
                      .ep = group_of(ranks.ep),
                      .edp = group_of(ranks.edp)};
    trainer.batches.of_rank = context.of_rank(ranks.cp.rank());
    if (fp8.recipe) trainer.step_states.push_back(fp8.recipe.get());
}
// end::compose[]

void say_layout(const Program& p, const Composed& composed, const ParallelConfig& config) {
    say("{}", to_string(config.mesh));
    for (const std::string& why : composed.fp8.left_out) say("stays in {}: {}\n", p.options.dtype, why);
}

}  // namespace train70b
