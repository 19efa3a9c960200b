// The planner: enumeration against brute force, every layout against chapter 08's own checks, pruning against the
// memory formula, the estimate against what it must not exceed, and the budget against independent derivations.
#include <algorithm>
#include <map>
#include <set>
#include <sstream>

#include "08_3d_full/complete/layout/config.h"
#include "tests/plans.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// The options that chapter 08 gets from the printed flags.
struct Parsed {
    TrainOptions options;
    ParallelConfig config;

    Parsed(const PlanRequest& r, const std::string& text) {
        CommandLine flags("", options);
        add_parallel_flags(flags, config);
        std::string all = fmt::format(
            "program --layers {} --hidden {} --heads {} --kv-heads {} --ffn {} --vocab {} --seq-len {} --global-batch "
            "{} "
            "--dtype bf16 --device cpu {}",
            r.model.layers, r.model.hidden, r.model.heads, r.model.kv_heads, r.model.ffn, r.model.vocab, r.seq_len,
            r.global_batch, text);
        const ExpertsConfig& x = r.model.experts;
        if (x.count > 0)
            all += fmt::format(" --experts {} --top-k {} --expert-ffn {} --shared-experts {} --dense-layers {}",
                               x.count, x.top_k, x.ffn, x.shared, x.dense_layers);
        std::vector<std::string> words;
        std::istringstream in(all);
        for (std::string word; in >> word;) words.push_back(word);
        std::vector<char*> argv;
        for (std::string& word : words) argv.push_back(word.data());
        flags.parse(int(argv.size()), argv.data());
        if (config.mesh.dp > 0) flags.check_batches(config.mesh.dp);
    }
    void check(int64_t ranks) { validate(config, options, ranks); }
};

// In whole numbers, what it takes to be a layout, from the words of enumerate.h alone. The rest is left to validate().
std::set<Layout> by_brute_force(const PlanRequest& r) {
    std::set<Layout> found;
    const std::vector<ScheduleGenerator>& schedules = schedule_generators();
    const int64_t most_ep = std::max<int64_t>(r.model.experts.count, 1);
    for (int64_t tp = 1; tp <= r.gpus; ++tp)
        for (int64_t cp = 1; tp * cp <= r.gpus; ++cp)
            for (int64_t dp = 1; tp * cp * dp <= r.gpus; ++dp)
                for (int64_t pp = 1; tp * cp * dp * pp <= r.gpus; ++pp) {
                    if (tp * cp * dp * pp != r.gpus) continue;
                    for (size_t s = 0; s < schedules.size(); ++s) {
                        const std::string& name = schedules[s].name;
                        if (name == "gpipe" || name == "naive" || name == "dualpipe-v" || (pp == 1 && name != "1f1b"))
                            continue;
                        const bool loop = schedules[s].chunks == ScheduleGenerator::Chunks::loop;
                        for (int64_t v = 1; v <= 10; ++v) {
                            if (loop ? v < 2 : v != schedules[s].default_chunks()) continue;
                            const int64_t stages = pp * v, most = (r.model.layers + stages - 1) / stages;
                            if (stages > r.model.layers || 5 * most * stages > 6 * r.model.layers) continue;
                            for (const int64_t b : {1, 2, 4, 8})
                                for (int64_t way = 0; way < 3 * most_ep; ++way) {
                                    const bool sp = way % 3 > 0;  // sequence parallel, also with overlap
                                    if ((sp && tp == 1) || r.global_batch % (b * dp) != 0) continue;
                                    const Layout layout{.tp = tp,
                                                        .cp = cp,
                                                        .dp = dp,
                                                        .pp = pp,
                                                        .schedule = int64_t(s),
                                                        .virtual_stages = v,
                                                        .micro_batch = b,
                                                        .sequence_parallel = sp,
                                                        .tp_overlap = way % 3 == 2,
                                                        .ep = 1 + way / 3};
                                    try {
                                        Parsed(r, flags_of(r, layout)).check(r.gpus);
                                    } catch (const UsageError&) { continue; }
                                    const bool sharded = dp * cp > 1 || (most_ep > 1 && layout.edp() > 1);
                                    for (int64_t zero = 0; zero <= (sharded ? 3 : 0); ++zero)
                                        for (const std::string& level : recompute_names()) {
                                            Layout each = layout;
                                            each.zero = zero, each.recompute = recompute_of(level);
                                            found.insert(each);
                                            // Of ZeRO-3's groups: a node's ranks, two nodes', ...; fewer than all.
                                            for (int64_t nodes = 1; zero == 3 && nodes <= 16; nodes *= 2) {
                                                each.hybrid_shard = std::max<int64_t>(4 / tp, 1) * nodes;
                                                if (most_ep > 1 && each.own_edp()) continue;
                                                if (each.hybrid_shard > 1 && each.hybrid_shard < dp * cp &&
                                                    dp * cp % each.hybrid_shard == 0)
                                                    found.insert(each);
                                            }
                                        }
                                }
                        }
                    }
                }
    return found;
}

}  // namespace

