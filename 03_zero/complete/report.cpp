#include "03_zero/complete/report.h"

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

ZeroRun run_zero(const TrainOptions& options, const Dataset& data, const Comm& ranks, const ZeroOptions& zero_options,
                 int64_t micro_batches, const std::string& name, int steps) {
    TrainOptions o = options;
    o.micro_batch = o.global_batch / (ranks.size() * micro_batches);
    FreshRun fresh(o, data);
    Zero zero(fresh.model, ranks, zero_options, AdamW::maker(o.adamw()));
    fresh.trainer.store = &zero;
    fresh.trainer.groups.dp = fresh.trainer.groups.dp_cp = group_of(ranks);
    const MeasuredStep last = fresh.measure(ranks, steps).back();
    const Llama::Options& types = fresh.model.options;
    const int64_t N = zero.shard_ranks(), padded = zero.padded_elements(), stage = zero_options.stage;
    return {.name = name,
            .options = zero_options,
            .micro_batches = micro_batches,
            .peak = last.report.peak,
            .formula = zero_memory(o.model.parameters(), padded, zero.owned_elements(), types, int(stage),
                                   zero_options.offload, N),
            .wire_bytes = last.wire_bytes(),
            .wire_formula = zero_wire_bytes(padded, zero.passed_elements(), types, int(stage), micro_batches, N),
            .most_unsharded = zero.most_unsharded(),
            .step_s = last.report.step_s,
            .waiting_s = last.comm.waited};
}

Table memory_table(const std::vector<ZeroRun>& runs, int64_t N) {
    std::vector<MemoryRow> rows;
    for (const ZeroRun& run : runs) {
        const ZeroMemory& f = run.formula;
        rows.push_back({run.name, run.peak, {f.params, f.grads, f.optimizer, -1, -1, -1, f.host}});
    }
    return memory_table(fmt::format("bytes of rank 0, of {}: peak of a step; below it the formula", N), rows);
}

Table wire_table(const std::vector<ZeroRun>& runs, int64_t N) {
    constexpr const char* kFormulas[] = {"2 G", "G + P", "m G + P", "2 m P + m G"};
    Table table(fmt::format("bytes that a rank of {} sends per step, m micro-batches", N),
                {"", "m", "measured", "formula", Column("x (N-1)/N").left()});
    for (const ZeroRun& run : runs)
        table.row({run.name, run.micro_batches, run.wire_bytes, run.wire_formula, kFormulas[run.options.stage]});
    return table;
}

Table prefetch_table(const std::vector<ZeroRun>& runs) {
    Table table("stage 3: units gathered ahead", {"", "step", "waiting", "unsharded at once", "workspace"});
    for (const ZeroRun& run : runs)
        table.row({run.name, milliseconds(run.step_s), milliseconds(run.waiting_s),
                   fmt::format("{} units", run.most_unsharded), run.peak.kind[int(Memory::workspace)]});
    return table;
}

Table projection_table() {
    const Llama::Options types{.dtype = DType::bf16, .grad_dtype = DType::f32};
    Table table("computed: GB per rank without activations, bf16 weights, fp32 gradients",
                {"", "stage 0", "stage 1", "stage 2", "stage 3", "3, offload all"});
    for (const auto& [model, N] : {std::pair<const char*, int64_t>{"7b", 4}, {"70b", 16}, {"70b", 64}}) {
        const int64_t elements = preset(model).parameters();
        const auto memory = [&, N = N](int stage, Offload offload) {
            return zero_memory(elements, elements, elements / N, types, stage, offload, N);
        };
        std::vector<Cell> cells = {fmt::format("{} on {}", model, N)};
        for (int stage = 0; stage <= 3; ++stage) {
            const ZeroMemory m = memory(stage, Offload::none);
            cells.push_back(fixed(double(m.params + m.grads + m.optimizer) / 1e9, 1));
        }
        cells.push_back(fmt::format("0 (host {:.1f})", double(memory(3, Offload::all).host) / 1e9));
        table.row(cells);
    }
    return table;
}

void print_tables(Program& p, const Comm& ranks, const ZeroOptions& chosen) {
    p.release();
    if (!p.compares(p.dp)) return;
    const auto run = [&](ZeroOptions zero, int64_t micro_batches, int steps, const std::string& name = "") {
        zero.overlap = chosen.overlap;
        return run_zero(p.options, p.data(), ranks, zero, micro_batches,
                        name.empty() ? fmt::format("stage {}", zero.stage) : name, steps);
    };
    const int N = ranks.size();
    const int64_t ahead = chosen.prefetch;
    std::vector<ZeroRun> memory, wire, prefetch;
    for (const int stage : {0, 1, 2, 3}) memory.push_back(run({.stage = stage, .prefetch = ahead}, 1, 2));
    memory.push_back(run({.offload = Offload::optimizer, .prefetch = ahead}, 1, 2, "3, offload optimizer"));
    memory.push_back(run({.offload = Offload::all, .prefetch = ahead}, 1, 2, "3, offload all"));
    say(memory_table(memory, N));
    for (const int64_t m : {1, 2, 4})
        if (p.options.global_batch % (N * m) == 0)
            for (const int stage : {0, 1, 2, 3}) wire.push_back(run({.stage = stage, .prefetch = ahead}, m, 1));
    say(wire_table(wire, N));
    for (const int64_t units : {0, 1, 2})
        prefetch.push_back(run({.prefetch = units}, 1, 3, fmt::format("--prefetch {}", units)));
    say(prefetch_table(prefetch));
    say(projection_table());
}

}  // namespace train70b
