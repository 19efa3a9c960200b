#include "07_fp8/complete/report.h"

#include "01_single_gpu/complete/run/bench.h"
#include "01_single_gpu/core/registry.h"
#include "02_data_parallel/runtime/measure.h"
#include "07_fp8/complete/adamw8bit.h"

namespace train70b {

int64_t fp8_activations(const LlamaConfig& c, int64_t rows, DType dtype, Recompute recompute, const Recipe& recipe,
                        int64_t tensor_ranks) {
    const int64_t a = size_of(dtype), E = c.hidden, F = c.ffn / tensor_ranks;
    const auto saved = [&](int64_t in) {  // a byte and a share of a scale instead of a bytes
        return (a - 1) * rows * in - 4 * ScaleLayout{recipe.scaling(Operand::input), in, rows}.size();
    };
    const ActivationFormula f = activation_formula(c, 1, rows, dtype, recompute, {tensor_ranks, false});
    // Of the inputs that a block keeps, those of q k v, of gate and up, of down are FP8 data; attention keeps that of
    // o. In the last block's turn, what down has released is already replaced by gradients of the full width: less is
    // gained there.
    if (recompute == Recompute::none) {
        const int64_t working = std::max(f.working, 2 * a * rows * F + saved(F));
        return f.total - c.layers * (2 * saved(E) + saved(F)) + working - f.working;
    }
    if (recompute == Recompute::full) {  // only the block that is being made again holds any
        const int64_t head = rows * (a * (2 * E + (c.vocab + tensor_ranks - 1) / tensor_ranks) + 4);
        return f.total - f.working + std::max(head, f.working - 2 * saved(E));
    }
    return f.total;  // pointwise, selective: they are made again, not kept
}

PrecisionRun run_precision(const TrainOptions& o, const Dataset& data, const TensorComms& layout,
                           const ZeroOptions& zero_options, const Precision& precision) {
    FreshRun fresh(o, data);
    const Fp8Trainer composed(fresh.model, fresh.trainer, o, layout, zero_options, precision);
    const MeasuredStep step = fresh.measure(layout.data_ranks, 2).back();
    PrecisionRun run{
        .peak = step.report.peak,
        .gathered = step.wire_bytes(".all_gather"),
        .reduced = step.wire_bytes(".reduce_scatter") + step.wire_bytes(layout.data_ranks.name() + ".all_reduce"),
        .step_s = step.report.step_s};
    const int64_t tp = layout.tensor_ranks.size(), rows = o.micro_batch * o.seq_len;
    const DType dtype = fresh.model.options.dtype;
    const Recompute recompute = fresh.model.options.recompute;
    run.activations_formula =
        precision.fp8.recipe == "off"
            ? activation_formula(o.model, o.micro_batch, o.seq_len, dtype, recompute, {tp, false}).total
            : fp8_activations(o.model, rows, dtype, recompute, *make_recipe(precision.fp8, 3, Device::cpu, Comm()), tp);
    for (const Param* param : fresh.model.params()) {
        const OptimizerEntry& optimizer = find_optimizer(precision.optimizer);
        const int64_t size = param->local.size();
        run.optimizer_formula += (master_bytes(dtype) + 2 * size_of(optimizer.moments(dtype))) * size;
        if (optimizer.scale_block > 0) run.optimizer_formula += 8 * BlockLayout{param->global_index(0), size}.blocks();
    }
    return run;
}

Table memory_table(const std::vector<PrecisionRun>& runs, bool formulas) {
    Table table(fmt::format("bytes of rank 0: peak of a step{}; and what it sends in one",
                            formulas ? ", below it the formula" : ""),
                {"", "params", "grads", "optimizer", "activations", "workspace", "all-gathers", "reductions", "step"});
    for (const PrecisionRun& run : runs) {
        const auto kind = [&](Memory memory) { return run.peak.kind[size_t(memory)]; };
        table.row({run.name, kind(Memory::params), kind(Memory::grads), kind(Memory::optimizer),
                   kind(Memory::activations), kind(Memory::workspace), run.gathered, run.reduced,
                   milliseconds(run.step_s)});
        if (formulas) table.row({"", "", "", run.optimizer_formula, run.activations_formula});
    }
    return table;
}

// ---- time -----------------------------------------------------------------------------------------------------------

ProductTimes time_products(Device device, const Fp8Options& options, int64_t rows, int64_t in, int64_t out) {
    const auto random = [&](Shape shape, uint64_t key, float size) {
        Tensor x(shape, DType::bf16, device, Memory::workspace);
        fill_normal(x, key, {.cols = x.size(), .global_cols = x.size()}, size);
        return x;
    };
    const Tensor x = random({rows, in}, 1, 1), w = random({out, in}, 2, 0.02f), dy = random({rows, out}, 3, 1e-6f);
    Tensor y({rows, out}, DType::bf16, device, Memory::workspace), dx = Tensor::like(x, Memory::workspace);
    Tensor dw({out, in}, DType::f32, device, Memory::workspace);
    fill(dw, 0);
    const auto recipe = make_recipe(options, 3, device, Comm());
    const auto seconds = [&](const std::function<void()>& body) { return median_seconds(device, 9, body); };
    QuantizedPair of_x, of_w, of_dy;
    const auto quantize_all = [&] {
        of_x = recipe->quantize({Operand::input, 0}, x, Usage::both, true);
        of_w.rowwise = recipe->quantize({Operand::weight, 1}, w, Usage::rowwise, true).rowwise;
        of_w.columnwise = recipe->quantize({Operand::weight, 1}, w, Usage::columnwise, false).columnwise;
        of_dy = recipe->quantize({Operand::gradient, 2}, dy, Usage::both, true);
    };
    quantize_all();
    recipe->next_step();
    ProductTimes times{rows, in, out, 0, 0, 0};
    times.bf16_s = seconds([&] {
        matmul_into(y, x, w, Transpose::b);
        matmul_into(dx, dy, w);
        matmul_into(dw, dy, x, Transpose::a, 1);
    });
    times.cast_s = seconds(quantize_all);
    times.fp8_s = seconds([&] {
        scaled_matmul_into(y, of_x.rowwise, of_w.rowwise);
        scaled_matmul_into(dx, of_dy.rowwise, of_w.columnwise);
        scaled_matmul_into(dw, of_dy.columnwise, of_x.columnwise, 1);
    });
    return times;
}

Table time_table(const std::vector<ProductTimes>& times, const std::string& recipe) {
    Table table(fmt::format("a layer's three products, {}: TFLOP/s, and milliseconds of the casts", recipe),
                {"rows", "in", "out", "bf16", "fp8", "casts, ms", "net speedup"});
    const ProductTimes* even = nullptr;  // the smallest shape from which on 8 bits are faster
    for (const ProductTimes& t : times) {
        const double flops = 6.0 * double(t.rows) * double(t.in) * double(t.out), all = t.fp8_s + t.cast_s;
        table.row({t.rows, t.in, t.out, fixed(flops / t.bf16_s / 1e12, 1), fixed(flops / t.fp8_s / 1e12, 1),
                   fixed(1e3 * t.cast_s, 3), fixed(t.bf16_s / all, 2, " x")});
        if (t.bf16_s <= all) even = nullptr;
        if (t.bf16_s > all && !even) even = &t;
    }
    table.note(even ? fmt::format("8 bits pay from {} rows of {} to {} on", even->rows, even->in, even->out)
                    : "8 bits do not pay at the largest of these shapes");
    return table;
}

void say_layout(const Program& p, const Fp8Trainer& composed, const TensorComms& layout, const ZeroOptions& zero,
                const Precision& precision) {
    for (const std::string& why : composed.fp8.left_out()) say("stays in {}: {}\n", p.options.dtype, why);
    say("{} of {} linear layers of the blocks in 8 bits ({}); {}; {} tensor-parallel x {} data-parallel ranks ({}), "
        "ZeRO stage {}\n",
        composed.fp8.layers().size(), 4 * p.options.model.layers, precision.fp8.recipe, precision.optimizer,
        layout.tensor_ranks.size(), p.dp, p.world.backend(), zero.stage);
}

// ---- all of it ------------------------------------------------------------------------------------------------------

namespace {

// Every recipe with AdamW; with 8-bit AdamW only the chosen one and none.
std::vector<PrecisionRun> run_precisions(Program& p, const TensorComms& layout, const ZeroOptions& zero,
                                         const Precision& chosen) {
    std::vector<PrecisionRun> runs;
    const std::string& dtype = p.options.dtype;
    for (const std::string& recipe : fp8_values())
        for (const std::string& optimizer : names_of(optimizers())) {
            const bool narrow = recipe != "off" || optimizer != "adamw";
            if (narrow && dtype == "fp64") continue;
            if (optimizer != "adamw" && recipe != "off" && recipe != chosen.fp8.recipe) continue;
            Precision precision = chosen;
            precision.fp8.recipe = recipe;
            precision.fp8.strict = false;
            precision.optimizer = optimizer;
            runs.push_back(run_precision(p.options, p.data(), layout, zero, precision));
            runs.back().name = (recipe == "off" ? dtype : recipe) + (optimizer == "adamw" ? "" : ", " + optimizer);
        }
    return runs;
}

}  // namespace

void print_tables(Program& p, const TensorComms& layout, const ZeroOptions& zero, const Precision& chosen) {
    p.release();
    if (!p.tables || !p.world.has_peers()) return;
    if (this_rank == 0) say(error_table(product_errors(256, 512, 512, 1)));
    say(memory_table(run_precisions(p, layout, zero, chosen), layout.data_ranks.size() == 1));
    if (p.options.device_kind() == Device::cuda && chosen.fp8.recipe != "off" && this_rank == 0) {
        std::vector<ProductTimes> times;
        for (const int64_t size : {1024, 2048, 4096, 8192})
            for (const int64_t rows : {1024, 4096, 16384})
                times.push_back(time_products(Device::cuda, chosen.fp8, rows, size, size));
        say(time_table(times, chosen.fp8.recipe));
    }
}

}  // namespace train70b
