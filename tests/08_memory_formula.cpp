// The memory formula against dry runs: every kind's peak and that of their sum, on a rank of every stage. In the
// layouts of the parity grid, in random ones and at real sizes they agree to a few bytes; the bound leaves room for
// what a change of an op may add without a change of the formula.
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "05_pipeline/complete/schedule_file.h"
#include "08_3d_full/plan/dry_run.h"
#include "08_3d_full/plan/memory_formula.h"
#include "tests/drawn_layouts.h"
#include "tests/grid_layouts.h"
#include "tests/ranks.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr double kOfKind = 1e-3, kOfTotal = 1e-4;  // bounds: of the kind, or of the rank's total
constexpr int kDrawnLayouts = 200;

class Comparison {
  public:
    explicit Comparison(const char* what) : what_(what) {}

    // Whether the rank's states are exact, and everything else is within the bounds.
    bool agrees(const TrainOptions& o, const Dataset& data, const ParallelConfig& config, int64_t rank,
                const std::string& text) {
        const MemoryPeak booked = book_rank(o, {}, data, config, rank).peak;
        const MemoryPeak formula = memory_formula(workload_of(o), config, rank);
        std::string wrong;
        for (int kind = 0; kind <= kMemoryKinds; ++kind) {
            const bool sum = kind == kMemoryKinds;
            const double b = double(sum ? booked.total : booked.kind[size_t(kind)]);
            const double difference = std::abs(double(sum ? formula.total : formula.kind[size_t(kind)]) - b);
            const bool state = kind <= int(Memory::optimizer) || kind == int(Memory::host);
            const double allowed = state ? 0 : std::max(kOfKind * b, kOfTotal * double(booked.total));
            const char* name = sum ? "total" : kMemoryNames[size_t(kind)];
            if (b > 0 && !(difference / b <= worst_)) {
                worst_ = difference / b;
                where_ = fmt::format("{} of rank {}, {}", name, rank, text);
            }
            if (!(difference <= allowed))
                wrong += fmt::format(" {} {} by formula {}", name, b, sum ? formula.total : formula.kind[size_t(kind)]);
        }
        ++ranks_;
        exact_ += booked.kind == formula.kind && booked.total == formula.total;
        if (!wrong.empty()) fmt::print("rank {} of {}:{}\n", rank, text, wrong);
        return wrong.empty() && booked.total > 0;
    }
    ~Comparison() {
        fmt::print("{}: {} ranks, {} of them to the byte{}\n", what_, ranks_, exact_,
                   worst_ > 0 ? fmt::format("; at most {:.1e} of a kind: {}", worst_, where_) : "");
    }

  private:
    const char* what_;
    int64_t ranks_ = 0, exact_ = 0;
    double worst_ = 0;
    std::string where_;
};

// Of every stage one, at different places of the other axes; and the first.
std::vector<int64_t> some_ranks(const Mesh& mesh) {
    std::vector<int64_t> ranks = {0};
    for (int64_t pp = 0; pp < mesh.pp; ++pp)
        ranks.push_back(mesh.rank({pp % mesh.tp, (3 * pp + 1) % mesh.cp, (5 * pp + 2) % mesh.dp, pp}));
    return ranks;
}

