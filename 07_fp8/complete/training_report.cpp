#include "07_fp8/complete/training_report.h"

#include "07_fp8/complete/adamw8bit.h"
#include "07_fp8/complete/optimizers.h"

namespace train70b {

int64_t fp8_activations(const LlamaConfig& c, int64_t rows, DType dtype, Recompute recompute, const Recipe& recipe,
                        int64_t tensor_ranks, int64_t recompute_every) {
    const int64_t a = size_of(dtype), E = c.hidden, F = c.ffn / tensor_ranks;
    const auto saved = [&](int64_t in) {  // a byte and a share of a scale instead of a bytes
        const Scaling by = recipe.scaling(Operand::input);
        return (a - 1) * rows * in - size_of(scale_dtype(by)) * ScaleLayout{by, in, rows}.size();
    };
    const ActivationFormula f =
        activation_formula(c, 1, rows, dtype, recompute, {tensor_ranks, false, 0, recompute_every});
    // Of the inputs that a block keeps, those of q k v, of gate and up, of down are FP8 data; attention keeps that of
    // o. In the last block's turn, what down has released is already replaced by gradients of the full width: less is
    // gained there.
    const auto level = [&](int64_t layer) { return recompute_in(layer, recompute, recompute_every); };
    int64_t kept = f.total;
    for (int64_t layer = 0; layer < c.layers; ++layer)
        if (level(layer) == Recompute::none) kept -= 2 * saved(E) + saved(F);
    if (level(c.layers - 1) == Recompute::none)
        return kept + std::max(f.working, 2 * a * rows * F + saved(F)) - f.working;
    if (recompute == Recompute::full) {  // only the block that is being made again holds any
        const int64_t head = rows * (a * (2 * E + (c.vocab + tensor_ranks - 1) / tensor_ranks) + 4);
        return kept - f.working + std::max(head, f.working - 2 * saved(E));
    }
    return kept;  // pointwise, selective: they are made again, not kept
}

void say_layout(const Program& p, const Fp8Trainer& composed, const TensorComms& layout, const ZeroOptions& zero,
                const Precision& precision) {
    for (const std::string& why : composed.fp8.left_out) say("stays in {}: {}\n", p.options.dtype, why);
    say("{} of {} linear layers of the blocks in 8 bits ({}); {}; {} tensor-parallel x {} data-parallel ranks ({}), "
        "ZeRO stage {}\n",
        composed.fp8.layers.size(), 4 * p.options.model.layers, precision.fp8.recipe, precision.optimizer,
        layout.tensor_ranks.size(), p.dp, p.world.backend(), zero.stage);
}

namespace {

// Bytes of activations and of optimizer states, of full parameters.
std::pair<int64_t, int64_t> formulas(const TrainOptions& o, Llama& model, int64_t tp, const Precision& precision) {
    const DType dtype = model.options.dtype;
    const Recompute recompute = model.options.recompute;
    int64_t activations = activation_formula(o.model, o.micro_batch, o.seq_len, dtype, recompute,
                                             {tp, false, o.loss_chunk, o.recompute_every})
                              .total;
    if (precision.fp8.recipe != "off") {
        const auto recipe = make_recipe(precision.fp8, 3, Device::cpu, Comm());
        activations =
            fp8_activations(o.model, o.micro_batch * o.seq_len, dtype, recompute, *recipe, tp, o.recompute_every);
    }
    const OptimizerEntry& optimizer = find_optimizer(precision.optimizer);
    int64_t states = 0;
    for (const Param* param : model.params()) {
        const int64_t size = param->local.size();
        states += ((optimizer.masters ? master_bytes(dtype) : 0) +
                   optimizer.moments_of(*param) * size_of(optimizer.moments(dtype))) *
                  size;
        if (optimizer.scale_block > 0) states += 8 * BlockLayout{param->global_index(0), size}.blocks();
    }
    return {activations, states};
}

}  // namespace

void print_table(Program& p, const TensorComms& layout, const Precision& precision) {
    if (!p.prints_tables()) return;
    const StepReport& step = p.last_step();
    const bool whole = layout.data_ranks.size() == 1;  // no shards: the formulas hold
    Table table(fmt::format("bytes of rank {}: peak of the last step{}; and what it sends in one", p.world.rank(),
                            whole ? ", below it the formula" : ""),
                {"", "params", "grads", "optimizer", "activations", "workspace", "all-gathers", "reductions", "step"});
    const auto kind = [&](Memory memory) { return step.peak.kind[size_t(memory)]; };
    const std::string recipe = precision.fp8.recipe == "off" ? p.options.dtype : precision.fp8.recipe;
    table.row({recipe + (precision.optimizer == "adamw" ? "" : ", " + precision.optimizer), kind(Memory::params),
               kind(Memory::grads), kind(Memory::optimizer), kind(Memory::activations), kind(Memory::workspace),
               sent_bytes(step, "", ".all_gather"),
               sent_bytes(step, "", ".reduce_scatter") + sent_bytes(step, layout.data_ranks.name() + ".all_reduce"),
               milliseconds(step.step_s)});
    if (whole) {
        const auto [activations, states] = formulas(p.options, p.model(), layout.tensor_ranks.size(), precision);
        table.row({"", "", "", states, activations});
    }
    say(table);
}

}  // namespace train70b
