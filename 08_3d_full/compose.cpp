#include "08_3d_full/compose.h"

namespace train70b {

void add_plan_flags(Flags& flags, Plan& plan) {
    add_zero_flags(flags, plan.mesh.dp, plan.zero);
    add_tensor_parallel_flags(flags, plan.mesh.tp, plan.tensor);
    add_pipeline_flags(flags, plan.mesh.pp, plan.pipeline);
    add_context_parallel_flags(flags, plan.mesh.cp, plan.context);
    add_fp8_flags(flags, plan.fp8, plan.optimizer);
    flags.at("--tp").text("tensor-parallel ranks of a model copy").default_text("1");
    flags.at("--cp").text("context-parallel ranks of a model copy").default_text("1");
    flags.at("--pp").text("pipeline stages of a model copy").default_text("1");
    flags.at("--micro-batch").text("sequences of a rank at a time").default_text("global / ranks; with --pp 1");
}

ContextLayout context_layout(const Plan& plan, const TrainOptions& options) {
    return context_layout(options.model, options.seq_len, plan.mesh.cp, plan.context);
}

Stage stage_of(const Plan& plan, const LlamaConfig& config, int64_t rank) {
    return pipeline_stage(config, plan.mesh.pp, plan.mesh.place(rank).pp, plan.pipeline);
}

void settle(Plan& plan, const TrainOptions& options, int64_t ranks) {
    plan.mesh = mesh_of(plan.mesh, ranks);
    const Mesh& mesh = plan.mesh;
    const LlamaConfig& c = options.model;
    check_tensor_parallel(c, options.seq_len, mesh.tp, plan.tensor);
    const ContextLayout context = context_layout(plan, options);
    if (context.ulysses > 1 && mesh.tp > 1) {
        LlamaConfig part = c;  // what tensor parallelism leaves of the heads
        part.heads /= mesh.tp;
        part.kv_heads = std::max<int64_t>(c.kv_heads / mesh.tp, 1);
        if (!part.heads_divide_by(context.ulysses))
            usage_error(
                "--tp {} leaves {} query and {} key/value heads on a rank, which {} ranks of --cp-algorithm {} "
                "cannot divide; --cp-algorithm zigzag would do",
                mesh.tp, part.heads, part.kv_heads, context.ulysses, plan.context.algorithm);
    }
    if (plan.tensor.sequence_parallel && options.seq_len / mesh.cp % mesh.tp != 0)
        usage_error(
            "--sequence-parallel on: --cp {} leaves {} tokens of a sequence, which --tp {} does not divide; "
            "--seq-len {} would do",
            mesh.cp, options.seq_len / mesh.cp, mesh.tp,
            (options.seq_len / (2 * mesh.cp * mesh.tp) + 1) * 2 * mesh.cp * mesh.tp);
    if (plan.tensor.overlap && mesh.tp > 1 && plan.fp8.recipe != "off")
        usage_error("--tp-overlap on, --fp8 {}: both are what a linear layer does with its product; leave one out",
                    plan.fp8.recipe);
    plan.zero.micro_batches = options.accumulation(mesh.dp);
    check_precision(plan.fp8, plan.optimizer, options.dtype);
    check_zero(plan.zero, options, mesh.dp * mesh.cp, ranks_on_this_node(),
               moment_bytes(plan.optimizer, options.llama().dtype));
    check_fp8(plan.fp8, c, options.micro_batch * options.seq_len / mesh.cp, mesh.tp);
    pipeline_schedule(plan.pipeline, mesh.pp, plan.zero.micro_batches);
    stage_of(plan, c, 0);  // whether layers divide does not depend on the rank
}

ContextLayout Composed::apply_context(Llama& model, const MeshComms& ranks, const Plan& plan,
                                      const TrainOptions& options) {
    const ContextLayout layout = context_layout(plan, options);
    apply_context_parallel(model, ranks.cp, layout);
    return layout;
}

Composed::Composed(Llama& model, Trainer& trainer, const TrainOptions& options, const Plan& plan, const Comm& world)
    : ranks(split(world, plan.mesh)),
      context(apply_context(model, ranks, plan, options)),
      tensor_parallel(apply_tensor_parallel(model, ranks.tp, plan.tensor)),
      fp8(apply_fp8(model, plan.fp8, options.micro_batch * options.seq_len / plan.mesh.cp, ranks.tp)),
      zero(model, ranks.dp_cp, plan.zero, options.adamw()),
      pipeline(model, ranks.pp, pipeline_schedule(plan.pipeline, plan.mesh.pp, plan.zero.micro_batches),
               plan.tensor.sequence_parallel ? plan.mesh.tp : 1) {
    zero.make_optimizer = make_optimizer_of(plan.optimizer, options.adamw());
    fp8.gather_codes(zero);
    // From the inside out: each builds on what the ones before it have filled.
    zero.attach(trainer);
    attach_context_parallel(trainer, context, ranks.cp.rank(), plan.mesh.place(world.rank()).dp, plan.mesh.dp,
                            options.seq_len);
    tensor_parallel.attach(trainer);
    pipeline.attach(trainer);
    fp8.attach(trainer);
}

}  // namespace train70b