// A layout of 08_random with more micro-batches, more layers, other precisions and more of the flags.
Drawn draw_precision(const Text& text, uint64_t number, uint64_t attempt) {
    Dice dice(number, attempt + 500);
    Drawn drawn = draw(text, dice.one_of({1, 4, 8, 16, 16, 32, 64}), number, attempt);
    TrainOptions& o = drawn.options;
    LlamaConfig& c = o.model;
    ParallelConfig& config = drawn.config;
    o.dry_run = true;
    o.document_token = {};
    o.dtype = dice.one_of({"fp32", "bf16", "bf16", "fp64"});
    o.grad_dtype = o.dtype == "bf16" ? dice.one_of({"fp32", "bf16"}) : "fp32";
    o.global_batch *= dice.one_of({1, 1, 4, 12});
    if (config.pipeline.schedule == "interleaved" && dice.below(2)) config.pipeline.virtual_stages = 1 + dice.below(4);
    c.layers *= dice.one_of({1, 2, 2, 3, 12});
    if (dice.below(2)) c.hidden *= 4, o.seq_len *= 4;
    config.zero.prefetch = dice.below(4);
    if (dice.below(4) == 0) config.zero.bucket_mb = dice.one_of({0.0, 0.05, 0.2, 1.0});
    config.zero.overlap = dice.below(4) > 0;
    if (config.context.algorithm == "hybrid" && dice.below(2)) config.context.ulysses_size = 4;
    if (o.dtype == "fp64") return drawn;
    if (dice.below(4) == 0) config.optimizer = "adamw8bit";
    if (dice.below(3) > 0) return drawn;
    config.fp8.recipe = dice.one_of({"current", "delayed", "rowwise", "blockwise"});
    config.tensor.overlap = false;
    if (dice.below(4) == 0) return drawn;  // whichever layers have sizes for it
    const bool blocks = config.fp8.recipe == "blockwise";
    c.heads = 8, c.kv_heads = dice.one_of({2, 8}), c.head_size = dice.one_of({16, 32});
    c.hidden = blocks ? 256 : 64, c.ffn = blocks ? 1024 : 256, o.seq_len = 256;
    return drawn;
}

struct Real {
    const char *name, *model;
    int64_t seq_len, micro_batch, micro_batches;
    const char* recompute;
    ParallelConfig config;
};

