#include "03_zero/complete/training_report.h"

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
        (offload == Offload::nvme ? bytes.disk : bytes.host) = bytes.optimizer;
        bytes.host += (a + g) * (padded / N);  // AdamW works on copies of the shards there
        bytes.optimizer = 0;
    }
    if (offload == Offload::all) bytes.params = bytes.grads = 0;
    return bytes;
}

int64_t zero_wire_bytes(int64_t padded, int64_t passed, const Llama::Options& types, int stage, int64_t m, int64_t N) {
    const int64_t a = size_of(types.dtype), g = size_of(types.grad_dtype);
    const int64_t all = stage == 0   ? 2 * padded * g
                        : stage == 1 ? padded * g + padded * a
                        : stage == 2 ? m * passed * g + padded * a
                                     : 2 * m * passed * a + m * passed * g;
    return all * (N - 1) / N;
}

void say_layout(const Program& p, const Zero& store, const ZeroOptions& options) {
    say("ZeRO stage {} over {} of {} data-parallel ranks ({}); {} elements of padding\n", options.stage,
        store.shard_ranks(), p.dp, p.world.backend(), store.padded_elements() - p.options.model.parameters());
}

void print_tables(const Program& p, const Zero& store, const ZeroOptions& options) {
    if (!p.prints_tables()) return;
    const Llama::Options& types = p.model().options;
    const StepReport& step = p.last_step();
    const int64_t N = store.shard_ranks(), padded = store.padded_elements(), m = p.options.accumulation(p.dp);
    const ZeroMemory f = zero_memory(p.options.model.parameters(), padded, store.owned_elements(), types, options.stage,
                                     options.offload, N);
    std::string name = fmt::format("stage {}", options.stage);
    if (options.offload != Offload::none) name += ", offload " + kOffloadNames[size_t(options.offload)];
    say(memory_table(
        fmt::format("bytes of rank {}, of {}: peak of the last step; below it the formula", p.world.rank(), p.dp),
        {{name, step.peak, {f.params, f.grads, f.optimizer, -1, -1, -1, f.host, f.disk}}}));
    constexpr const char* kFormulas[] = {"2 G", "G + P", "m G + P", "2 m P + m G"};
    Table wire(fmt::format("bytes that a rank of {} sends per step, m micro-batches", p.dp),
               {"", "m", "measured", "formula", Column("x (N-1)/N").left(), "unsharded at once"});
    const bool hybrid = N < p.dp;  // the formula knows no replicas
    wire.row({name, m, sent_bytes(step),
              hybrid ? Cell("-") : zero_wire_bytes(padded, store.passed_elements(), types, options.stage, m, N),
              kFormulas[options.stage], fmt::format("{} units", store.most_unsharded())});
    say(wire);
}

}  // namespace train70b
