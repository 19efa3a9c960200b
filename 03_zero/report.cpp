#include "03_zero/report.h"

#include "02_data_parallel/runtime/measure.h"

namespace train70b {

ZeroMemory zero_memory(int64_t elements, int64_t padded, int64_t owned, const Llama::Options& types, int stage,
                       Offload offload, int64_t N) {
    const int64_t a = size_of(types.dtype), g = size_of(types.grad_dtype);
    const int64_t o = AdamW::state_bytes(types.dtype);
    // Padding is part of the buffers of parameters and gradients; the optimizer keeps states of real elements only.
    ZeroMemory bytes{.params = a * (stage == 3 ? padded / N : padded),
                     .grads = g * (stage >= 2 ? padded / N : padded),
                     .optimizer = o * (stage >= 1 ? owned : elements)};
    if (offload != Offload::none) {
        bytes.host = (a + g) * (padded / N) + bytes.optimizer;  // AdamW works on copies of the shards there
        bytes.optimizer = 0;
    }
    if (offload == Offload::all) bytes.params = bytes.grads = 0;
    return bytes;
}

int64_t zero_wire_bytes(int64_t params, int64_t grads, int stage, int64_t m, int64_t N) {
    const int64_t all = stage == 0   ? 2 * grads
                        : stage == 1 ? grads + params
                        : stage == 2 ? m * grads + params
                                     : 2 * m * params + m * grads;
    return all * (N - 1) / N;
}

ZeroRun run_zero(const TrainOptions& options, const Dataset& data, const Comm& ranks, const ZeroOptions& zero_options,
                 int64_t micro_batches, const std::string& name, int steps) {
    TrainOptions o = options.without_files();
    o.micro_batch = o.global_batch / (ranks.size() * micro_batches);
    Llama model(o.model, o.llama());
    Trainer trainer(o, model, data);
    Zero zero(model, ranks, zero_options, AdamW::maker(o.adamw()));
    trainer.store = &zero;
    trainer.groups.dp = trainer.groups.dp_cp = group_of(ranks);
    trainer.allocate();
    const MeasuredStep last = measure_steps(trainer, ranks, steps).back();
    ZeroRun run{.name = name, .options = zero_options, .micro_batches = micro_batches};
    run.step_s = last.report.step_s;
    run.waiting_s = last.comm.waited;
    run.wire_bytes = last.wire_bytes();
    const int64_t N = zero.shard_ranks(), padded = zero.padded_elements();
    run.peak = last.report.peak;
    run.formula = zero_memory(o.model.parameters(), padded, zero.owned_elements(), model.options, zero_options.stage,
                              zero_options.offload, N);
    run.wire_formula =
        zero_wire_bytes(padded * size_of(model.options.dtype), padded * size_of(model.options.grad_dtype),
                        zero_options.stage, micro_batches, N);
    run.most_unsharded = zero.most_unsharded();
    return run;
}

std::string memory_table(const std::vector<ZeroRun>& runs, int64_t N) {
    std::string text = fmt::format("bytes of rank 0, of {}: peak of a step; below it the formula\n{:<22}", N, "");
    for (const char* kind : kMemoryNames) text += fmt::format("{:>13}", kind);
    text += fmt::format("{:>13}\n", "total");
    for (const ZeroRun& run : runs) {
        text += fmt::format("{:<22}", run.name);
        for (const int64_t bytes : run.peak.kind) text += fmt::format("{:>13}", bytes);
        text += fmt::format("{:>13}\n{:<22}", run.peak.total, "");
        const ZeroMemory& f = run.formula;
        text += fmt::format("{:>13}{:>13}{:>13}{:>13}{:>13}{:>13}{:>13}\n", f.params, f.grads, f.optimizer, "", "", "",
                            f.host);
    }
    return text;
}

std::string wire_table(const std::vector<ZeroRun>& runs, int64_t N) {
    constexpr const char* kFormulas[] = {"2 G", "G + P", "m G + P", "2 m P + m G"};
    std::string text =
        fmt::format("bytes that a rank of {} sends per step, m micro-batches\n{:<22}{:>4}{:>15}{:>15}   x (N-1)/N\n", N,
                    "", "m", "measured", "formula");
    for (const ZeroRun& run : runs)
        text += fmt::format("{:<22}{:>4}{:>15}{:>15}   {}\n", run.name, run.micro_batches, run.wire_bytes,
                            run.wire_formula, kFormulas[run.options.stage]);
    return text;
}

std::string prefetch_table(const std::vector<ZeroRun>& runs) {
    std::string text = fmt::format("stage 3: units gathered ahead\n{:<22}{:>12}{:>12}{:>18}{:>16}\n", "", "step",
                                   "waiting", "whole at once", "workspace");
    for (const ZeroRun& run : runs)
        text +=
            fmt::format("{:<22}{:>9.1f} ms{:>9.1f} ms{:>18}{:>16}\n", run.name, run.step_s * 1e3, run.waiting_s * 1e3,
                        fmt::format("{} units", run.most_unsharded), run.peak.kind[int(Memory::workspace)]);
    return text;
}

std::string projection_table() {
    const Llama::Options types{.dtype = DType::bf16, .grad_dtype = DType::f32};
    std::string text =
        fmt::format("computed: GB per rank without activations, bf16 weights, fp32 gradients\n{:<18}", "");
    constexpr const char* kNames[] = {"stage 0", "stage 1", "stage 2", "stage 3", "3, offload all"};
    for (const char* name : kNames) text += fmt::format("{:>16}", name);
    text += "\n";
    for (const auto& [model, N] : {std::pair<const char*, int64_t>{"7b", 4}, {"70b", 16}, {"70b", 64}}) {
        const int64_t elements = preset(model).parameters();
        text += fmt::format("{:<18}", fmt::format("{} on {}", model, N));
        for (int i = 0; i < 5; ++i) {
            const ZeroMemory m = zero_memory(elements, elements, elements / N, types, std::min(i, 3),
                                             i == 4 ? Offload::all : Offload::none, N);
            const int64_t device = m.params + m.grads + m.optimizer;
            text += fmt::format("{:>16}", i == 4 ? fmt::format("0 (host {:.1f})", double(m.host) / 1e9)
                                                 : fmt::format("{:.1f}", double(device) / 1e9));
        }
        text += "\n";
    }
    return text;
}

void print_tables(Program& p, const Comm& ranks, const ZeroOptions& chosen) {
    ZeroOptions zero = chosen;
    zero.hybrid_shard = 0;
    zero.offload = Offload::none;
    zero.bucket_mb = -1;
    const auto run = [&](int64_t micro_batches, const std::string& name, int steps = 2) {
        return run_zero(p.options, p.data(), ranks, zero, micro_batches, name, steps);
    };
    std::vector<ZeroRun> memory, wire, prefetch;
    for (zero.stage = 0; zero.stage <= 3; ++zero.stage) memory.push_back(run(1, fmt::format("stage {}", zero.stage)));
    zero.stage = 3;
    zero.offload = Offload::optimizer;
    memory.push_back(run(1, "3, offload optimizer"));
    zero.offload = Offload::all;
    memory.push_back(run(1, "3, offload all"));
    zero.offload = Offload::none;
    say("\n{}", memory_table(memory, ranks.size()));

    for (const int64_t m : {1, 2, 4}) {
        if (p.options.global_batch % (ranks.size() * m) != 0) continue;
        for (zero.stage = 0; zero.stage <= 3; ++zero.stage)
            wire.push_back(run(m, fmt::format("stage {}", zero.stage), 1));
    }
    say("\n{}", wire_table(wire, ranks.size()));

    zero.stage = 3;
    for (zero.prefetch = 0; zero.prefetch <= 2; ++zero.prefetch)
        prefetch.push_back(run(1, fmt::format("--prefetch {}", zero.prefetch), 3));
    say("\n{}\n{}", prefetch_table(prefetch), projection_table());
}

}  // namespace train70b
