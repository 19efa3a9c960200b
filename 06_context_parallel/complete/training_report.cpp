#include "06_context_parallel/complete/training_report.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace train70b {

ContextStep context_step(const TrainOptions& o, const Llama::Options& types, const ContextLayout& layout,
                         const Comm& ranks, const StepReport& step, int64_t micro_batches) {
    const int64_t layers = o.model.layers;
    const auto sent = [&](const std::string& operation) {
        return sent_bytes(step, ranks.name() + operation) / (layers * micro_batches);
    };
    ContextTraffic sum;
    for (int64_t layer = 0; layer < layers; ++layer) {
        const ContextTraffic one =
            context_traffic(o.model, layout, o.micro_batch, o.seq_len, types.dtype,
                            recompute_in(layer, types.recompute, o.recompute_every), o.model.window_of(layer));
        sum.ring += one.ring, sum.ulysses += one.ulysses, sum.gather += one.gather;
    }
    ContextStep result{
        .sent = {sent("_ring.send_recv"), sent("_ulysses.all_to_all"), sent("_gather.")},
        .formula = {sum.ring / layers, sum.ulysses / layers, sum.gather / layers},
        .activations_formula = activation_formula(o.model, o.micro_batch, o.seq_len, types.dtype, types.recompute,
                                                  {.loss_chunk = types.loss_chunk * ranks.size(),
                                                   .recompute_every = types.recompute_every})
                                   .total /
                               ranks.size()};
    if (layout.gather && ranks.size() > 1)
        result.gather_formula = gather_memory({.batch = o.micro_batch,
                                               .chunk_len = o.seq_len / layout.granularity(),
                                               .chunks = layout.chunks,
                                               .heads = o.model.heads,
                                               .kv_heads = o.model.kv_heads,
                                               .head_dim = o.model.head_dim()},
                                              ranks.size(), ranks.rank(), types.dtype);
    return result;
}

void AttentionWork::before_step(int64_t step) {
    if (step != trainer_.last_step()) return;
    profile().sums.clear();
    profile().sums_on = true;
}

bool AttentionWork::after_step(const StepReport&) {
    if (!profile().sums_on) return true;
    profile().sums_on = false;
    double operations = 0, seconds = 0;
    for (const char* op : {"attention", "attention_backward"}) {
        operations += profile().sums[op].flops;
        seconds += profile().sums[op].cpu_seconds;
    }
    flops = ranks_.gather({operations});
    cpu_s = ranks_.gather({seconds});
    return true;
}

void say_layout(const Program& p, const std::string& algorithm, const ContextLayout& layout) {
    say("{} context-parallel x {} data-parallel ranks ({}); {}: {} {}, {} divide heads\n", layout.ranks, p.dp,
        p.world.backend(), algorithm, layout.groups(), layout.gather ? "gather" : "in the ring", layout.ulysses);
}

namespace {

Cell imbalance(const std::vector<double>& work) {  // of all ranks: slowest / mean
    const double sum = std::accumulate(work.begin(), work.end(), 0.0);
    return fixed(*std::max_element(work.begin(), work.end()) * double(work.size()) / sum, 2);
}

Table work_table(const std::string& name, const AttentionWork& work) {
    std::vector<Column> columns = {"", Column("").left()};
    for (size_t rank = 0; rank < work.flops.size(); ++rank) columns.push_back(fmt::format("rank {}", rank));
    columns.push_back("slowest / mean");
    Table table("attention of the last step, rank by rank: GFLOP counted, CPU ms measured", columns);
    const auto row = [&](const std::string& label, const char* what, const std::vector<double>& values, double unit) {
        std::vector<Cell> cells = {label, what};
        for (const double value : values) cells.push_back(fixed(value / unit, 3));
        cells.push_back(imbalance(values));
        table.row(cells);
    };
    row(name, "GFLOP", work.flops, 1e9);
    row("", "CPU ms", work.cpu_s, 1e-3);
    return table;
}

// With documents: the pairs of query and key that each rank counted, and what the layout would do without documents.
Table document_table(const std::string& name, const AttentionWork& work, const ContextLayout& layout,
                     const TrainOptions& options) {
    const int64_t ranks = int64_t(work.flops.size());
    std::vector<Column> columns = {""};
    for (int64_t rank = 0; rank < ranks; ++rank) columns.push_back(fmt::format("rank {}", rank));
    columns.insert(columns.end(), {"slowest / mean", "without documents"});
    Table table("pairs of query and key inside documents, of one step and block, per head", columns);
    // Each pair and element of a head: 4 operations forward, 10 backward, and 4 more if attention is recomputed.
    const Recompute recompute = options.llama().recompute;
    const bool again = recompute == Recompute::selective || recompute == Recompute::full;
    const double layers = double(options.model.layers);
    const double recomputed = again ? std::ceil(layers / double(options.recompute_every)) / layers : 0;  // of blocks
    const double operations = 14 + 4 * recomputed, elements = double(options.model.layers * options.model.q_width());
    std::vector<Cell> cells = {name};
    std::vector<double> without;
    const double share = options.model.hides_keys(options.seq_len) ? options.model.window_share() : 0;
    const std::vector<int32_t> windows =
        window_starts(std::vector<int32_t>(size_t(options.seq_len)), std::max<int64_t>(options.model.window, 1));
    for (int64_t rank = 0; rank < ranks; ++rank) {
        cells.push_back(fixed(work.flops[size_t(rank)] / (operations * elements), 0));
        without.push_back((1 - share) * attention_pairs(layout, rank, options.seq_len) +
                          share * attention_pairs(layout, rank, windows));
    }
    cells.insert(cells.end(), {imbalance(work.flops), imbalance(without)});
    table.row(cells);
    return table;
}

}  // namespace

void print_tables(const Program& p, const Comm& ranks, const std::string& algorithm, const ContextLayout& layout,
                  const AttentionWork& work) {
    if (!p.prints_tables()) return;
    const TrainOptions& o = p.options;
    const StepReport& step = p.last_step();
    const ContextStep run = context_step(o, p.model().options, layout, ranks, step, o.accumulation(p.dp));
    const std::string name =
        algorithm + (algorithm == "hybrid" ? fmt::format(" {} x {}", layout.ulysses, layout.groups()) : "");
    if (ranks.has_peers()) {
        say(work_table(name, work));
        if (o.document_token) say(document_table(name, work, layout, o));
    }
    Table traffic("bytes that a rank sends for one block and micro-batch",
                  {"", "ring", "formula", "all-to-all", "formula", "gather", "formula", "step", "waiting"});
    traffic.row({name, run.sent.ring, run.formula.ring, run.sent.ulysses, run.formula.ulysses, run.sent.gather,
                 run.formula.gather, milliseconds(step.step_s), milliseconds(step.waited_s)});
    say(traffic);
    Table memory(fmt::format("bytes of rank {}: peak of the last step", p.world.rank()),
                 {"", "T", "activations", "one rank's / N", "comm", "workspace"});
    const MemoryBytes& bytes = step.peak.kind;
    memory.row({name, o.seq_len, bytes[int(Memory::activations)], run.activations_formula, bytes[int(Memory::comm)],
                bytes[int(Memory::workspace)]});
    say(memory);
}

}  // namespace train70b