std::vector<Real> real_sizes() {
    std::vector<Real> list = {
        {"70B on 64, 1F1B",
         "70b",
         8192,
         1,
         32,
         "selective",
         {.mesh = {.tp = 8, .dp = 2, .pp = 4}, .zero = {.stage = 1}, .tensor = {true, false}}},
        {"70B on 64, interleaved",
         "70b",
         8192,
         1,
         32,
         "none",
         {.mesh = {.tp = 8, .dp = 2, .pp = 4},
          .zero = {.stage = 1},
          .tensor = {true, true},
          .pipeline = {"interleaved", 5, {}}}},
        {"70B on 64, ZeRO-3", "70b", 8192, 1, 1, "full", {.mesh = {.dp = 64}, .zero = {.stage = 3}}},
        {"70B on 64, ZeRO-3 and tp",
         "70b",
         8192,
         1,
         2,
         "pointwise",
         {.mesh = {.tp = 8, .dp = 8}, .zero = {.stage = 3, .prefetch = 2}, .tensor = {true, false}}},
        {"70B on 128, zero-bubble",
         "70b",
         4096,
         1,
         64,
         "none",
         {.mesh = {.tp = 8, .dp = 2, .pp = 8},
          .zero = {.stage = 2},
          .tensor = {true, false},
          .pipeline = {"zero-bubble", 0, {}}}},
        {"70B on 128, zb-v",
         "70b",
         4096,
         1,
         64,
         "full",
         {.mesh = {.tp = 8, .dp = 2, .pp = 8},
          .zero = {.stage = 1},
          .tensor = {true, false},
          .pipeline = {"zb-v", 0, {}}}},
        {"70B on 128, dualpipe-v",
         "70b",
         4096,
         2,
         40,
         "selective",
         {.mesh = {.tp = 8, .dp = 2, .pp = 8},
          .zero = {.stage = 1},
          .tensor = {true, true},
          .pipeline = {"dualpipe-v", 0, {}}}},
        {"70B on 64, gpipe",
         "70b",
         4096,
         1,
         100,
         "full",
         {.mesh = {.tp = 8, .dp = 1, .pp = 8},
          .zero = {.stage = 1},
          .tensor = {true, false},
          .pipeline = {"gpipe", 0, {}}}},
        {"70B, FP8 delayed, ZeRO-3",
         "70b",
         8192,
         1,
         2,
         "none",
         {.mesh = {.tp = 8, .dp = 16}, .zero = {.stage = 3}, .tensor = {true, false}, .fp8 = {.recipe = "delayed"}}},
        {"70B, FP8 blockwise",
         "70b",
         8192,
         1,
         16,
         "selective",
         {.mesh = {.tp = 4, .dp = 4, .pp = 8},
          .zero = {.stage = 1},
          .tensor = {true, false},
          .fp8 = {.recipe = "blockwise"},
          .optimizer = "adamw8bit"}},
        {"405B on 1024",
         "405b",
         8192,
         1,
         32,
         "none",
         {.mesh = {.tp = 8, .dp = 8, .pp = 16},
          .zero = {.stage = 1},
          .tensor = {true, false},
          .pipeline = {"1f1b", 0, {7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7}}}},
        {"405B on 2048, FP8 rowwise",
         "405b",
         16384,
         1,
         16,
         "full",
         {.mesh = {.tp = 8, .cp = 2, .dp = 8, .pp = 16},
          .zero = {.stage = 2},
          .tensor = {true, false},
          .pipeline = {"1f1b", 0, {7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7}},
          .fp8 = {.recipe = "rowwise"}}},
        {"405B, 128K tokens",
         "405b",
         131072,
         1,
         16,
         "full",
         {.mesh = {.tp = 8, .cp = 16, .dp = 1, .pp = 16},
          .zero = {.stage = 1},
          .tensor = {true, false},
          .pipeline = {"1f1b", 0, {7, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 8, 7}}}},
        {"8B ZeRO-3 on 8", "8b", 8192, 1, 4, "none", {.mesh = {.dp = 8}, .zero = {.stage = 3}}},
        {"8B ZeRO-3 on 1024, hybrid",
         "8b",
         8192,
         2,
         4,
         "full",
         {.mesh = {.dp = 1024}, .zero = {.stage = 3, .hybrid_shard = 8}}},
        {"8B ZeRO-3, offload",
         "8b",
         8192,
         1,
         4,
         "selective",
         {.mesh = {.dp = 8}, .zero = {.stage = 3, .offload = Offload::all}}},
        {"8B ZeRO-2, buckets",
         "8b",
         8192,
         1,
         4,
         "selective",
         {.mesh = {.dp = 8}, .zero = {.stage = 2, .bucket_mb = 2000}}},
        {"qwen3-4b, tied",
         "qwen3-4b",
         32768,
         1,
         4,
         "pointwise",
         {.mesh = {.cp = 4, .dp = 2, .pp = 2}, .zero = {.stage = 1}, .context = {"ulysses", 0}}},
        {"Mixtral 8x7B on 64",
         "mixtral-8x7b",
         4096,
         1,
         32,
         "full",
         {.mesh = {.tp = 2, .dp = 8, .pp = 4, .ep = 8}, .zero = {.stage = 1}, .tensor = {true, false}}},
        {"Qwen3 30B-A3B on 16, ZeRO-3",
         "qwen3-30b-a3b",
         4096,
         1,
         2,
         "full",
         {.mesh = {.dp = 16, .ep = 8}, .zero = {.stage = 3}}},
    };
    for (const char* algorithm : {"ring", "zigzag", "gather", "hybrid"})
        list.push_back({"8B, 1M tokens",
                        "8b",
                        1 << 20,
                        1,
                        1,
                        "full",
                        {.mesh = {.tp = 8, .cp = 32, .dp = 1},
                         .zero = {.stage = 3},
                         .tensor = {true, false},
                         .context = {algorithm, algorithm == std::string("hybrid") ? 1 : 0}}});
    return list;
}

}  // namespace

