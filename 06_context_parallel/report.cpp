#include "06_context_parallel/report.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "01_single_gpu/core/profile.h"
#include "01_single_gpu/core/random.h"
#include "01_single_gpu/core/registry.h"
#include "02_data_parallel/runtime/measure.h"
#include "06_context_parallel/flags.h"

namespace train70b {

namespace {
std::string name_of(const ContextRun& run) {
    return run.algorithm +
           (run.algorithm == "hybrid" ? fmt::format(" {} x {}", run.layout.ulysses, run.layout.groups()) : "");
}
}  // namespace

double attention_pairs(const ContextLayout& layout, int64_t rank, int64_t seq_len) {
    const double G = double(layout.groups()), c = double(seq_len) / (G * double(layout.chunks));
    if (layout.chunks == 2) return c * (c + 1) + c * c + 2 * (G - 1) * c * c;
    return c * (c + 1) / 2 + double(rank / layout.ulysses) * c * c;
}

ContextTraffic context_traffic(const LlamaConfig& c, const ContextLayout& layout, int64_t batch, int64_t seq_len,
                               DType dtype, Recompute recompute) {
    const int64_t U = layout.ulysses, G = layout.groups(), a = size_of(dtype), D = c.head_dim();
    const int64_t rows = batch * seq_len / layout.ranks, kv_heads = std::max(c.kv_heads, U);  // copied up to U
    const int64_t forwards = recompute == Recompute::none || recompute == Recompute::pointwise ? 1 : 2;
    ContextTraffic traffic;
    const int64_t block = 2 * rows * U * (kv_heads / U) * D;  // elements of k and v in one message
    const int64_t wide = size_of(stats_dtype(dtype));         // of its gradients
    if (layout.gather)
        traffic.gather = (G - 1) * block * (a * (forwards + 1) + wide);
    else if (G > 1)
        traffic.ring = (G - 1) * block * a * (forwards + 1) + G * block * wide;
    const int64_t in = rows * (c.heads + 2 * kv_heads) * D * a, out = rows * c.heads * D * a;
    if (U > 1)
        traffic.ulysses = ((forwards + 1) * (in + out) + (recompute == Recompute::selective ? 0 : out)) * (U - 1) / U;
    return traffic;
}

ContextRun run_context(const TrainOptions& options, const Dataset& data, const Comm& ranks,
                       const ContextParallelOptions& context_options) {
    TrainOptions o = options.without_files();
    o.global_batch = o.micro_batch;
    ContextRun run{.algorithm = context_options.algorithm,
                   .layout = context_layout(o.model, o.seq_len, ranks.size(), context_options),
                   .seq_len = o.seq_len};
    const MemoryBytes before = ledger().now();
    Llama model(o.model, o.llama());
    Trainer trainer(o, model, data);
    apply_context_parallel(model, ranks, run.layout);
    trainer.groups.dp_cp =
        group_of(ranks);  // for the loss; gradients are not summed: attention is what is measured here
    trainer.batches.tokens = run.layout.tokens_of(ranks.rank(), o.seq_len);
    trainer.allocate();
    measure_steps(trainer, ranks, 1);
    const ProfileScope scope({.sums_on = true, .wait_for = o.device_kind()});
    MeasuredStep step = measure_steps(trainer, ranks, 1, 2).front();
    run.step_s = step.report.step_s;
    run.waiting_s = step.comm.waited;
    auto& operations = step.comm.operations;
    run.sent = {operations[ranks.name() + "_ring.send_recv"].bytes / o.model.layers,
                operations[ranks.name() + "_ulysses.all_to_all"].bytes / o.model.layers,
                (operations[ranks.name() + "_gather.all_gather"].bytes +
                 operations[ranks.name() + "_gather.reduce_scatter"].bytes) /
                    o.model.layers};
    run.formula =
        context_traffic(o.model, run.layout, o.micro_batch, o.seq_len, model.options.dtype, model.options.recompute);
    double flops = 0, cpu_s = 0;
    for (const char* op : {"attention", "attention_backward"}) {
        flops += profile().sums[op].flops;
        cpu_s += profile().sums[op].cpu_seconds;
    }
    run.flops = ranks.gather({flops});
    run.cpu_s = ranks.gather({cpu_s});
    run.peak = step.report.peak;
    for (int i = 0; i < kMemoryKinds; ++i) run.peak.kind[size_t(i)] -= before[size_t(i)];
    run.activations_formula =
        activation_formula(o.model, o.micro_batch, o.seq_len, model.options.dtype, model.options.recompute).total /
        ranks.size();
    if (run.layout.gather && ranks.size() > 1)
        run.gather_formula = gather_memory({.batch = o.micro_batch,
                                            .chunk_len = o.seq_len / run.layout.granularity(),
                                            .chunks = run.layout.chunks,
                                            .heads = o.model.heads,
                                            .kv_heads = o.model.kv_heads,
                                            .head_dim = o.model.head_dim()},
                                           ranks.size(), ranks.rank(), model.options.dtype);
    return run;
}

double attention_error(const Comm& ranks, const ContextParallelOptions& options, DType dtype, uint64_t seed) {
    LlamaConfig c;
    c.heads = 8, c.kv_heads = 2, c.hidden = 8 * 16;
    const int64_t T = 128, B = 2, D = c.head_dim();
    const ContextLayout layout = context_layout(c, T, ranks.size(), options);
    // Of the whole batch, in the order of sequences: q, k, v and the gradient of the output.
    const auto whole = [&](int64_t heads, uint64_t key, DType type) {
        Tensor x({B * T, heads * D}, DType::f32, Device::cpu, Memory::workspace);
        fill_normal(x, random_bits(seed, key), {.cols = x.size(), .global_cols = x.size()}, 1.0f);
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
                Tensor place = rows.row_slice(at, at + count);
                copy(place, all.row_slice(b * T + begin, b * T + begin + count));
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
        const auto& slot = model.blocks[0].attention;
        return slot ? slot(tape, qkv, batch) : one_device_attention(tape, qkv, batch, D);
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

// ---- as text --------------------------------------------------------------------------------------------------------

std::string work_table(const std::vector<ContextRun>& runs) {
    std::string text = fmt::format(
        "attention of one step, rank by rank: GFLOP counted, CPU ms measured\n{:<16}{:>8}   / mean\n", "", "slowest");
    for (const ContextRun& run : runs) {
        const auto row = [&](const char* what, const std::vector<double>& values, double unit) {
            double sum = 0, most = 0;
            std::string list;
            for (const double value : values) {
                sum += value, most = std::max(most, value);
                list += fmt::format("{:>9.3f}", value / unit);
            }
            text += fmt::format("{:<16}{:>8.2f}   {:<7}{}\n", what == std::string("GFLOP") ? name_of(run) : "",
                                most * double(values.size()) / sum, what, list);
        };
        row("GFLOP", run.flops, 1e9);
        row("CPU ms", run.cpu_s, 1e-3);
    }
    return text;
}

std::string traffic_table(const std::vector<ContextRun>& runs) {
    std::string text =
        fmt::format("bytes that a rank sends for one block\n{:<16}{:>12}{:>12}{:>12}{:>12}{:>12}{:>12}{:>11}{:>11}\n",
                    "", "ring", "formula", "all-to-all", "formula", "gather", "formula", "step", "waiting");
    for (const ContextRun& run : runs)
        text += fmt::format("{:<16}{:>12}{:>12}{:>12}{:>12}{:>12}{:>12}{:>8.1f} ms{:>8.1f} ms\n", name_of(run),
                            run.sent.ring, run.formula.ring, run.sent.ulysses, run.formula.ulysses, run.sent.gather,
                            run.formula.gather, 1e3 * run.step_s, 1e3 * run.waiting_s);
    return text;
}

std::string memory_table(const std::vector<ContextRun>& runs) {
    std::string text =
        fmt::format("bytes of rank 0, one micro-batch: peak of a step\n{:<16}{:>8}{:>14}{:>18}{:>14}{:>14}\n", "", "T",
                    "activations", "one rank's / N", "comm", "workspace");
    for (const ContextRun& run : runs)
        text += fmt::format("{:<16}{:>8}{:>14}{:>18}{:>14}{:>14}\n", name_of(run), run.seq_len,
                            run.peak.kind[int(Memory::activations)], run.activations_formula,
                            run.peak.kind[int(Memory::comm)], run.peak.kind[int(Memory::workspace)]);
    return text;
}

std::string error_table(const Comm& world) {
    std::string text = fmt::format(
        "error of attention and its gradients against one device in fp32: median of five "
        "seeds\n{:<16}{:>6}{:>12}{:>12}\n",
        "", "ranks", "fp32", "bf16");
    for (int n = 1; n <= std::min(world.size(), 8); n *= 2) {  // as many as there are heads
        const Comm ranks = world.split([n](int rank) { return rank < n ? 0 : -1; }, "cp");
        if (world.rank() >= n) continue;
        for (const std::string& name : names_of(context_algorithms())) {
            if (n == 1 && name != "ring") continue;
            text += fmt::format("{:<16}{:>6}", n == 1 ? "one device" : name, n);
            for (const DType dtype : {DType::f32, DType::bf16}) {
                std::vector<double> errors;
                for (uint64_t seed = 1; seed <= 5; ++seed)
                    errors.push_back(attention_error(ranks, {name}, dtype, seed));
                std::sort(errors.begin(), errors.end());
                text += fmt::format("{:>12.2e}", errors[2]);
            }
            text += "\n";
        }
    }
    world.barrier().wait();
    return text;
}

std::string long_context_table() {
    std::string text = fmt::format(
        "dry run: one sequence in bf16, zigzag, peak GB of one rank's activations + comm + workspace, without "
        "parameters\n"
        "{:<10}{:>10}{:>8}{:>16}{:>20}\n",
        "", "tokens", "ranks", "no recompute", "full recompute");
    for (const auto& [name, tokens, ranks] : {std::tuple<const char*, int64_t, int>{"8b", 4096, 1},
                                              {"8b", 131072, 1},
                                              {"8b", 131072, 8},
                                              {"8b", 262144, 8},
                                              {"8b", 1048576, 32},
                                              {"8b", 1048576, 128},
                                              {"70b", 131072, 8},
                                              {"70b", 131072, 32},
                                              {"70b", 1048576, 128}}) {
        const Comm fake = make_comm(make_fake_backend(0, ranks), {});
        text += fmt::format("{:<10}{:>10}{:>8}", name, tokens, ranks);
        for (const Recompute recompute : {Recompute::none, Recompute::full}) {
            const LlamaConfig config = preset(name);
            Llama model(config, {.dtype = DType::bf16, .device = Device::meta, .recompute = recompute});
            const ContextLayout layout = context_layout(config, tokens, ranks, {"zigzag"});
            apply_context_parallel(model, fake, layout);
            model.materialize(1);
            const int64_t rows = tokens / ranks;
            const auto ids = [&] { return Tensor({rows}, DType::i32, Device::meta); };
            ledger().reset_peak();
            const int64_t held = ledger().total();
            Tape tape;
            model.forward(tape, {1, rows, ids(), ids(), ids(), 1.0 / double(tokens)});
            tape.backward();
            text += fmt::format("{:>{}.1f}", double(ledger().peak().total - held) / 1e9,
                                recompute == Recompute::none ? 16 : 20);
        }
        text += "\n";
    }
    return text;
}

void print_tables(Program& p, const Comm& ranks, const ContextParallelOptions& chosen) {
    const TrainOptions& options = p.options;
    std::vector<ContextRun> algorithms, lengths;
    for (const std::string& name : names_of(context_algorithms())) {
        ContextParallelOptions each{.algorithm = name};
        if (name == chosen.algorithm) each = chosen;
        try {
            context_layout(options.model, options.seq_len, ranks.size(), each);
        } catch (const UsageError& error) {
            say("{} left out: {}\n", name, error.what());
            continue;
        }
        algorithms.push_back(run_context(options, p.data(), ranks, each));
    }
    say("\n{}\n{}", work_table(algorithms), traffic_table(algorithms));
    TrainOptions longer = options;
    longer.micro_batch = 1;
    for (const char* name : {"zigzag", "gather"})
        for (longer.seq_len = 512; longer.seq_len <= 4096; longer.seq_len *= 2)
            if (longer.seq_len % (2 * ranks.size()) == 0 && p.data().train_tokens() > longer.seq_len)
                lengths.push_back(run_context(
                    longer, Dataset(options.data, options.model.vocab, longer.seq_len, options.val_fraction), ranks,
                    {.algorithm = name}));
    say("\n{}\n{}", memory_table(lengths), error_table(p.world));
    if (this_rank == 0) say("\n{}", long_context_table());
    p.world.barrier().wait();
}

}  // namespace train70b