namespace {
void expect_all_found(const PlanRequest& r) {
    const Enumeration all = enumerate_layouts(r);
    const std::set<Layout> found(all.layouts.begin(), all.layouts.end()), expected = by_brute_force(r);
    EXPECT(found.size() == all.layouts.size());
    for (const Layout& layout : expected) {
        INFO("missing: " << flags_of(r, layout));
        EXPECT(found.contains(layout));
    }
    for (const Layout& layout : found) {
        INFO("too many: " << flags_of(r, layout));
        EXPECT(expected.contains(layout));
    }
    EXPECT(!expected.empty());
}
}  // namespace

TEST_CASE("enumeration: what brute force finds with chapter 08's checks, once each") {
    // Five layers on two stages: the largest has 1.2 times the mean, just even enough.
    int64_t number = 0;
    for (const auto& [gpus, layers, algorithm] : {std::tuple(1, 6, "zigzag"),
                                                  {2, 6, "zigzag"},
                                                  {3, 6, "zigzag"},
                                                  {4, 6, "zigzag"},
                                                  {6, 6, "zigzag"},
                                                  {8, 6, "zigzag"},
                                                  {12, 6, "zigzag"},
                                                  {2, 5, "zigzag"},
                                                  {6, 6, "gather"},
                                                  {8, 6, "hybrid"},
                                                  {12, 6, "ulysses"}}) {
        if (!in_half(number++)) continue;
        PlanRequest r = small_request(gpus);
        r.model.layers = layers;
        r.cp_algorithm = algorithm;
        INFO("gpus " << gpus << ", " << algorithm);
        expect_all_found(r);
    }
}

TEST_CASE("enumeration with experts: every ep that divides them and the ranks of a stage") {
    int64_t number = 0;
    for (const int64_t gpus : {1, 2, 4, 6, 8}) {
        if (!in_half(number++)) continue;
        INFO("gpus " << gpus);
        expect_all_found(small_sparse_request(gpus, gpus == 4));
    }
    PlanRequest r = small_sparse_request(8);
    std::set<int64_t> sizes;
    for (const Layout& layout : enumerate_layouts(r).layouts) sizes.insert(layout.ep);
    EXPECT(sizes == std::set<int64_t>{1, 2, 4, 8});
    r.ep = {4, 3};
    const Enumeration some = enumerate_layouts(r);
    for (const Layout& layout : some.layouts) EXPECT(layout.ep == 4);
    EXPECT(!some.layouts.empty());
    const auto three = std::find_if(some.others.begin(), some.others.end(), [](const LeftOut& other) {
        return other.what == "ep" && other.sizes == std::vector<int64_t>{3};
    });
    EXPECT(three != some.others.end());
    r.ep = {}, r.sequence_parallel = {"off"};
    for (const Layout& layout : enumerate_layouts(r).layouts) EXPECT(layout.tp == 1);
}

TEST_CASE("experts of a stage: what the formula of states has") {
    for (const bool mixed : {false, true}) {
        const PlanRequest r = small_sparse_request(4, mixed);
        const double a = double(size_of(r.dtype));
        for (const Layout& layout : enumerate_layouts(r).layouts) {
            INFO(flags_of(r, layout));
            if (layout.zero == 3) continue;
            const ParallelConfig config = config_of(r, layout);
            for (const int64_t pp : outer_stages(layout)) {
                const int64_t rank = config.mesh.rank({.tp = 0, .cp = 0, .dp = 0, .pp = pp});
                const StageSize stage = stage_size(workload_of(r, layout), config, rank);
                const double params = double(state_memory(workload_of(r, layout), config, rank).params);
                EXPECT(params == doctest::Approx(a * (stage.elements + stage.ep_elements)).epsilon(1e-2));
            }
        }
    }
}