TEST_CASE("the parity grid") {
    const Text text;
    Comparison grid("parity grid");
    int64_t family = 0;
    for (const GridLayout& layout : grid_layouts()) {
        TrainOptions o = grid_shape(text);
        o.dry_run = true;
        o.recompute = layout.recompute;
        layout.use_family(o.model, family++ % 3);
        o.model.tied = family % 2 == 0;
        if (!in_slice(family + family / 8)) continue;
        const Dataset data(o.data, o.model.vocab, o.seq_len, o.val_fraction);
        for (const char* dtype : {"fp32", "bf16", "fp64"})
            for (const int64_t rank : some_ranks(layout.mesh)) {
                o.dtype = dtype;
                EXPECT(grid.agrees(o, data, layout.config(), rank, layout.text()));
            }
    }
}

TEST_CASE("random layouts, of every schedule and technique, in every precision") {
    const Text text;
    Comparison random("random layouts");
    std::map<std::string, int64_t> drawn_of;  // schedules, recipes
    for (int64_t number = 0; number < kDrawnLayouts; ++number) {
        if (!in_slice(number)) continue;
        for (uint64_t attempt = 0;; ++attempt) {
            REQUIRE(attempt < 400);
            Drawn drawn = draw_precision(text, uint64_t(number), attempt);
            TrainOptions& o = drawn.options;
            ParallelConfig& config = drawn.config;
            try {
                check_config(o.model);
                validate(config, o, config.mesh.size());
            } catch (const UsageError&) { continue; }
            const Dataset data(o.data, o.model.vocab, o.seq_len, o.val_fraction);
            const std::string what =
                fmt::format("{}; {}/{}, {} virtual stages, bucket {}, overlap {}, {} heads per rank, fp8 {}, {}",
                            drawn.text(), o.dtype, o.grad_dtype, config.pipeline.virtual_stages, config.zero.bucket_mb,
                            config.zero.overlap, config.context.ulysses_size, config.fp8.recipe, config.optimizer);
            for (const int64_t rank : some_ranks(config.mesh)) EXPECT(random.agrees(o, data, config, rank, what));
            ++drawn_of[config.pipeline.schedule], ++drawn_of["fp8 " + config.fp8.recipe];
            break;
        }
    }
    for (const auto& [name, count] : drawn_of) fmt::print("{} {}, ", count, name);
    fmt::print("\n");
    EXPECT(!drawn_of.empty());
}

