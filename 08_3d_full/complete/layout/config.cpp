#include "08_3d_full/complete/layout/config.h"

#include "02_data_parallel/runtime/connect.h"
#include "03_zero/complete/flags.h"
#include "04_tensor_parallel/complete/flags.h"
#include "07_fp8/complete/flags.h"

namespace train70b {

void add_parallel_flags(Flags& flags, ParallelConfig& config) {
    add_zero_flags(flags, config.mesh.dp, config.zero);
    add_tensor_parallel_flags(flags, config.mesh.tp, config.tensor);
    add_pipeline_flags(flags, config.mesh.pp, config.pipeline);
    add_context_parallel_flags(flags, config.mesh.cp, config.context);
    add_fp8_flags(flags, config.fp8, config.optimizer);
    flags.group("Communication");
    flags.add("--ep", config.mesh.ep, "expert-parallel ranks, of the tp x cp x dp ranks of a stage", integer_from(1));
    flags.at("--tp").text("tensor-parallel ranks").default_text("1");
    flags.at("--cp").text("context-parallel ranks").default_text("1");
    flags.at("--pp").text("pipeline stages").default_text("1");
    flags.at("--micro-batch")
        .text("sequences per micro-batch [default: --global-batch / data-parallel ranks; 1 if --pp > 1]")
        .default_text("global / ranks; with --pp 1");
}

ContextLayout context_layout(const ParallelConfig& config, const TrainOptions& options) {
    return context_layout(options.model, options.seq_len, config.mesh.cp, config.context);
}

Schedule schedule_of(const ParallelConfig& config, const TrainOptions& options) {
    return pipeline_schedule(config.pipeline, config.mesh.pp, options.accumulation(config.mesh.dp));
}

Stage stage_of(const ParallelConfig& config, const LlamaConfig& model, int64_t rank) {
    return pipeline_stage(model, config.mesh.pp, config.mesh.coordinate(rank).pp, config.pipeline);
}

static void check_experts(const ParallelConfig& config, const TrainOptions& options) {
    const ExpertsConfig& x = options.model.experts;
    const Mesh& mesh = config.mesh;
    if (x.count == 0) {
        if (mesh.ep > 1) usage_error("--ep {}: needs a model with experts (try --experts {})", mesh.ep, mesh.ep);
        return;
    }
    int64_t divisor = mesh.ep;  // of both
    while (x.count % divisor != 0 || mesh.stage_ranks() % divisor != 0) --divisor;
    if (divisor != mesh.ep)
        usage_error(
            "--ep {}: must divide --experts {} and the {} ranks of a stage, --tp {} x --cp {} x --dp {} (try {})",
            mesh.ep, x.count, mesh.stage_ranks(), mesh.tp, mesh.cp, mesh.dp, divisor);
    if (mesh.tp > 1 && !config.tensor.sequence_parallel)
        usage_error("--experts {} with --tp {}: needs --sequence-parallel on, so that each rank has its own rows",
                    x.count, mesh.tp);
    if (x.shared * x.ffn % mesh.tp != 0)
        usage_error("--shared-experts {} of --expert-ffn {} are not divisible by --tp {}", x.shared, x.ffn, mesh.tp);
    if (config.fp8.recipe != "off")
        usage_error("--fp8 {}: not supported with --experts (try --fp8 off)", config.fp8.recipe);
    if (mesh.ep == 1 && mesh.tp == 1) return;  // what holds the experts holds the rest
    if (config.zero.hybrid_shard > 0)
        usage_error("--hybrid-shard {}: not supported with --experts and --ep or --tp above 1 (try --hybrid-shard 0)",
                    config.zero.hybrid_shard);
    if (config.zero.offload != Offload::none)
        usage_error("--offload: not supported with --experts and --ep or --tp above 1 (try --offload none)");
}

void validate(ParallelConfig& config, const TrainOptions& options, int64_t ranks) {
    config.mesh = mesh_of(config.mesh, ranks);
    const Mesh& mesh = config.mesh;
    const LlamaConfig& c = options.model;
    check_experts(config, options);
    if (c.latent.kv_rank > 0 && config.fp8.recipe != "off")
        usage_error("--fp8 {}: not supported with --kv-lora-rank {} (try --fp8 off)", config.fp8.recipe,
                    c.latent.kv_rank);
    check_tensor_parallel(c, options.seq_len, mesh.tp, config.tensor);
    const ContextLayout context = context_layout(config, options);
    if (context.ulysses > 1 && mesh.tp > 1 && !c.heads_divide_by(mesh.tp * context.ulysses))
        usage_error(
            "--heads {} and --kv-heads {} over --tp {} are not divisible by the {} ranks of --cp-algorithm {} (try "
            "--cp-algorithm zigzag)",
            c.heads, c.kv_heads, mesh.tp, context.ulysses, config.context.algorithm);
    if (config.tensor.sequence_parallel && options.seq_len / mesh.cp % mesh.tp != 0)
        usage_error(
            "--sequence-parallel on: --seq-len {} / --cp {} = {} is not divisible by --tp {} (try --seq-len {})",
            options.seq_len, mesh.cp, options.seq_len / mesh.cp, mesh.tp,
            (options.seq_len / (2 * mesh.cp * mesh.tp) + 1) * 2 * mesh.cp * mesh.tp);
    if (config.tensor.overlap && mesh.tp > 1 && config.fp8.recipe != "off")
        usage_error("--tp-overlap on: not supported with --fp8 {} (try --tp-overlap off, or --fp8 off)",
                    config.fp8.recipe);
    check_precision(config.fp8, config.optimizer, options, config.zero.offload != Offload::none);
    check_zero(config.zero, options, mesh.dp * mesh.cp, ranks_on_this_node(),
               state_bytes(config.optimizer, options.llama().dtype, 0));
    check_fp8(config.fp8, c, options.micro_batch * options.seq_len / mesh.cp, mesh.tp);
    schedule_of(config, options);
    stage_of(config, c, 0);  // the check does not depend on the rank
}

}  // namespace train70b
