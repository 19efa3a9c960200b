#include "03_zero/tables.h"

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
                 const std::string& name, int steps) {
    TrainOptions o = options.without_files();
    o.micro_batch = o.global_batch / (ranks.size() * zero_options.micro_batches);
    Llama model(o.model, o.llama());
    Trainer trainer(o, model, data);
    Zero zero(model, ranks, zero_options, o.adamw());
    zero.attach(trainer);
    model.materialise(o.seed);
    zero.begin();
    ZeroRun run{.name = name, .options = zero_options};
    for (int step = 1; step <= steps; ++step) {
        synchronize(o.device_kind());
        ranks.barrier().wait();
        ranks.take_stats();
        ledger().reset_peak();
        const double begin = now_seconds();
        model.zero_grads();
        trainer.forward_backward(step);
        zero.finish();
        zero.norm(Which::grad);
        zero.update(1e-4, 1);
        synchronize(o.device_kind());
        run.step_s = now_seconds() - begin;
        const CommStats stats = ranks.take_stats();
        run.waiting_s = stats.waited;
        run.wire_bytes = 0;
        for (const auto& [operation, entry] : stats.operations)
            if (!operation.ends_with(".scalar")) run.wire_bytes += entry.bytes;
    }
    const int64_t N = zero.shard_ranks(), padded = zero.padded_elements();
    run.peak = ledger().peak();
    run.formula = zero_memory(o.model.parameters(), padded, zero.owned_elements(), model.options, zero_options.stage,
                              zero_options.offload, N);
    run.wire_formula =
        zero_wire_bytes(padded * size_of(model.options.dtype), padded * size_of(model.options.grad_dtype),
                        zero_options.stage, zero_options.micro_batches, N);
    run.most_gathered = zero.most_gathered();
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
        text += fmt::format("{:<22}{:>4}{:>15}{:>15}   {}\n", run.name, run.options.micro_batches, run.wire_bytes,
                            run.wire_formula, kFormulas[run.options.stage]);
    return text;
}

std::string prefetch_table(const std::vector<ZeroRun>& runs) {
    std::string text = fmt::format("stage 3: units gathered ahead\n{:<22}{:>12}{:>12}{:>18}{:>16}\n", "", "step",
                                   "waiting", "whole at once", "workspace");
    for (const ZeroRun& run : runs)
        text +=
            fmt::format("{:<22}{:>9.1f} ms{:>9.1f} ms{:>18}{:>16}\n", run.name, run.step_s * 1e3, run.waiting_s * 1e3,
                        fmt::format("{} units", run.most_gathered), run.peak.kind[int(Memory::workspace)]);
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

}  // namespace train70b