TEST_CASE("the printed flags parse to the layout that is meant, and pass chapter 08's checks") {
    for (const bool experts : {false, true}) {
        PlanRequest r = experts ? small_sparse_request(8) : small_request(12);
        r.optimizer = "adamw8bit";
        const Enumeration all = enumerate_layouts(r);
        REQUIRE(all.layouts.size() > 100);
        for (size_t i = 0; i < all.layouts.size(); i += 37) {
            const Layout& layout = all.layouts[i];
            const std::string flags = flags_of(r, layout);
            INFO(flags);
            Parsed parsed(r, flags);
            parsed.check(r.gpus);
            const ParallelConfig meant = config_of(r, layout);
            EXPECT(parsed.config.mesh.text() == meant.mesh.text());
            EXPECT(parsed.config.mesh.ep == layout.ep);
            EXPECT(parsed.config.zero.stage == meant.zero.stage);
            EXPECT(parsed.config.zero.hybrid_shard == meant.zero.hybrid_shard);
            EXPECT(parsed.config.tensor.sequence_parallel == meant.tensor.sequence_parallel);
            EXPECT(parsed.config.tensor.overlap == layout.tp_overlap);
            EXPECT(parsed.config.pipeline.schedule == meant.pipeline.schedule);
            EXPECT(parsed.config.pipeline.virtual_stages == meant.pipeline.virtual_stages);
            EXPECT(parsed.config.pipeline.stage_layers == meant.pipeline.stage_layers);
            EXPECT(parsed.config.optimizer == meant.optimizer);
            EXPECT(parsed.options.micro_batch == layout.micro_batch);
            EXPECT(recompute_of(parsed.options.recompute) == layout.recompute);
        }
    }
    // What holds for all layouts of a request.
    for (const bool fp8 : {false, true}) {
        PlanRequest all_of = small_request(8);
        all_of.cp_algorithm = "gather";
        all_of.fp8.recipe = fp8 ? "current" : "off";
        all_of.grad_dtype = DType::bf16;
        const Layout layout{.tp = 2, .cp = 2, .dp = 2, .tp_overlap = !fp8};
        for (const Layout& each : enumerate_layouts(all_of).layouts) EXPECT(!(fp8 && each.tp_overlap));
        const Parsed parsed(all_of, flags_of(all_of, layout));
        for (const ParallelConfig& config : {parsed.config, config_of(all_of, layout)}) {
            EXPECT(config.context.algorithm == "gather");
            EXPECT(config.tensor.overlap == !fp8);
            EXPECT(config.fp8.recipe == all_of.fp8.recipe);
        }
        EXPECT(workload_of(all_of, layout).grad_dtype == DType::bf16);
    }
}

TEST_CASE("the layers of a stage: those that the pipeline gives its rank") {
    for (const bool tied : {false, true}) {
        PlanRequest r = small_request(12);
        r.model.layers = 11;  // with two chunks on three or four ranks the rest is not on all of them
        r.model.tied = tied;
        for (const Layout& layout : enumerate_layouts(r).layouts)
            for (const int64_t pp : outer_stages(layout)) {
                const ParallelConfig config = config_of(r, layout);
                const int64_t rank = config.mesh.rank({.pp = pp});
                const StageSize size = stage_size(workload_of(r, layout), config, rank);
                const Stage stage = stage_of(config, r.model, rank);
                int64_t layers = 0;
                for (const Chunk& chunk : stage.chunks) layers += chunk.end_layer - chunk.first_layer;
                INFO(flags_of(r, layout) << ", stage " << pp);
                EXPECT(size.layers == layers);
                EXPECT(size.head == stage.head);
            }
    }
}

