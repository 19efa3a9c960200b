#include "04_tensor_parallel/complete/report.h"

#include "02_data_parallel/runtime/measure.h"
#include "04_tensor_parallel/complete/flags.h"

namespace train70b {

TensorParallelRun run_tensor_parallel(const TrainOptions& options, const Dataset& data, const Comm& world, int64_t tp,
                                      const TensorParallelOptions& tp_options) {
    TrainOptions o = options;
    o.global_batch = o.micro_batch;
    const Comm ranks = world.split([tp](int rank) { return int(rank / tp); }, "tp");
    FreshRun fresh(o, data);
    const TensorParallel tensor_parallel(fresh.model, ranks, tp_options);
    fresh.trainer.groups.tp = group_of(ranks);

    // Counts what the first block sends: the tape's order is the hook. Only in the last step, because counting waits
    // for the device.
    TensorParallelRun run{.tp = tp, .options = tp_options};
    bool counting = false;
    const auto count = [&](Traffic* traffic) {
        if (!counting) return;
        const CommStats stats = world.take_stats();
        run.step.add(stats);
        if (traffic) traffic->add(stats);
    };
    auto& wrappers = fresh.model.blocks.front().unit.wrappers;
    wrappers.insert(wrappers.begin(), [&](Tape& tape, const Var& x, const Unit::Body& body) {
        count(nullptr);
        tape.record([&] { count(&run.layer); });
        Var y = body(tape, x);
        count(&run.layer);
        tape.record([&] { count(nullptr); });
        return y;
    });

    const MeasuredStep timed = fresh.measure(world, 2).back();
    run.step_s = timed.report.step_s;
    run.waiting_s = timed.comm.waited;
    counting = true;
    const MeasuredStep counted = fresh.measure(world).front();
    counting = false;
    run.step.add(counted.comm);
    run.peak = counted.report.peak;
    const Llama::Options& types = fresh.model.options;
    const TrafficShape shape{o.micro_batch * o.seq_len, tp, types.dtype, types.grad_dtype, tp_options, types.recompute};
    run.elements = tensor_parallel_elements(o.model, tp);
    run.activations = activation_formula(o.model, o.micro_batch, o.seq_len, types.dtype, types.recompute,
                                         {tp, tp_options.sequence_parallel});
    run.layer_formula = layer_traffic(o.model, shape);
    run.step_formula = step_traffic(o.model, shape, 1);
    return run;
}

namespace {
std::string name_of(const TensorParallelRun& run) {
    return fmt::format("tp {}{}{}", run.tp, run.options.sequence_parallel ? ", sequence" : "",
                       run.options.overlap ? ", overlap" : "");
}
}  // namespace

Table memory_table(const std::vector<TensorParallelRun>& runs, const Llama::Options& types) {
    const int64_t bytes[] = {size_of(types.dtype), size_of(types.grad_dtype), AdamW::state_bytes(types.dtype)};
    std::vector<MemoryRow> rows;
    for (const TensorParallelRun& run : runs) {
        const int64_t n = run.elements;
        rows.push_back(
            {name_of(run), run.peak, {bytes[0] * n, bytes[1] * n, bytes[2] * n, run.activations.total, -1, -1, -1}});
    }
    return memory_table("bytes of rank 0: peak of a step with one micro-batch; below it the formula", rows);
}

Table traffic_table(const std::vector<TensorParallelRun>& runs) {
    Table table("bytes that a rank sends for one block, forward and backward, and in a whole step",
                {"", "block", "formula", "step", "formula", Column("a block's collectives").left()});
    for (const TensorParallelRun& run : runs)
        if (run.tp > 1)
            table.row({name_of(run), run.layer.bytes(), run.layer_formula.bytes(), run.step.bytes(),
                       run.step_formula.bytes(), run.layer.text()});
    return table;
}

Table time_table(const std::vector<TensorParallelRun>& runs) {
    Table table("one micro-batch on tp ranks", {"", "step", "waiting"});
    for (const TensorParallelRun& run : runs)
        table.row({name_of(run), milliseconds(run.step_s), milliseconds(run.waiting_s)});
    return table;
}

namespace {

// Layouts of fewer ranks than the chosen one hold more of the model; of a large one they might not fit.
constexpr int64_t kSmallModel = 500'000'000;  // parameters

void print_tables(Program& p, int64_t chosen) {
    const TrainOptions& options = p.options;
    std::vector<TensorParallelRun> runs, plain;
    for (int64_t tp = options.model.parameters() > kSmallModel ? chosen : 1; tp <= p.world.size(); ++tp)
        for (const TensorParallelOptions& how :
             {TensorParallelOptions{false, false}, {false, true}, {true, false}, {true, true}}) {
            const bool power = (tp & (tp - 1)) == 0, changes = tp > 1 || !(how.sequence_parallel || how.overlap);
            if (p.world.size() % tp != 0 || !(power || tp == chosen) || !changes) continue;
            if (!possible("", [&] { check_tensor_parallel(options.model, options.seq_len, tp, how); })) continue;
            runs.push_back(run_tensor_parallel(options, p.data(), p.world, tp, how));
            if (!how.overlap) plain.push_back(runs.back());
        }
    say(memory_table(plain, options.llama()));
    say(traffic_table(runs));
    say(time_table(runs));
}

}  // namespace

void say_layout(const Program& p, int64_t tp, const TensorParallelOptions& o) {
    say("{} tensor-parallel x {} data-parallel ranks ({}); sequence parallelism {}, overlap {}\n", tp, p.dp,
        p.world.backend(), o.sequence_parallel ? "on" : "off", o.overlap ? "on" : "off");
}

void print_report(Program& p, int64_t tp) {
    p.release();
    if (p.compares(p.world.size())) print_tables(p, tp);
}

}  // namespace train70b
