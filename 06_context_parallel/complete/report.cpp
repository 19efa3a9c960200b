#include "06_context_parallel/complete/report.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "01_single_gpu/core/profile.h"
#include "01_single_gpu/core/random.h"
#include "01_single_gpu/core/registry.h"
#include "02_data_parallel/runtime/measure.h"
#include "06_context_parallel/complete/flags.h"

namespace train70b {

namespace {
std::string name_of(const ContextRun& run) {
    return run.algorithm +
           (run.algorithm == "hybrid" ? fmt::format(" {} x {}", run.layout.ulysses, run.layout.groups()) : "");
}

Cell imbalance(const std::vector<double>& work) {  // of all ranks: slowest / mean
    const double sum = std::accumulate(work.begin(), work.end(), 0.0);
    return fixed(*std::max_element(work.begin(), work.end()) * double(work.size()) / sum, 2);
}
}  // namespace

ContextRun run_context(const TrainOptions& options, const Dataset& data, const Comm& ranks,
                       const ContextParallelOptions& context_options) {
    TrainOptions o = options;
    o.global_batch = o.micro_batch;
    const ContextLayout layout = context_layout(o.model, o.seq_len, ranks.size(), context_options);
    FreshRun fresh(o, data);
    apply_context_parallel(fresh.model, ranks, layout);
    // For the loss; gradients are not summed: attention is what is measured here.
    fresh.trainer.groups.dp_cp = group_of(ranks);
    fresh.trainer.batches.of_rank = layout.of_rank(ranks.rank());
    fresh.measure(ranks);
    const ProfileScope scope({.sums_on = true, .device = o.device_kind()});
    const MeasuredStep step = fresh.measure(ranks).front();

    double flops = 0, cpu_s = 0;
    for (const char* op : {"attention", "attention_backward"}) {
        flops += profile().sums[op].flops;
        cpu_s += profile().sums[op].cpu_seconds;
    }
    const auto sent = [&](const std::string& operation) {
        return step.wire_bytes(ranks.name() + operation) / o.model.layers;
    };
    const DType dtype = fresh.model.options.dtype;
    const Recompute recompute = fresh.model.options.recompute;
    ContextRun run{.algorithm = context_options.algorithm, .layout = layout, .seq_len = o.seq_len};
    run.peak = step.report.peak;
    run.activations_formula =
        activation_formula(o.model, o.micro_batch, o.seq_len, dtype, recompute).total / ranks.size();
    run.flops = ranks.gather({flops});
    run.cpu_s = ranks.gather({cpu_s});
    run.sent = {sent("_ring.send_recv"), sent("_ulysses.all_to_all"),
                (step.wire_bytes(ranks.name() + "_gather.all_gather") +
                 step.wire_bytes(ranks.name() + "_gather.reduce_scatter")) /
                    o.model.layers};
    run.formula = context_traffic(o.model, layout, o.micro_batch, o.seq_len, dtype, recompute);
    run.step_s = step.report.step_s;
    run.waiting_s = step.comm.waited;
    if (layout.gather && ranks.size() > 1)
        run.gather_formula = gather_memory({.batch = o.micro_batch,
                                            .chunk_len = o.seq_len / layout.granularity(),
                                            .chunks = layout.chunks,
                                            .heads = o.model.heads,
                                            .kv_heads = o.model.kv_heads,
                                            .head_dim = o.model.head_dim()},
                                           ranks.size(), ranks.rank(), dtype);
    return run;
}

double attention_error(const Comm& ranks, const ContextParallelOptions& options, DType dtype, uint64_t seed,
                       float scale) {
    LlamaConfig c;
    c.heads = 8, c.kv_heads = 2, c.hidden = 8 * 16;
    const int64_t T = 128, B = 2, D = c.head_dim();
    const ContextLayout layout = context_layout(c, T, ranks.size(), options);
    // Of the whole batch, in the order of sequences: q, k, v and the gradient of the output.
    const auto whole = [&](int64_t heads, uint64_t key, DType type) {
        Tensor x({B * T, heads * D}, DType::f32, Device::cpu, Memory::workspace);
        const float std = key < 2 ? scale : 1.0f;  // of q and k
        fill_normal(x, random_bits(seed, key), {.cols = x.size(), .global_cols = x.size()}, std);
        Tensor rounded({B * T, heads * D}, dtype, Device::cpu, Memory::workspace);
        copy(rounded, x);
        Tensor result({B * T, heads * D}, type, Device::cpu, Memory::workspace);
        copy(result, rounded);
        return result;
    };
    const int64_t heads[] = {c.heads, c.kv_heads, c.kv_heads, c.heads};
    const auto run = [&](const std::vector<Tensor>& x, const std::function<Var(Tape&, const QKV&)>& attend) {
        Tape tape;
        const QKV qkv{Var{.data = x[0]}, Var{.data = x[1]}, Var{.data = x[2]}};
        Var out = attend(tape, qkv);
        const Tensor result = out.data;
        *out.grad = x[3];
        tape.backward();
        return std::vector<Tensor>{result, *qkv.q.grad, *qkv.k.grad, *qkv.v.grad};
    };
    std::vector<Tensor> inputs, mine;
    for (int i = 0; i < 4; ++i) {
        inputs.push_back(whole(heads[i], uint64_t(i), stats_dtype(dtype)));
        const Tensor all = whole(heads[i], uint64_t(i), dtype);
        Tensor rows({B * T / ranks.size(), heads[i] * D}, dtype, Device::cpu, Memory::workspace);
        int64_t at = 0;
        for (const auto [begin, count] : layout.tokens_of(ranks.rank(), T))
            for (int64_t b = 0; b < B; ++b, at += count) {
                Tensor range = rows.row_slice(at, at + count);
                copy(range, all.row_slice(b * T + begin, b * T + begin + count));
            }
        mine.push_back(rows);
    }
    const std::vector<Tensor> expected = run(inputs, [&](Tape& tape, const QKV& qkv) {
        return one_device_attention(tape, qkv, {.sequences = B, .seq_len = T}, D);
    });
    Llama model({.layers = 1, .hidden = c.hidden, .heads = c.heads, .kv_heads = c.kv_heads}, {});
    apply_context_parallel(model, ranks, layout);
    const Batch batch{.sequences = B, .seq_len = T / ranks.size()};
    const std::vector<Tensor> got = run(mine, [&](Tape& tape, const QKV& qkv) {
        const auto& attention = model.blocks[0].attention;
        return attention ? attention(tape, qkv, batch) : one_device_attention(tape, qkv, batch, D);
    });
    double worst = 0;
    for (int i = 0; i < 4; ++i) {
        const std::vector<double> all = read(expected[size_t(i)]), part = read(got[size_t(i)]);
        const int64_t width = heads[i == 0 ? 0 : i - 1] * D;
        double difference = 0, size = 0;
        int64_t at = 0;
        for (const auto [begin, count] : layout.tokens_of(ranks.rank(), T))
            for (int64_t b = 0; b < B; ++b)
                for (int64_t e = (b * T + begin) * width; e < (b * T + begin + count) * width; ++e, ++at) {
                    difference += std::pow(part[size_t(at)] - all[size_t(e)], 2);
                    size += std::pow(all[size_t(e)], 2);
                }
        const double error = std::sqrt(ranks.sum(difference) / ranks.sum(size));
        if (!std::isnan(worst) && !(error <= worst)) worst = error;  // the first NaN stays
    }
    return worst;
}

// ---- tables ---------------------------------------------------------------------------------------------------------

Table work_table(const std::vector<ContextRun>& runs) {
    std::vector<Column> columns = {"", Column("").left()};
    for (size_t rank = 0; rank < runs[0].flops.size(); ++rank) columns.push_back(fmt::format("rank {}", rank));
    columns.push_back("slowest / mean");
    Table table("attention of one step, rank by rank: GFLOP counted, CPU ms measured", columns);
    const auto row = [&](const std::string& name, const char* what, const std::vector<double>& values, double unit) {
        std::vector<Cell> cells = {name, what};
        for (const double value : values) cells.push_back(fixed(value / unit, 3));
        cells.push_back(imbalance(values));
        table.row(cells);
    };
    for (const ContextRun& run : runs) {
        row(name_of(run), "GFLOP", run.flops, 1e9);
        row("", "CPU ms", run.cpu_s, 1e-3);
    }
    return table;
}

Table document_table(const std::vector<ContextRun>& runs, const TrainOptions& options) {
    const int64_t ranks = int64_t(runs[0].flops.size());
    std::vector<Column> columns = {""};
    for (int64_t rank = 0; rank < ranks; ++rank) columns.push_back(fmt::format("rank {}", rank));
    columns.insert(columns.end(), {"slowest / mean", "without documents"});
    Table table("pairs of query and key inside documents, of one step and block, per head", columns);
    // Each pair and element of a head: 4 operations forward, 10 backward, and 4 more if attention is recomputed.
    const Recompute recompute = options.llama().recompute;
    const double operations = recompute == Recompute::none || recompute == Recompute::pointwise ? 14 : 18;
    for (const ContextRun& run : runs) {
        std::vector<Cell> cells = {name_of(run)};
        std::vector<double> without;
        for (int64_t rank = 0; rank < ranks; ++rank) {
            const double elements = double(options.model.layers * options.model.q_width());
            cells.push_back(fixed(run.flops[size_t(rank)] / (operations * elements), 0));
            without.push_back(attention_pairs(run.layout, rank, run.seq_len));
        }
        cells.insert(cells.end(), {imbalance(run.flops), imbalance(without)});
        table.row(cells);
    }
    return table;
}

Table traffic_table(const std::vector<ContextRun>& runs) {
    Table table("bytes that a rank sends for one block",
                {"", "ring", "formula", "all-to-all", "formula", "gather", "formula", "step", "waiting"});
    for (const ContextRun& run : runs)
        table.row({name_of(run), run.sent.ring, run.formula.ring, run.sent.ulysses, run.formula.ulysses,
                   run.sent.gather, run.formula.gather, milliseconds(run.step_s), milliseconds(run.waiting_s)});
    return table;
}

Table memory_table(const std::vector<ContextRun>& runs) {
    Table table("bytes of rank 0, one micro-batch: peak of a step",
                {"", "T", "activations", "one rank's / N", "comm", "workspace"});
    for (const ContextRun& run : runs) {
        const MemoryBytes& bytes = run.peak.kind;
        table.row({name_of(run), run.seq_len, bytes[int(Memory::activations)], run.activations_formula,
                   bytes[int(Memory::comm)], bytes[int(Memory::workspace)]});
    }
    return table;
}

Table error_table(const Comm& world) {
    Table table("error of attention and its gradients against one device in fp32: median of five seeds",
                {"", "ranks", "fp32", "bf16"});
    for (int n = 1; n <= std::min(world.size(), 8); n *= 2) {  // as many as there are heads
        const Comm ranks = world.split([n](int rank) { return rank < n ? 0 : -1; }, "cp");
        if (world.rank() >= n) continue;
        for (const std::string& name : names_of(context_algorithms())) {
            if (n == 1 && name != "ring") continue;
            const auto error = [&](DType dtype) {
                std::vector<double> errors;
                for (uint64_t seed = 1; seed <= 5; ++seed)
                    errors.push_back(attention_error(ranks, {name}, dtype, seed));
                return scientific(median(errors));
            };
            const Cell fp32 = error(DType::f32), bf16 = error(DType::bf16);
            table.row({n == 1 ? "one device" : name, n, fp32, bf16});
        }
    }
    world.barrier().wait();
    return table;
}

void say_layout(const Program& p, const std::string& algorithm, const ContextLayout& layout) {
    say("{} context-parallel x {} data-parallel ranks ({}); {}: {} {}, {} divide heads\n", layout.ranks, p.dp,
        p.world.backend(), algorithm, layout.groups(), layout.gather ? "gather" : "in the ring", layout.ulysses);
}

void print_tables(Program& p, const Comm& ranks, const ContextParallelOptions& chosen) {
    p.release();
    if (!p.compares(ranks.size())) return;
    const TrainOptions& options = p.options;
    std::vector<ContextRun> algorithms, lengths;
    for (const std::string& name : names_of(context_algorithms())) {
        ContextParallelOptions each{.algorithm = name};
        if (name == chosen.algorithm) each = chosen;
        if (possible(name, [&] { context_layout(options.model, options.seq_len, ranks.size(), each); }))
            algorithms.push_back(run_context(options, p.data(), ranks, each));
    }
    say(work_table(algorithms));
    if (options.document_token) say(document_table(algorithms, options));
    say(traffic_table(algorithms));
    TrainOptions longer = options;
    longer.micro_batch = 1;
    for (const char* name : {"zigzag", "gather"})
        for (longer.seq_len = 512; longer.seq_len <= 4096; longer.seq_len *= 2)
            if (longer.seq_len % (2 * ranks.size()) == 0 && p.data().longest_sequence() >= longer.seq_len)
                lengths.push_back(run_context(
                    longer, Dataset(options.data, options.model.vocab, longer.seq_len, options.val_fraction), ranks,
                    {.algorithm = name}));
    say(memory_table(lengths));
    say(error_table(p.world));
}

}  // namespace train70b