TEST_CASE("on request only: schedules and context parallelism that nobody should use") {
    PlanRequest r = small_request(4);
    r.seq_len = 8192;
    r.cp.clear();
    const auto largest_cp = [](const PlanRequest& request) {
        int64_t cp = 1;
        for (const Layout& layout : enumerate_layouts(request).layouts) cp = std::max(cp, layout.cp);
        return cp;
    };
    r.gpus = 16;
    EXPECT(largest_cp(r) == 4);  // zigzag: 2 cp chunks, of 1,024 rows
    r.cp_algorithm = "ring";
    EXPECT(largest_cp(r) == 8);
    r.cp_algorithm = "zigzag", r.seq_len = 4096;
    EXPECT(largest_cp(r) == 2);
    std::string left_out;
    for (const LeftOut& other : enumerate_layouts(r).others) left_out += other.what + ": " + other.why + "; ";
    EXPECT(left_out.find("cp: calls of attention with fewer than 1024 rows") != left_out.npos);
    EXPECT(left_out.find("dualpipe-v") != left_out.npos);
    r.cp = {8};
    EXPECT(largest_cp(r) == 8);
    r.gpus = 12, r.cp = {1};
    for (const bool asked : {false, true}) {
        r.pipeline = asked ? std::vector<std::string>{"dualpipe-v", "gpipe"} : std::vector<std::string>{};
        std::set<std::string> schedules;
        for (const Layout& layout : enumerate_layouts(r).layouts)
            if (layout.pp > 1) schedules.insert(schedule_generators()[size_t(layout.schedule)].name);
        EXPECT(schedules.contains("dualpipe-v") == asked);
        EXPECT(schedules.contains("gpipe") == asked);
        EXPECT(schedules.contains("1f1b") == !asked);
    }
}

TEST_CASE("the order: equal speeds by whether memory is left, then by axes") {
    // A device of 100 bytes, of which 92 may be used.
    const auto made = [](double seconds, int64_t bytes, Layout layout = {}) {
        Prediction p;
        p.seconds = seconds, p.candidate.memory.total = bytes, p.candidate.layout = layout;
        return p;
    };
    const Layout two{.tp = 2, .dp = 2}, three{.tp = 2, .dp = 2, .pp = 2};
    const auto all = ordered({made(1.09, 1), made(1.0, 85), made(1.039, 55, two), made(1.015, 58, three),
                              made(1.036, 82, two), made(1.03, 83), made(1.041, 5)},
                             100, 92);
    std::vector<double> seconds;
    std::vector<int64_t> equal_to;
    for (const Prediction& each : all) seconds.push_back(each.seconds), equal_to.push_back(each.equal_to);
    // Of 92, 10 or more are free: two axes (twice), three; fewer: 7 and 9, the faster first; then by 4.1% and by 9%.
    EXPECT(seconds == std::vector<double>{1.036, 1.039, 1.015, 1.0, 1.03, 1.041, 1.09});
    EXPECT(equal_to == std::vector<int64_t>{1, 1, 1, 1, 1, 6, 7});
    EXPECT(ordered({}, 100, 92).empty());
}

TEST_CASE("choices narrow the enumeration to the layouts that have them") {
    const PlanRequest r = small_request(12);
    PlanRequest narrow = r;
    narrow.tp = {2, 4};
    narrow.pipeline = {"interleaved", "zero-bubble"};
    narrow.virtual_stages = {3};
    narrow.zero = {1};
    narrow.recompute = {"full"};
    narrow.sequence_parallel = {"on"};
    narrow.micro_batch = {2};
    std::vector<Layout> expected;
    for (const Layout& l : enumerate_layouts(r).layouts) {
        const std::string& name = schedule_generators()[size_t(l.schedule)].name;
        if ((l.tp == 2 || l.tp == 4) && l.pp > 1 &&
            (name == "zero-bubble" || (name == "interleaved" && l.virtual_stages == 3)) && l.zero == 1 &&
            l.recompute == Recompute::full && l.sequence_parallel && l.micro_batch == 2)
            expected.push_back(l);
    }
    std::vector<Layout> found;
    for (const Layout& l : enumerate_layouts(narrow).layouts)
        if (l.pp > 1) found.push_back(l);
    std::sort(found.begin(), found.end());
    std::sort(expected.begin(), expected.end());
    EXPECT(found == expected);
    EXPECT(!found.empty());
}

TEST_CASE("layers over stages: all of them, at most one more on a stage, fewer at the ends") {
    for (int64_t layers = 1; layers <= 40; ++layers)
        for (int64_t count = 1; count <= layers; ++count) {
            const std::vector<int64_t> sizes = divide_layers(layers, count);
            int64_t sum = 0;
            for (const int64_t size : sizes) sum += size;
            INFO(layers << " over " << count);
            EXPECT(sum == layers);
            EXPECT(int64_t(sizes.size()) == count);
            const auto [least, most] = std::minmax_element(sizes.begin(), sizes.end());
            EXPECT(*most - *least <= 1);
            EXPECT(sizes.back() == *least);
            if (layers % count <= count - 2) EXPECT(sizes.front() == *least);
        }
    EXPECT(divide_layers(126, 16).front() == 7);  // as Llama 3's: 126 layers on 16 stages, one less at both ends
    EXPECT(divide_layers(126, 16)[1] == 8);
}

