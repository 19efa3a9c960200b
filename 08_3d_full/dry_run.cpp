#include "08_3d_full/dry_run.h"

#include <algorithm>

#include "02_data_parallel/runtime/launch.h"
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
    const int64_t D = c.head_dim();

    // Elements of a rank's units: full norms; products divided by tp, with at least one key/value head; vocabulary
    // rounded up.
    const int64_t kv = std::max<int64_t>(c.kv_heads / tp, 1) * D, rows = (c.vocab + tp - 1) / tp;
    const int64_t block = 2 * c.hidden + (2 * c.hidden / tp + 2 * kv + 3 * c.ffn / tp) * c.hidden;
    const Stage here = stage_of(config, c, rank);
    std::vector<int64_t> units;
    if (here.embedding) units.push_back(rows * c.hidden);
    for (const Chunk& chunk : here.chunks)
        units.insert(units.end(), size_t(chunk.end_layer - chunk.first_layer), block);
    if (here.head) units.push_back(c.hidden + rows * c.hidden);

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
    o.eval_every = 0;
    o.dry_run = true;
    o.steps = 1;
    const MemoryBytes before = ledger().now();
    for (const int64_t bytes : before) CHECK(bytes == 0, "{} bytes are still booked", bytes);
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

namespace {
int64_t of(const RankMemory& memory, Memory kind) { return memory.peak.kind[size_t(kind)]; }
}  // namespace

std::string rank_table(const RankMemory& memory, const TrainOptions& options) {
    std::string text =
        fmt::format("rank {}: bytes, peak of a step\n{:<14}{:>18}{:>18}\n", memory.rank, "", "booked", "formula");
    for (int kind = 0; kind < kMemoryKinds; ++kind) {
        const int64_t booked = memory.peak.kind[size_t(kind)];
        if (kind >= kDeviceMemoryKinds && booked == 0) continue;
        text += fmt::format("{:<14}{:>18}", kMemoryNames[size_t(kind)], booked);
        const std::optional<int64_t> formula = [&]() -> std::optional<int64_t> {
            switch (Memory(kind)) {
                case Memory::params: return memory.params;
                case Memory::grads: return memory.grads;
                case Memory::optimizer: return memory.optimizer;
                case Memory::host: return memory.host;
                default: return std::nullopt;
            }
        }();
        text += formula && *formula >= 0 ? fmt::format("{:>18}\n", *formula) : "\n";
    }
    text += fmt::format("{:<14}{:>18}   the peak of their sum\n", "total", memory.peak.total);
    if (options.dry_run)
        text +=
            "(a dry run books what every device would hold; a device's own workspace, as cuBLASLt's 32 MiB, comes on "
            "top)\n";
    return text;
}

std::string ranks_table(const std::vector<RankMemory>& ranks, const ParallelConfig& config) {
    int64_t most_bytes = 0;
    for (const RankMemory& memory : ranks) most_bytes = std::max(most_bytes, memory.peak.total);
    const bool giga = most_bytes >= 1e9;
    const char* unit = giga ? "GB" : "MB";
    const auto shown = [giga](int64_t bytes) { return double(bytes) / (giga ? 1e9 : 1e6); };
    std::string text = fmt::format(
        "{}: {} of every rank, peak of a step\n{:<28}{:>9}{:>9}{:>11}{:>13}{:>8}{:>11}{:>8}{:>8}\n", config.mesh.text(),
        unit, "ranks", "params", "grads", "optimizer", "activations", "comm", "workspace", "total", "host");
    const auto row = [&](const RankMemory& m) {
        return fmt::format("{:>9.2f}{:>9.2f}{:>11.2f}{:>13.2f}{:>8.2f}{:>11.2f}{:>8.2f}{:>8.2f}\n",
                           shown(of(m, Memory::params)), shown(of(m, Memory::grads)), shown(of(m, Memory::optimizer)),
                           shown(of(m, Memory::activations)), shown(of(m, Memory::comm)),
                           shown(of(m, Memory::workspace)), shown(m.peak.total), shown(of(m, Memory::host)));
    };
    for (size_t i = 0; i < ranks.size();) {  // neighbours of one stage with the same figures: one line
        size_t end = i + 1;
        const auto stage = [&](size_t j) { return config.mesh.coordinate(ranks[j].rank).pp; };
        while (end < ranks.size() && stage(end) == stage(i) && row(ranks[end]) == row(ranks[i])) ++end;
        const std::string who =
            end == i + 1 ? fmt::format("{}", ranks[i].rank) : fmt::format("{}-{}", ranks[i].rank, ranks[end - 1].rank);
        text += fmt::format("{:<28}", fmt::format("{} (stage {})", who, stage(i))) + row(ranks[i]);
        i = end;
    }
    const auto larger = [](const RankMemory& a, const RankMemory& b) { return a.peak.total < b.peak.total; };
    const RankMemory& most = *std::max_element(ranks.begin(), ranks.end(), larger);
    const RankMemory& least = *std::min_element(ranks.begin(), ranks.end(), larger);
    if (most.peak.total == least.peak.total) return text + "all ranks hold equally much\n";
    Memory why = Memory::params;
    for (int kind = 0; kind < kDeviceMemoryKinds; ++kind)
        if (of(most, Memory(kind)) - of(least, Memory(kind)) > of(most, why) - of(least, why)) why = Memory(kind);
    return text +
           fmt::format(
               "largest: rank {}, stage {} of {}; of its {:.2f} {} more than rank {}, most are {} ({:+.2f} {})\n",
               most.rank, config.mesh.coordinate(most.rank).pp, config.mesh.pp,
               shown(most.peak.total - least.peak.total), unit, least.rank, kMemoryNames[size_t(why)],
               shown(of(most, why) - of(least, why)), unit);
}

void add_dry_run_flag(Flags& flags, TrainOptions& options) {
    flags.group("Output");
    flags.add_flag("--dry-run", options.dry_run,
                   "book the memory of one step of all simulated ranks, or of --fake-rank; compute nothing");
}

void check_dry_run(const TrainOptions& options, const CommOptions& comm) {
    if (options.dry_run && comm.backend != "fake")
        usage_error("--dry-run: needs simulated ranks (try --comm fake --fake-world N)");
}

void print_dry_run(Program& p, ParallelConfig config) {
    const TrainOptions& options = p.options;
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
    const auto larger = [](const RankMemory& a, const RankMemory& b) { return a.peak.total < b.peak.total; };
    say("\n{}", rank_table(*std::max_element(ranks.begin(), ranks.end(), larger), options));
    if (!only) say("\n{}", ranks_table(ranks, config));
}

}  // namespace train70b
