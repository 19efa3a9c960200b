// Adding an entry to a registry is all that a schedule, an algorithm of context parallelism, an FP8 recipe or an
// optimizer needs to be planned: the ones below exist only here, are chosen by their flags, hold what the memory
// formula says, and a step of them is simulated.
#include <algorithm>

#include "07_fp8/complete/adamw8bit.h"
#include "07_fp8/complete/flags.h"
#include "07_fp8/complete/recipes.h"
#include "08_3d_full/checkpoint/cost.h"
#include "08_3d_full/plan/dry_run.h"
#include "08_3d_full/plan/estimate.h"
#include "08_3d_full/plan/network.h"
#include "08_3d_full/plan/simulate_best.h"
#include "tests/plans.h"
#include "tests/training.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// Puts an entry at the end of a registry, for as long as it lives.
template <class Entry>
class Added {
  public:
    Added(const std::vector<Entry>& registry, Entry entry) : list_(const_cast<std::vector<Entry>&>(registry)) {
        list_.push_back(std::move(entry));
    }
    ~Added() { list_.pop_back(); }

  private:
    std::vector<Entry>& list_;  // not const where it is defined
};

// F0 F1 B0 B1 F2 F3 B2 B3 ...: gpipe, two micro-batches at a time.
std::vector<Step> in_pairs(int64_t m) {
    std::vector<Step> steps;
    for (int64_t i = 0; i < m; i += 2)
        for (const Pass pass : {Pass::forward, Pass::backward})
            for (const int64_t each : {i, i + 1}) steps.push_back({pass, each});
    return steps;
}

class InThirtySeconds : public CurrentScaling {
  public:
    using CurrentScaling::CurrentScaling;
    DType format(Operand::Role) const override { return DType::e4m3; }
    int64_t divisor() const override { return 32; }
};

struct Dummies {
    const char* on_request = nullptr;
    Added<ScheduleGenerator> schedule{schedule_generators(),
                                      {.name = "pairs",
                                       .chunks = ScheduleGenerator::Chunks::one,
                                       .steps = [](PipelineSize s, int64_t) { return in_pairs(s.m); },
                                       .bubble = [](PipelineSize s) { return double(s.p - 1) / double(s.p + 1); },
                                       .in_flight = [](PipelineSize, int64_t) { return int64_t(2); },
                                       .multiple = [](int64_t) { return int64_t(2); },
                                       .on_request = on_request}};
    Added<ContextAlgorithm> algorithm{context_algorithms(),
                                      {"plain-hybrid", "the plain ring up to 2 ranks, ulysses inside pairs of more", 1,
                                       false, false, [](int64_t cp, int64_t) { return int64_t(cp > 2 ? 2 : 1); }}};
    Added<Fp8Recipe> recipe{fp8_recipes(),
                            {"e4m3", "E4M3 everywhere", [](const Fp8Options&, int64_t, Device, const Comm& ranks) {
                                 return std::unique_ptr<Recipe>(new InThirtySeconds(ranks));
                             }}};
    Added<OptimizerEntry> optimizer{optimizers(),
                                    {"adamw-again", [](auto& hyper, auto) { return AdamW8bit::maker(hyper); },
                                     [](DType) { return DType::u8; }, kMomentBlock}};
};

}  // namespace

TEST_CASE("what is added to a registry is planned") {
    const Dummies dummies;
    PlanRequest r = small_request(8);
    r.model = {.name = "small", .layers = 4, .hidden = 128, .heads = 8, .kv_heads = 4, .ffn = 256, .vocab = 256};
    r.seq_len = 128, r.global_batch = 16;
    r.cp_algorithm = "plain-hybrid", r.fp8.recipe = "e4m3", r.optimizer = "adamw-again";
    const Text text;
    const Dataset data(text.path, r.model.vocab, r.seq_len, 0);
    const ClusterModel cluster = read_cluster("08_3d_full/plan/clusters/h100-8.json", "cluster");

    const auto is_dummy = [](const Layout& layout) {
        return layout.cp > 1 && schedule_generators()[size_t(layout.schedule)].name == "pairs";
    };
    std::vector<Layout> layouts = enumerate_layouts(r).layouts;
    std::erase_if(layouts, [&](const Layout& layout) { return !is_dummy(layout); });
    REQUIRE(layouts.size() > 50);
    PlanRequest ring = r;  // what it is up to two ranks
    ring.cp_algorithm = "ring";
    Estimator estimate(r, cluster), of_ring(ring, cluster);
    for (size_t i = 0; i < layouts.size(); i += layouts.size() / 8) {
        const Layout& layout = layouts[i];
        const ParallelConfig config = config_of(r, layout);
        const std::string flags = flags_of(r, layout);
        INFO(flags);
        for (const char* name : {"--pipeline pairs", "--cp-algorithm plain-hybrid", "--fp8 e4m3", "adamw-again"})
            EXPECT(flags.find(name) != flags.npos);
        TrainOptions options = options_of(r, layout);
        options.dry_run = true;
        double largest_booked = 0, largest_formula = 0;
        for (int64_t pp = 0; pp < layout.pp; ++pp)
            for (int64_t cp = 0; cp < layout.cp; cp += layout.cp - 1) {
                const int64_t rank = config.mesh.rank({.tp = 0, .cp = cp, .dp = 0, .pp = pp});
                const MemoryPeak booked = book_rank(options, {}, data, config, rank).peak;
                const MemoryPeak formula = memory_formula(workload_of(r, layout), config, rank);
                for (const Memory kind : {Memory::params, Memory::grads})
                    EXPECT(booked.kind[size_t(kind)] == formula.kind[size_t(kind)]);
                largest_booked = std::max(largest_booked, double(booked.total));
                largest_formula = std::max(largest_formula, double(formula.total));
            }
        EXPECT(largest_formula == doctest::Approx(largest_booked).epsilon(0.15));  // of so few bytes
        const Prediction prediction = simulated(r, cluster, data, {layout, estimate(layout), {}, 0});
        EXPECT(prediction.simulated);
        EXPECT(prediction.seconds > 0);
        EXPECT(double(prediction.candidate.memory.total) == largest_booked);
        EXPECT(!simulated(r, cluster, data, {layout, estimate(layout), {}, 0}, largest_booked - 1).simulated);
        EXPECT((of_ring(layout).cp == estimate(layout).cp) == (layout.cp == 2));
        const double moments = 2 + 8.0 / double(kMomentBlock);
        EXPECT(checkpoint_cost(options, config).bytes_per_parameter == 4 + moments);
    }
}

TEST_CASE("a schedule that is tried on request only is named among what was left out, with its reason") {
    const Dummies dummies{"only a test wants it"};
    for (const bool asked : {false, true}) {
        PlanRequest r = small_request(4);
        if (asked) r.pipeline = {"pairs"};
        const Enumeration all = enumerate_layouts(r);
        const auto is_dummy = [](const Layout& layout) {
            return schedule_generators()[size_t(layout.schedule)].name == "pairs";
        };
        EXPECT(std::any_of(all.layouts.begin(), all.layouts.end(), is_dummy) == asked);
        EXPECT(std::any_of(all.others.begin(), all.others.end(), [](const LeftOut& other) {
                   return other.what == "pairs" && other.why.starts_with("only a test wants it");
               }) == !asked);
    }
}