TEST_CASE("pruning is the memory formula, over all ranks, with room for its error") {
    for (const int64_t gpus : {4, 12}) {
        const PlanRequest r = small_request(gpus);
        const Enumeration all = enumerate_layouts(r);
        std::vector<double> totals;
        for (const Layout& layout : all.layouts) {
            const ParallelConfig config = config_of(r, layout);
            int64_t most = 0;
            for (int64_t rank = 0; rank < gpus; ++rank)
                most = std::max(most, memory_formula(workload_of(r, layout), config, rank).total);
            INFO(flags_of(r, layout));
            EXPECT(largest_rank(r, layout).second.total == most);
            totals.push_back(double(most));
        }
        std::vector<double> sorted = totals;
        std::sort(sorted.begin(), sorted.end());
        for (const size_t at : {size_t(0), sorted.size() / 3, sorted.size() - 1}) {
            const double limit = sorted[at], may_fit = limit / (1 - kFormulaError);
            const auto up_to = [&](double bytes) {
                return std::count_if(totals.begin(), totals.end(), [&](double total) { return total <= bytes; });
            };
            const Choice choice = choose(r, ideal(gpus), limit, 7);
            EXPECT(choice.fit == up_to(limit));
            EXPECT(choice.layouts == int64_t(totals.size()));
            int64_t fit = 0;
            std::map<std::tuple<bool, std::string>, std::map<std::string, int64_t>> of_mesh;
            for (const Candidate& candidate : choice.best) {
                const bool fits = double(candidate.memory.total) <= limit;
                EXPECT(double(candidate.memory.total) <= may_fit);
                fit += fits;
                Layout l = candidate.layout;
                l.virtual_stages = 1;
                ++of_mesh[{fits, config_of(r, l).mesh.text()}][flags_of(r, l)];
            }
            EXPECT((fit > 0 && fit <= 7));
            for (const auto& [mesh, variants] : of_mesh) {
                int64_t all_of = 0;
                for (const auto& [variant, count] : variants) {
                    all_of += count;
                    EXPECT(count <= kMostOfVariant);
                }
                EXPECT(all_of <= kMostOfMesh);
            }
            for (size_t i = 1; i < choice.best.size(); ++i)
                EXPECT(choice.best[i - 1].estimate.seconds() <= choice.best[i].estimate.seconds());
            // All that may fit, none else.
            const Choice everything = choose(r, ideal(gpus), limit, INT64_MAX);
            int64_t groups_fit = 0;
            for (const LayoutGroup& group : everything.groups) {
                groups_fit += group.fit;
                EXPECT(group.best.has_value() == (group.fit > 0));
                EXPECT(group.smallest.has_value() == (group.fit == 0));
            }
            EXPECT(groups_fit == choice.fit);
        }
        // What is above the limit by less than the formula's error may fit, and is left to its recording.
        const Choice near = choose(r, ideal(gpus), sorted[0] * (1 - 0.9 * kFormulaError), 7);
        EXPECT(near.fit == 0);
        EXPECT(!near.best.empty());
        const Choice none = choose(r, ideal(gpus), sorted[0] * (1 - 1.1 * kFormulaError), 7);
        EXPECT(none.best.empty());
        REQUIRE(none.smallest.has_value());
        EXPECT(double(none.smallest->memory.total) == sorted[0]);
        EXPECT(any_fits(r, sorted[0]));
        EXPECT(!any_fits(r, sorted[0] - 1));
    }
}

TEST_CASE("the fewest devices: the first number on which a layout fits") {
    PlanRequest r = small_request(1);
    r.gpus_per_node = 8;
    PlanRequest eight = small_request(8);
    const double limit = double(choose(eight, ideal(8), 1e18, 1).best[0].memory.total);
    for (const double part : {1.0, 0.7, 0.4}) {
        const int64_t found = fewest_gpus(r, limit * part);
        int64_t expected = 0;
        for (int64_t n = 1; n <= 64 && expected == 0; ++n) {
            if (n > 8 && n % 8 != 0) continue;
            PlanRequest some = r;
            some.gpus = n;
            for (const Layout& layout : enumerate_layouts(some).layouts)
                if (double(largest_rank(some, layout).second.total) <= limit * part) expected = n;
        }
        INFO("limit " << limit * part);
        EXPECT(found == expected);
    }
    EXPECT(fewest_gpus(r, 1.0) == 0);
}
