#include "08_3d_full/dry_run.h"

#include <algorithm>

#include "02_data_parallel/runtime/launch.h"
#include "08_3d_full/checkpoint_cost.h"
#include "08_3d_full/compose.h"

namespace train70b {

RankMemory rank_formula(const TrainOptions& options, const ParallelConfig& config, int64_t rank) {
    const LlamaConfig& c = options.model;
    const Mesh::Coordinates at = config.mesh.coordinate(rank);
    const int64_t tp = config.mesh.tp, all = config.mesh.dp * config.mesh.cp;
    const int64_t shards = config.zero.hybrid_shard > 0 ? config.zero.hybrid_shard : all;
    const int64_t shard = (at.dp * config.mesh.cp + at.cp) % shards;
    const Llama::Options types = options.llama();
    const int64_t a = size_of(types.dtype), g = size_of(types.grad_dtype), stage = config.zero.stage;
    // Elements of a rank's units: full norms; products divided by tp, with at least one key/value head; vocabulary
    // rounded up.
    const int64_t rows = (c.vocab + tp - 1) / tp, block = c.block_parameters(tp);
    const Stage here = stage_of(config, c, rank);
    std::vector<int64_t> units;
    if (here.embedding || (c.tied && here.head)) units.push_back(rows * c.hidden);
    for (const Chunk& chunk : here.chunks)
        units.insert(units.end(), size_t(chunk.end_layer - chunk.first_layer), block);
    if (here.head) units.push_back(c.hidden + (c.tied ? 0 : rows * c.hidden));

    RankMemory memory{.rank = rank};
    int64_t owned = 0, padded_shards = 0;
    for (const int64_t size : units) {
        const int64_t part = (size + shards - 1) / shards, padded = part * shards;
        memory.params += a * (stage == 3 ? part : padded);
        memory.grads += g * (stage >= 2 ? part : padded);
        owned += stage == 0 ? size : std::clamp<int64_t>(size - shard * part, 0, part);
        padded_shards += part;
    }
    memory.optimizer = AdamW::state_bytes(types.dtype) * owned;
    if (config.zero.offload != Offload::none) {
        memory.host = memory.optimizer + (a + g) * padded_shards;
        memory.optimizer = 0;
    }
    if (config.zero.offload == Offload::all) memory.params = memory.grads = 0;
    // No formula for 8-bit moments: their scales depend on where shards divide parameters.
    if (config.optimizer == "adamw8bit") (config.zero.offload == Offload::none ? memory.optimizer : memory.host) = -1;
    return memory;
}

RankMemory book_rank(const TrainOptions& options, const nlohmann::ordered_json& flags, const Dataset& data,
                     const ParallelConfig& config, int64_t rank) {
    TrainOptions o = options;
    o.eval_every = o.sample_every = 0;
    o.batch_ramp = o.seq_ramp = {};  // the largest step
    o.dry_run = true;
    o.steps = 1;
    for (const int64_t bytes : ledger().now()) CHECK(bytes == 0, "{} bytes are still booked", bytes);
    RankMemory memory = rank_formula(options, config, rank);
    {
        const Comm world = make_comm(make_fake_backend(int(rank), int(config.mesh.size())), {});
        Llama model(o.model, o.llama(), stage_of(config, o.model, rank));
        Trainer trainer(o, model, data, flags);
        const Quiet no_progress;
        CommRuntime runtime(world);
        const Composed composed(model, trainer, o, config, world);
        trainer.runtime = &runtime;
        trainer.allocate();
        trainer.run();
        memory.peak = trainer.peak();
        world.finish();
    }
    return memory;
}

Table rank_table(const RankMemory& memory, const TrainOptions& options) {
    Table table(fmt::format("rank {}: bytes, peak of a step", memory.rank),
                {"", "booked", "formula", Column("").left()});
    const MemoryBytes formula = {memory.params, memory.grads, memory.optimizer, -1, -1, -1, memory.host};
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

Table ranks_table(const std::vector<RankMemory>& ranks, const ParallelConfig& config) {
    const auto smaller = [](const RankMemory& a, const RankMemory& b) { return a.peak.total < b.peak.total; };
    const RankMemory& most = *std::max_element(ranks.begin(), ranks.end(), smaller);
    const RankMemory& least = *std::min_element(ranks.begin(), ranks.end(), smaller);
    const bool giga = most.peak.total >= 1e9;
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
        std::vector<Cell> mine = figures(ranks[i]);
        for (end = i + 1; end < ranks.size() && stage(ranks[end]) == stage(ranks[i]); ++end)
            if (figures(ranks[end]) != mine) break;
        const std::string last = end == i + 1 ? "" : fmt::format("-{}", ranks[end - 1].rank);
        mine.insert(mine.begin(), fmt::format("{}{} (stage {})", ranks[i].rank, last, stage(ranks[i])));
        table.row(mine);
    }
    if (most.peak.total == least.peak.total) {
        table.note("all ranks hold equally much");
        return table;
    }
    const auto more = [&](int kind) { return most.peak.kind[kind] - least.peak.kind[kind]; };
    int why = 0;
    for (int kind = 0; kind < kDeviceMemoryKinds; ++kind)
        if (more(kind) > more(why)) why = kind;
    table.note(
        fmt::format("largest: rank {}, stage {} of {}; of its {:.2f} {} more than rank {}, most are {} ({:+.2f} {})",
                    most.rank, stage(most), config.mesh.pp, shown(most.peak.total - least.peak.total), unit, least.rank,
                    kMemoryNames[why], shown(more(why)), unit));
    return table;
}

void add_dry_run_flag(Flags& flags, TrainOptions& options) {
    flags.group("Output");
    flags.add_flag("--dry-run", options.dry_run,
                   "book the memory of one step of all simulated ranks, or of --fake-rank; compute nothing");
}

void print_dry_run(Program& p, ParallelConfig config) {
    const TrainOptions& options = p.options;
    if (p.comm.backend != "fake") usage_error("--dry-run: needs simulated ranks (try --comm fake --fake-world N)");
    validate(config, options, p.world.size());
    std::optional<int64_t> only;
    if (p.flags.given("--fake-rank")) only = p.comm.fake_rank;
    say("{}: {} parameters; a step is {} sequences of {}, {} at a time\n{}", options.model.name,
        human_count(double(options.model.parameters())), options.global_batch, options.seq_len, options.micro_batch,
        to_string(config.mesh));
    const int64_t with_files = p.comm.fake_rank;
    std::vector<RankMemory> ranks;
    for (int64_t rank = 0; rank < config.mesh.size(); ++rank)
        if (!only || rank == *only)
            ranks.push_back(book_rank(rank == with_files ? options : options.without_files(), p.flags.values(),
                                      p.data(), config, rank));
    const auto smaller = [](const RankMemory& a, const RankMemory& b) { return a.peak.total < b.peak.total; };
    say(rank_table(*std::max_element(ranks.begin(), ranks.end(), smaller), options));
    if (!only) say(ranks_table(ranks, config));
    say(checkpoint_table(checkpoint_cost(options, config)));
}

void print_memory(Program& p, const ParallelConfig& config, int64_t snapshot_bytes) {
    if (p.options.steps == 0) return;
    RankMemory memory = rank_formula(p.options, config, p.world.rank());
    memory.peak = p.trainer().peak();
    memory.host += snapshot_bytes;
    say(rank_table(memory, p.options));
}

}  // namespace train70b
