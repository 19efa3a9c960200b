// The memory formula against dry runs: the largest rank's total within kFormulaError, so that pruning with it leaves
// out no layout that fits. The layouts of docs/configurations.md, and drawn ones of what the planner chooses from.
#include <fstream>
#include <iterator>
#include <regex>
#include <set>
#include <sstream>

#include "02_data_parallel/runtime/ctas.h"
#include "08_3d_full/plan/choose.h"
#include "08_3d_full/plan/dry_run.h"
#include "08_3d_full/plan/record.h"
#include "08_3d_full/plan/simulate_best.h"
#include "tests/drawn_layouts.h"
#include "tests/files.h"
#include "tests/plans.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr int kDrawnLayouts = 200;
constexpr double kMostBytes = 120e9;  // of a layout that is worth a test: somewhat more than a device has

// Text of which a dry run sees the length only.
Dataset text_of(const Folder& folder, int64_t vocab, int64_t seq_len) {
    const std::string path = folder / fmt::format("{}.txt", seq_len);
    std::ofstream(path) << std::string(size_t(2 * seq_len + 2), ' ');
    return {path, vocab, seq_len, 0};
}

class Comparison {
  public:
    explicit Comparison(const char* what) : what_(what) {}

    // Whether the formula is within kFormulaError of the dry run, for the largest of the ranks that may be it.
    bool agrees(const TrainOptions& o, const ParallelConfig& config, const std::string& text,
                double bound = kFormulaError) {
        const Dataset data = text_of(folder_, o.model.vocab, o.seq_len);
        double formula = 0, booked = 0;
        const Mesh& mesh = config.mesh;
        for (const int64_t pp : std::set<int64_t>{0, std::min<int64_t>(1, mesh.pp - 1), mesh.pp - 1})
            for (const int64_t cp : std::set<int64_t>{0, config.context.algorithm == "ring" ? mesh.cp - 1 : 0}) {
                const int64_t rank = mesh.rank({.tp = 0, .cp = cp, .dp = 0, .pp = pp});
                const Recording recording = record_step(o, data, config, {.only = rank});
                booked = std::max(booked, double(peak_of(recording.of(rank)).total));
                formula = std::max(formula, double(memory_formula(workload_of(o), config, rank).total));
            }
        const double error = formula / booked - 1;
        if (std::abs(error) > std::abs(worst_)) {
            worst_ = error;
            where_ = text;
        }
        ++layouts_;
        sum_ += std::abs(error);
        const bool agree = std::abs(error) <= bound && formula * (1 - bound) <= booked;
        if (!agree)
            fmt::print("{}: {:.3g} GB, by formula {:.3g}: {:+.1f}%\n", text, booked / 1e9, formula / 1e9, 100 * error);
        return agree;
    }
    ~Comparison() {
        fmt::print("{}: {} layouts, off by {:.2f}% in the mean and {:+.1f}% at most: {}\n", what_, layouts_,
                   100 * sum_ / std::max(1.0, double(layouts_)), 100 * worst_, where_);
    }

  private:
    const char* what_;
    const Folder folder_;
    int64_t layouts_ = 0;
    double worst_ = 0, sum_ = 0;
    std::string where_;
};

// A model, a cluster, a workload, and one of all layouts.
std::pair<PlanRequest, Layout> draw_plan(int64_t number, uint64_t attempt) {
    Dice dice(uint64_t(number), attempt);
    PlanRequest r;
    r.model = preset(dice.one_of<const char*>({"llama3.2-1b", "qwen3-4b", "7b", "8b", "8b", "13b", "30b", "70b", "70b",
                                               "175b", "405b", "mixtral-8x7b", "qwen3-30b-a3b"}));
    r.gpus = dice.one_of({8, 16, 64, 64, 128, 512, 2048});
    r.seq_len = dice.one_of({2048, 4096, 8192, 32768, 131072});
    r.global_batch = r.gpus * dice.one_of({1, 2, 4, 8, 16});
    r.grad_dtype = dice.below(3) == 0 ? DType::bf16 : DType::f32;
    if (dice.below(3) == 0) r.optimizer = "adamw8bit";
    r.cp_algorithm = dice.one_of<const char*>({"zigzag", "zigzag", "ring", "gather", "ulysses", "hybrid"});
    if (r.model.experts.count == 0 && dice.below(4) == 0)
        r.fp8.recipe = dice.one_of<const char*>({"current", "delayed", "rowwise", "blockwise"});
    const std::vector<Layout> layouts = enumerate_layouts(r).layouts;
    if (layouts.empty()) return draw_plan(number, attempt + 1);
    const Layout layout = layouts[size_t(dice.below(int64_t(layouts.size())))];
    if (!(double(largest_rank(r, layout).second.total) <= kMostBytes)) return draw_plan(number, attempt + 1);
    if (r.optimizer == "adamw" && dice.below(2) == 0) r.optimizer = "muon";
    return {r, layout};
}

}  // namespace

