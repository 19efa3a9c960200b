#include "08_3d_full/compose.h"

#include "02_data_parallel/runtime/comm_roles.h"
#include "07_fp8/flags.h"
#include "07_fp8/zero_cast.h"

namespace train70b {

MeshComms split(const Comm& world, const Mesh& mesh, bool experts) {
    const MeshColors colors = group_colors(mesh);
    MeshComms comms{world.split(colors.tp, "tp"),
                    world.split(colors.cp, "cp", GroupLoad::light),
                    world.split(colors.dp_cp, mesh.cp > 1 ? "dp_cp" : "dp"),
                    world.split(colors.pp, "pp", GroupLoad::light),
                    Comm(),
                    Comm()};
    comms.own_edp = experts && (mesh.ep > 1 || mesh.tp > 1);
    if (!experts) return comms;
    const auto [ep, edp] = expert_colors(mesh);
    if (mesh.ep > 1) comms.ep = world.split(ep, "ep");
    comms.edp = comms.own_edp ? world.split(edp, "edp") : comms.dp_cp;
    return comms;
}

// tag::compose[]
Composed::Composed(Llama& model, Trainer& trainer, const TrainOptions& o, const ParallelConfig& config,
                   const Comm& world)
    : ranks(split(world, config.mesh, model.config.experts.count > 0)),
      context(context_layout(config, o)),
      tensor_parallel(model, ranks.tp, config.tensor),
      expert_parallel(model, {ranks.tp, ranks.cp, ranks.ep}, context),
      fp8(apply_fp8(model, config.fp8, o.micro_batch * o.seq_len / config.mesh.cp, ranks.tp)),
      zero(model, ranks.dp_cp, config.zero, make_optimizer_of(config.optimizer, o.adamw()), make_fp8_unsharder(fp8),
           ranks.own_edp ? std::optional(ranks.edp) : std::nullopt),
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
    if (fp8.step_state()) trainer.step_states.push_back(fp8.step_state());
}
// end::compose[]

void say_layout(const Program& p, const Composed& composed, const ParallelConfig& config) {
    say("{}", to_string(config.mesh));
    for (const std::string& why : composed.fp8.left_out()) say("stays in {}: {}\n", p.options.dtype, why);
}

}  // namespace train70b
