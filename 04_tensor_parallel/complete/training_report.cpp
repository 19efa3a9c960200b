#include "04_tensor_parallel/complete/training_report.h"

namespace train70b {

void say_layout(const Program& p, int64_t tp, const TensorParallelOptions& o) {
    say("{} tensor-parallel x {} data-parallel ranks ({}); sequence parallelism {}, overlap {}\n", tp, p.dp,
        p.world.backend(), o.sequence_parallel ? "on" : "off", o.overlap ? "on" : "off");
}

void print_tables(const Program& p, int64_t tp, const TensorParallelOptions& options) {
    if (!p.prints_tables()) return;
    const TrainOptions& o = p.options;
    const Llama::Options& types = p.model().options;
    const StepReport& step = p.last_step();
    const std::string name =
        fmt::format("tp {}{}{}", tp, options.sequence_parallel ? ", sequence" : "", options.overlap ? ", overlap" : "");
    const int64_t n = tensor_parallel_elements(o.model, tp);
    const ActivationFormula activations =
        activation_formula(o.model, o.micro_batch, o.seq_len, types.dtype, types.recompute,
                           {tp, options.sequence_parallel, types.loss_chunk, types.recompute_every});
    say(memory_table(fmt::format("bytes of rank {}: peak of the last step; below it the formula", p.world.rank()),
                     {{name,
                       step.peak,
                       {size_of(types.dtype) * n, size_of(types.grad_dtype) * n, AdamW::state_bytes(types.dtype) * n,
                        activations.total, -1, -1, -1}}}));
    if (tp == 1) return;
    const TrafficShape shape{o.micro_batch * o.seq_len, tp, types.dtype, types.grad_dtype, options, types.recompute,
                             types.recompute_every};
    const Traffic block = layer_traffic(o.model, shape);
    Table traffic("bytes that a rank sends to the others of its tp group",
                  {"", "block: formula", "step", "formula", Column("a block's collectives").left()});
    traffic.row({name, block.bytes(), sent_bytes(step, "tp"),
                 step_traffic(o.model, shape, o.accumulation(p.dp)).bytes(), block.text()});
    say(traffic);
}

}  // namespace train70b