TEST_CASE("real sizes: 8B to 405B, up to a million tokens") {
    const Folder folder;
    const std::string path = folder / "text.txt";
    {
        std::ofstream file(path);
        for (int i = 0; i < 150'000; ++i) file << "the sum of\n";
    }
    Comparison real("real sizes");
    for (Real& layout : real_sizes()) {
        TrainOptions o;
        o.model = preset(layout.model);
        o.data = path;
        o.val_fraction = 0;
        o.seq_len = layout.seq_len;
        o.micro_batch = layout.micro_batch;
        o.global_batch = layout.micro_batch * layout.micro_batches * layout.config.mesh.dp;
        o.dtype = "bf16";
        o.recompute = layout.recompute;
        o.dry_run = true;
        validate(layout.config, o, layout.config.mesh.size());
        const Dataset data(o.data, o.model.vocab, o.seq_len, o.val_fraction);
        const Mesh& mesh = layout.config.mesh;
        for (const int64_t pp : std::set<int64_t>{0, mesh.pp / 2, mesh.pp - 1})
            EXPECT(real.agrees(o, data, layout.config, mesh.rank({0, mesh.cp / 2, 0, pp}), layout.name));
    }
}

TEST_CASE("experts: ep 1 to 8, with every stage of ZeRO, recomputation, schedule and some dense layers") {
    const Text text;
    Comparison experts("experts");
    struct Case {
        Mesh mesh;
        int stage;
        const char *recompute, *schedule;
    };
    std::vector<Case> cases;
    for (const char* recompute : {"none", "pointwise", "selective", "full"})
        for (int stage = 0; stage <= 3; ++stage) {
            for (const int64_t ep : {1, 2, 4}) cases.push_back({{.dp = 4, .ep = ep}, stage, recompute, "1f1b"});
            cases.push_back({{.tp = 2, .dp = 2, .ep = 4}, stage, recompute, "1f1b"});
            cases.push_back({{.tp = 2, .dp = 2, .pp = 2, .ep = 2}, stage, recompute, "1f1b"});
            cases.push_back({{.tp = 2, .cp = 2, .dp = 1, .pp = 2, .ep = 4}, stage, recompute, "interleaved"});
            cases.push_back({{.cp = 2, .dp = 4, .ep = 8}, stage, recompute, "1f1b"});
            cases.push_back({{.dp = 4, .pp = 2, .ep = 2}, stage, recompute, "zero-bubble"});
            cases.push_back({{.tp = 2, .dp = 1, .pp = 2, .ep = 1}, stage, recompute, "zb-v"});
        }
    for (size_t i = 0; i < cases.size(); ++i) {
        if (!in_slice(int64_t(i))) continue;
        const auto& [mesh, stage, recompute, schedule] = cases[i];
        Dice dice(i, 0);
        TrainOptions o = grid_shape(text);
        o.model.layers = 8;
        o.model.experts = {.count = 8, .top_k = dice.one_of({1, 2, 3}), .ffn = 24};
        o.model.experts.shared = dice.below(2), o.model.experts.dense_layers = dice.below(4);
        o.global_batch = 16, o.micro_batch = dice.one_of({1, 2});
        o.recompute = recompute;
        o.dtype = dice.one_of({"fp32", "bf16"});
        o.dry_run = true;
        ParallelConfig config{.mesh = mesh, .zero = {.stage = stage}, .tensor = {mesh.tp > 1, false}};
        config.pipeline.schedule = schedule;
        config.zero.prefetch = dice.below(3);
        validate(config, o, mesh.size());
        const Dataset data(o.data, o.model.vocab, o.seq_len, o.val_fraction);
        const std::string what = fmt::format("{}, ZeRO-{}, {}, {}, prefetch {}", mesh.text(), stage, recompute,
                                             schedule, config.zero.prefetch);
        for (const int64_t rank : some_ranks(mesh)) EXPECT(experts.agrees(o, data, config, rank, what));
    }
}

TEST_CASE("a schedule from a file is the schedule") {
    const Folder folder;
    const std::string path = folder / "schedule.txt";
    std::ofstream(path) << schedule_text(make_schedule("zb-v", 4, 6));
    const Workload workload{.model = preset("8b"), .seq_len = 4096, .global_batch = 6};
    ParallelConfig named{.mesh = {.dp = 1, .pp = 4}, .pipeline = {.schedule = "zb-v"}}, file = named;
    file.pipeline.schedule = "file:" + path;
    for (int64_t rank = 0; rank < 4; ++rank) {
        const MemoryPeak a = memory_formula(workload, named, rank), b = memory_formula(workload, file, rank);
        EXPECT(a.kind == b.kind);
        EXPECT(a.total == b.total);
    }
}

TEST_CASE("the formula is quick, however many micro-batches, layers and ranks there are") {
    // 405B on 16 stages and 8192 data-parallel ranks: as long with 32 micro-batches as with a thousand.
    ParallelConfig config{.mesh = {.tp = 8, .dp = 8192, .pp = 16}, .zero = {.stage = 1}};
    LlamaConfig model = preset("405b");
    model.layers = 128;
    const auto seconds = [&](int64_t micro_batches) {
        const Workload workload{.model = model, .seq_len = 8192, .global_batch = micro_batches * config.mesh.dp};
        double least = 1;
        for (int i = 0; i < 20; ++i) {
            const double begin = now_seconds();
            EXPECT(memory_formula(workload, config, 0).total > 0);
            least = std::min(least, now_seconds() - begin);
        }
        return least;
    };
    const double few = seconds(64), many = seconds(65536);
    fmt::print("{:.1f} us with 64 micro-batches, {:.1f} us with 65536\n", 1e6 * few, 1e6 * many);
    EXPECT(many < 10 * few + 1e-4);
}