TEST_CASE("the layouts of docs/configurations.md") {
    std::string text = read_text("docs/configurations.md");
    text = std::regex_replace(text, std::regex(R"(\\\n\s*)"), "");
    const std::regex command(R"(mpirun -np (\d+) build/bin/08_3d_full (.*--micro-batch.*))");
    Comparison documented("documented");
    int64_t count = 0;
    for (std::sregex_iterator at(text.begin(), text.end(), command), end; at != end; ++at, ++count) {
        TrainOptions o;
        ParallelConfig config;
        CommandLine flags("", o);
        add_parallel_flags(flags, config);
        std::istringstream in("program --device cpu " + (*at)[2].str());
        std::vector<std::string> words{std::istream_iterator<std::string>(in), {}};
        std::vector<char*> argv;
        for (std::string& word : words) argv.push_back(word.data());
        flags.parse(int(argv.size()), argv.data());
        o.dry_run = true;
        validate(config, o, std::stoll((*at)[1]));
        if (!in_half(count)) continue;
        EXPECT(documented.agrees(o, config, (*at)[2]));
    }
    EXPECT(count >= 8);
}

TEST_CASE("drawn layouts, of every model, schedule, technique and precision") {
    Comparison drawn("drawn");
    CtaShare::most = 0;
    for (int64_t number = 0; number < kDrawnLayouts; ++number) {
        if (!in_slice(number) || !in_half(number / 8)) continue;
        const auto [r, layout] = draw_plan(number, 0);
        TrainOptions o = options_of(r, layout);
        o.model.name = r.model.name;
        if (o.recompute != "none") o.recompute_every = 1 + number / 2 % 4;
        EXPECT(drawn.agrees(
            o, config_of(r, layout),
            fmt::format("{}, {} tokens, batch {}, {} every {}, {}, fp8 {}, {}", r.model.name, r.seq_len, r.global_batch,
                        short_text(layout), o.recompute_every, r.cp_algorithm, r.fp8.recipe, r.optimizer),
            r.optimizer == "muon" ? 3 * kFormulaError : kFormulaError));  // its owners have whole matrices
    }
    // What NCCL's kernels take leaves 8 multiprocessors (backend_nccl.cu) of an A100, which has 108, and so of an H100.
    fmt::print("drawn: at most {} CTAs\n", CtaShare::most);
    EXPECT(CtaShare::most <= 100);
}

TEST_CASE("NCCL's kernels of a layout with every kind of group leave 8 multiprocessors of an A100 to computation") {
    const Folder folder;
    const PlanRequest r{
        .model = preset("mixtral-8x7b"), .gpus = 256, .seq_len = 4096, .global_batch = 256, .cp_algorithm = "hybrid"};
    const Layout layout{.tp = 4, .cp = 4, .dp = 4, .pp = 4, .zero = 3, .hybrid_shard = 4, .ep = 8};
    const Dataset data = text_of(folder, r.model.vocab, r.seq_len);
    CtaShare::most = 0;
    record_step(options_of(r, layout), data, config_of(r, layout), {.only = 64});
    // world, tp, cp and its parts, dp_cp and its parts, pp, ep, edp, four channels
    EXPECT(CtaShare::most == 2 + 16 + 16 + 16 + 2 + 16 + 16 + 4 * 4);
}

TEST_CASE("units that ZeRO-3 gathers ahead, where they are most of what a rank holds") {
    Comparison ahead("prefetch");
    const PlanRequest r{.model = preset("8b"), .gpus = 512, .seq_len = 2048, .global_batch = 512};
    const Layout layout{.dp = 512, .zero = 3, .recompute = Recompute::full};
    for (const int64_t prefetch : {0, 1, 3}) {
        ParallelConfig config = config_of(r, layout);
        config.zero.prefetch = prefetch;
        EXPECT(ahead.agrees(options_of(r, layout), config, fmt::format("prefetch {}", prefetch)));
    }
}
