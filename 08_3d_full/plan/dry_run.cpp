#include "08_3d_full/plan/dry_run.h"

#include <algorithm>

#include "08_3d_full/checkpoint/cost.h"
#include "08_3d_full/complete/compose.h"
#include "08_3d_full/plan/record.h"
#include "08_3d_full/plan/simulate_check.h"

namespace train70b {

static bool smaller(const RankMemory& a, const RankMemory& b) { return a.peak.total < b.peak.total; }

Workload workload_of(const TrainOptions& options) {
    return {options.llama(), options.model, options.seq_len, options.micro_batch, options.global_batch};
}

RankMemory rank_formula(const TrainOptions& options, const ParallelConfig& config, int64_t rank) {
    return {state_memory(workload_of(options), config, rank), rank, {}};
}

void run_meta_step(const TrainOptions& options, const nlohmann::ordered_json& flags, const Dataset& data,
                   const ParallelConfig& config, int64_t rank, const std::function<void(Trainer&)>& before,
                   const std::function<void(const Trainer&)>& after) {
    TrainOptions o = options;
    o.eval_every = o.sample_every = 0;
    o.step_sizes = nullptr;  // the largest step
    o.dry_run = true;
    o.steps = 1;
    for (const int64_t bytes : ledger().now()) CHECK(bytes == 0, "{} bytes are still booked", bytes);
    const Comm world = make_comm(make_fake_backend(int(rank), int(config.mesh.size())), {});
    Llama model(o.model, o.llama(), stage_of(config, o.model, rank));
    Trainer trainer(o, model, data);
    const RunOutputs outputs(trainer, flags);
    const Quiet no_progress;
    CommRuntime runtime(world);
    const Composed composed(model, trainer, o, config, world);
    trainer.runtime = &runtime;
    before(trainer);
    trainer.allocate();
    trainer.run();
    world.finish();
    after(trainer);
}

RankMemory book_rank(const TrainOptions& options, const nlohmann::ordered_json& flags, const Dataset& data,
                     const ParallelConfig& config, int64_t rank) {
    RankMemory memory = rank_formula(options, config, rank);
    run_meta_step(
        options, flags, data, config, rank, [](Trainer&) {},
        [&](const Trainer& trainer) { memory.peak = trainer.peak(); });
    return memory;
}

// One rank's peak next to the formula.
static Table rank_table(const RankMemory& memory, const TrainOptions& options) {
    Table table(fmt::format("rank {}: bytes, peak of a step", memory.rank),
                {"", "booked", "formula", Column("").left()});
    const MemoryBytes formula = {memory.params, memory.grads, memory.optimizer, -1, -1, -1, memory.host, memory.disk};
    for (int kind = 0; kind < kMemoryKinds; ++kind) {
        const int64_t booked = memory.peak.kind[kind];
        if (kind >= kDeviceMemoryKinds && booked == 0) continue;
        table.row({kMemoryNames[kind], booked, formula[kind] < 0 ? Cell() : Cell(formula[kind])});
    }
    table.row({"total", memory.peak.total, "", "the peak of their sum"});
    if (options.dry_run)
        table.note(
            "(a dry run books what every device would hold; a device's own workspace, as cuBLASLt's 32 MiB, comes "
            "on top)");
    return table;
}

// One line for equal ranks, with what makes the largest one large.
static Table ranks_table(const std::vector<RankMemory>& ranks, const ParallelConfig& config) {
    const RankMemory& largest = *std::max_element(ranks.begin(), ranks.end(), smaller);
    const RankMemory& smallest = *std::min_element(ranks.begin(), ranks.end(), smaller);
    const bool giga = largest.peak.total >= 1e9;
    const char* unit = giga ? "GB" : "MB";
    const auto shown = [giga](int64_t bytes) { return double(bytes) / (giga ? 1e9 : 1e6); };
    const auto stage = [&](const RankMemory& memory) { return config.mesh.coordinate(memory.rank).pp; };

    std::vector<Column> columns = {"ranks"};
    columns.insert(columns.end(), kMemoryNames.begin(), kMemoryNames.begin() + kDeviceMemoryKinds);
    columns.insert(columns.end(), {"total", "host"});
    Table table(fmt::format("{}: {} of every rank, peak of a step", config.mesh.text(), unit), columns);
    const auto figures = [&](const RankMemory& memory) {
        std::vector<Cell> cells;
        for (int kind = 0; kind < kDeviceMemoryKinds; ++kind)
            cells.push_back(fmt::format("{:.2f}", shown(memory.peak.kind[kind])));
        cells.push_back(fmt::format("{:.2f}", shown(memory.peak.total)));
        cells.push_back(fmt::format("{:.2f}", shown(memory.peak.kind[int(Memory::host)])));
        return cells;
    };
    for (size_t i = 0, end; i < ranks.size(); i = end) {  // neighbours of one stage with the same figures: one line
        std::vector<Cell> row_cells = figures(ranks[i]);
        for (end = i + 1; end < ranks.size() && stage(ranks[end]) == stage(ranks[i]); ++end)
            if (figures(ranks[end]) != row_cells) break;
        const std::string last = end == i + 1 ? "" : fmt::format("-{}", ranks[end - 1].rank);
        row_cells.insert(row_cells.begin(), fmt::format("{}{} (stage {})", ranks[i].rank, last, stage(ranks[i])));
        table.row(row_cells);
    }
    if (largest.peak.total == smallest.peak.total) {
        table.note("all ranks hold equally much");
        return table;
    }
    const auto more = [&](int kind) { return largest.peak.kind[kind] - smallest.peak.kind[kind]; };
    int why = 0;
    for (int kind = 0; kind < kDeviceMemoryKinds; ++kind)
        if (more(kind) > more(why)) why = kind;
    table.note(
        fmt::format("largest: rank {}, stage {} of {}; of its {:.2f} {} more than rank {}, most are {} ({:+.2f} {})",
                    largest.rank, stage(largest), config.mesh.pp, shown(largest.peak.total - smallest.peak.total), unit,
                    smallest.rank, kMemoryNames[why], shown(more(why)), unit));
    return table;
}

void print_dry_run(Program& p, ParallelConfig config, SimulateOptions& simulate) {
    const TrainOptions& options = p.options;
    validate(config, options, p.world.size());
    check_evaluation(options, p.data());
    const int64_t only = p.flags.given("--fake-rank") && !simulate.asked() ? p.comm.fake_rank : -1;
    say("{}: {} parameters; a step is {} sequences of {}, {} at a time\n{}", options.model.name,
        human_count(double(options.model.parameters())), options.global_batch, options.seq_len, options.micro_batch,
        to_string(config.mesh));
    if (options.writes_files()) book_rank(options, p.flags.values(), p.data(), config, p.comm.fake_rank);
    const Recording recording = record_step(options, p.data(), config, {.only = only});
    std::vector<MemoryPeak> peaks;
    for (const Sequence& sequence : recording.sequences) peaks.push_back(peak_of(sequence));
    std::vector<RankMemory> ranks;
    for (int64_t rank = 0; rank < config.mesh.size(); ++rank) {
        if (only >= 0 && rank != only) continue;
        ranks.push_back(rank_formula(options, config, rank));
        ranks.back().peak = peaks[size_t(recording.class_of[size_t(rank)])];
    }
    say(rank_table(*std::max_element(ranks.begin(), ranks.end(), smaller), options));
    if (only < 0) {
        say(ranks_table(ranks, config));
        say("\n{}\n", check_calls(recording));
    }
    say(checkpoint_table(checkpoint_cost(options, config)));
    if (simulate.asked()) print_simulation(p, config, simulate, recording);
}

void print_memory(Program& p, const ParallelConfig& config, int64_t snapshot_bytes) {
    if (!p.tables || p.options.steps == 0) return;
    RankMemory memory = rank_formula(p.options, config, p.world.rank());
    memory.peak = p.trainer().peak();
    memory.host += snapshot_bytes;
    say(rank_table(memory, p.options));
}

}  // namespace train70b
