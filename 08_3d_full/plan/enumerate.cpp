#include "08_3d_full/plan/enumerate.h"

#include <map>
#include <numeric>

#include "01_single_gpu/core/registry.h"

namespace train70b {

namespace {

const std::vector<int64_t> kMicroBatches = {1, 2, 4, 8};
constexpr int64_t kMostVirtualStages = 10;
constexpr double kMostUneven = 1.2;   // the largest stage's layers over the mean
constexpr int64_t kLeastRows = 1024;  // of a call of attention over cp > 1 ranks

std::vector<int64_t> divisors(int64_t n) {  // ascending
    std::vector<int64_t> all;
    for (int64_t i = 1; i <= n; ++i)
        if (n % i == 0) all.push_back(i);
    return all;
}

// A schedule with its number of model chunks.
struct ScheduleChunks {
    int64_t schedule, chunks;
};

class Enumerator {
  public:
    explicit Enumerator(const PlanRequest& request) : r_(request), c_(request.model) {}

    Enumeration all() {
        for (const int64_t tp : divisors(r_.gpus)) {
            if (!allowed(r_.tp, tp)) continue;
            if (const std::string why = why_not_tp(tp); !why.empty()) {
                leave_out("tp", tp, why);
                continue;
            }
            for (const int64_t cp : divisors(r_.gpus / tp)) {
                if (!allowed(r_.cp, cp)) continue;
                if (const std::string why = why_not_cp(cp, tp); !why.empty()) {
                    leave_out("cp", cp, why);
                    continue;
                }
                for (const int64_t pp : divisors(r_.gpus / tp / cp))
                    if (allowed(r_.pp, pp)) meshes({.tp = tp, .cp = cp, .dp = r_.gpus / (tp * cp * pp), .pp = pp});
            }
        }
        for (const auto& [key, sizes] : others_)
            found_.others.push_back({key.first, key.second, {sizes.begin(), sizes.end()}});
        const bool pipelines = std::ranges::any_of(found_.layouts, [](const Layout& layout) { return layout.pp > 1; });
        for (const ScheduleGenerator& entry : schedule_generators())
            if (pipelines && r_.pipeline.empty() && entry.on_request)
                found_.others.push_back(
                    {entry.name, fmt::format("{} (--pipeline {} asks for it)", entry.on_request, entry.name), {}});
        return std::move(found_);
    }

  private:
    void leave_out(const std::string& what, int64_t size, const std::string& why) { others_[{what, why}].insert(size); }

    std::string why_not_tp(int64_t tp) const {
        if (c_.heads % tp != 0) return fmt::format("--heads {} is not divisible by it", c_.heads);
        if (c_.ffn % tp != 0) return fmt::format("--ffn {} is not divisible by it", c_.ffn);
        if (!c_.heads_divide_by(tp))
            return fmt::format("--kv-heads {} is not divisible by it, nor it by --kv-heads", c_.kv_heads);
        const ExpertsConfig& x = c_.experts;
        if (x.count == 0 || tp == 1) return "";
        if (x.shared * x.ffn % tp != 0)
            return fmt::format("--shared-experts {} of --expert-ffn {} are not divisible by it", x.shared, x.ffn);
        if (!allowed<std::string>(r_.sequence_parallel, "on"))
            return "experts need --sequence-parallel on, which gives each rank its own rows";
        return "";
    }

    std::string why_not_cp(int64_t cp, int64_t tp) const {
        if (cp == 1) return "";
        const ContextAlgorithm& algorithm = find_entry(context_algorithms(), "--cp-algorithm", r_.cp_algorithm);
        const int64_t ulysses = algorithm.ulysses(cp, 0);
        if (cp % ulysses != 0) return fmt::format("not divisible by {} ({})", ulysses, r_.cp_algorithm);
        if (!c_.heads_divide_by(ulysses) || !c_.heads_divide_by(tp * ulysses))
            return fmt::format("--heads and --kv-heads of a tp rank are not divisible by it ({})", r_.cp_algorithm);
        const ContextLayout layout{
            .ranks = cp, .ulysses = ulysses, .chunks = algorithm.chunks, .gather = algorithm.gather};
        if (r_.seq_len % layout.granularity() != 0)
            return fmt::format("--seq-len {} is not divisible by {}", r_.seq_len,
                               layout.granularity() == cp ? "it" : "twice that");
        if (const int64_t rows = r_.seq_len * ulysses / layout.granularity(); r_.cp.empty() && rows < kLeastRows)
            return fmt::format("calls of attention with fewer than {} rows, see chapter 06 (--cp asks for them)",
                               kLeastRows);
        return "";
    }

    // Of one tp, cp, dp and pp.
    void meshes(Layout layout) {
        if (c_.experts.count == 0) return mesh(layout);
        if (layout.tp > 1 && (r_.seq_len / layout.cp % layout.tp != 0 || r_.seq_len % layout.tp != 0))
            return leave_out("tp", layout.tp, "experts need --sequence-parallel on, and its rows are not divisible");
        const int64_t ranks = layout.tp * layout.cp * layout.dp;
        for (const int64_t ep : r_.ep)
            if (c_.experts.count % ep != 0)
                leave_out("ep", ep, fmt::format("--experts {} is not divisible by it", c_.experts.count));
            else if (ranks % ep != 0)
                leave_out("ep", ep, fmt::format("the {} ranks of a stage are not divisible by it", ranks));
        for (const int64_t ep : divisors(std::gcd(c_.experts.count, ranks)))
            if (allowed(r_.ep, ep)) {
                layout.ep = ep;
                mesh(layout);
            }
    }

    // All layouts of one mesh.
    void mesh(Layout layout) {
        if (!allowed(r_.dp, layout.dp)) return;
        if (r_.global_batch % layout.dp != 0)
            return leave_out("dp", layout.dp, fmt::format("--global-batch {} is not divisible by it", r_.global_batch));
        if (layout.pp > c_.layers)
            return leave_out("pp", layout.pp, fmt::format("more stages than --layers {}", c_.layers));
        std::vector<int64_t> micro_batches = r_.micro_batch.empty() ? kMicroBatches : r_.micro_batch;
        std::erase_if(micro_batches, [&](int64_t size) { return r_.global_batch / layout.dp % size != 0; });
        if (micro_batches.empty())
            return leave_out(
                "dp", layout.dp,
                fmt::format("--global-batch {} over it is not divisible by --micro-batch", r_.global_batch));
        const bool sharded = layout.dp * layout.cp > 1 || (c_.experts.count > 0 && layout.edp() > 1);
        bool any = false;
        for (const ScheduleChunks& passes : schedules(layout.pp))
            for (const int64_t micro_batch : micro_batches) {
                layout.schedule = passes.schedule, layout.virtual_stages = passes.chunks;
                layout.micro_batch = micro_batch;
                const ScheduleGenerator& generator = layout.generator();
                if (!generator.problem(layout.pp, r_.global_batch / (layout.dp * micro_batch)).empty()) {
                    leave_out(generator.name + " with pp", layout.pp, "micro-batches are too few, or not divisible");
                    continue;
                }
                any = true;
                for (int64_t zero = 0; zero <= (sharded ? 3 : 0); ++zero) {
                    if (!allowed(r_.zero, zero)) continue;
                    layout.zero = zero;
                    for (const int64_t ranks : shard_groups(layout)) {
                        layout.hybrid_shard = ranks;
                        precision(layout);
                    }
                }
            }
        if (!any && layout.pp > 1) leave_out("pp", layout.pp, "no schedule for these layers and micro-batches");
    }

    void precision(Layout layout) {
        for (const std::string& level : recompute_names()) {
            if (!allowed(r_.recompute, level)) continue;
            layout.recompute = recompute_of(level);
            for (const bool on : {false, true}) {
                if (on && (layout.tp == 1 || r_.seq_len / layout.cp % layout.tp != 0 || r_.seq_len % layout.tp != 0))
                    continue;
                if (layout.tp > 1 && !allowed(r_.sequence_parallel, std::string(on ? "on" : "off"))) continue;
                if (layout.tp > 1 && !on && c_.experts.count > 0) continue;
                layout.sequence_parallel = on;
                for (const bool overlap : {false, true}) {
                    if (overlap && (layout.tp == 1 || r_.fp8.recipe != "off")) continue;
                    if (overlap && !on && r_.tp_overlap.empty()) continue;  // without it, g has nothing beside it
                    if (layout.tp > 1 && !allowed(r_.tp_overlap, std::string(overlap ? "on" : "off"))) continue;
                    layout.tp_overlap = overlap;
                    found_.layouts.push_back(layout);
                }
            }
        }
    }

    // Sizes of ZeRO's shard groups; 0: all ranks.
    std::vector<int64_t> shard_groups(const Layout& layout) const {
        std::vector<int64_t> sizes;
        const int64_t ranks = layout.dp * layout.cp;
        if (layout.zero == 0 || (c_.experts.count > 0 && layout.own_edp())) {
            if (allowed(r_.hybrid_shard, int64_t(0))) sizes.push_back(0);
            return sizes;
        }
        for (const int64_t size : r_.hybrid_shard)
            if (size < ranks && (size == 0 || ranks % size == 0)) sizes.push_back(size);
        if (!r_.hybrid_shard.empty()) return sizes;
        sizes.push_back(0);
        if (layout.zero < 3) return sizes;
        for (int64_t size = std::max<int64_t>(r_.gpus_per_node / layout.tp, 1); size < ranks; size *= 2)
            if (size > 1 && ranks % size == 0) sizes.push_back(size);
        return sizes;
    }

    std::vector<ScheduleChunks> schedules(int64_t pp) const {
        std::vector<ScheduleChunks> list;
        for (size_t i = 0; i < schedule_generators().size(); ++i) {
            const ScheduleGenerator& generator = schedule_generators()[i];
            if (r_.pipeline.empty() ? generator.on_request != nullptr : !allowed(r_.pipeline, generator.name)) continue;
            if (pp == 1) {  // all lists are the same; one of them, the default if it is allowed
                if (generator.name == PipelineOptions().schedule ||
                    (!r_.pipeline.empty() && generator.default_chunks() == 1))
                    return {{int64_t(i), 1}};
                continue;
            }
            const bool loop = generator.chunks == ScheduleGenerator::Chunks::loop;
            const int64_t fewest = generator.default_chunks();
            for (int64_t v = fewest; v <= (loop ? kMostVirtualStages : fewest); ++v) {
                if (loop && !allowed(r_.virtual_stages, v)) continue;
                const int64_t count = pp * v, largest = (c_.layers + count - 1) / count;
                if (count <= c_.layers && double(largest * count) <= kMostUneven * double(c_.layers))
                    list.push_back({int64_t(i), v});
            }
        }
        return list;
    }

    const PlanRequest& r_;
    const LlamaConfig& c_;
    Enumeration found_;
    std::map<std::pair<std::string, std::string>, std::set<int64_t>> others_;  // sizes, by what and why
};

}  // namespace

Enumeration enumerate_layouts(const PlanRequest& request) { return Enumerator(request).all(); }

std::vector<int64_t> divide_layers(int64_t layers, int64_t count) {
    if (count > layers) return {};
    const int64_t more = layers % count, first = more <= count - 2 ? 1 : 0;
    std::vector<int64_t> sizes(size_t(count), layers / count);
    for (int64_t i = first; i < first + more; ++i) ++sizes[size_t(i)];
    return sizes;
}

std::set<int64_t> outer_stages(const Layout& layout) { return {0, std::min<int64_t>(1, layout.pp - 1), layout.pp - 1}; }

std::string name_of(Recompute level) { return recompute_names().at(size_t(level)); }

std::string short_text(const Layout& l) {
    std::string text = fmt::format("tp {}", l.tp);
    if (l.cp > 1) text += fmt::format(" cp {}", l.cp);
    text += fmt::format(" pp {} dp {}", l.pp, l.dp);
    if (l.ep > 1) text += fmt::format(" ep {}", l.ep);
    text += fmt::format(" ZeRO-{}", l.zero);
    if (l.hybrid_shard > 0) text += fmt::format(" in {}s", l.hybrid_shard);
    if (l.pp > 1) text += " " + l.generator().name;
    if (l.generator().chunks == ScheduleGenerator::Chunks::loop) text += fmt::format(" x{}", l.virtual_stages);
    text += fmt::format(" mb {} {}", l.micro_batch, name_of(l.recompute));
    if (l.sequence_parallel) text += " sp";
    return l.tp_overlap ? text + " overlap" : text;
}

ParallelConfig config_of(const PlanRequest& request, const Layout& l) {
    ParallelConfig config;
    config.mesh = {.tp = l.tp, .cp = l.cp, .dp = l.dp, .pp = l.pp, .ep = l.ep};
    config.zero.stage = int(l.zero);
    config.zero.hybrid_shard = l.hybrid_shard;
    config.tensor.sequence_parallel = l.sequence_parallel;
    config.tensor.overlap = l.tp_overlap;
    config.pipeline.schedule = l.generator().name;
    if (l.generator().chunks == ScheduleGenerator::Chunks::loop) config.pipeline.virtual_stages = l.virtual_stages;
    if (const int64_t count = l.pp * l.virtual_stages; request.model.layers % count != 0)
        config.pipeline.stage_layers = divide_layers(request.model.layers, count);
    if (l.cp > 1) config.context.algorithm = request.cp_algorithm;
    config.fp8 = request.fp8;
    config.optimizer = request.optimizer;
    return config;
}

Workload workload_of(const PlanRequest& request, const Layout& l) {
    return {{.dtype = request.dtype, .grad_dtype = request.grad_dtype, .recompute = l.recompute},
            request.model,
            request.seq_len,
            l.micro_batch,
            request.global_batch};
}

std::string flags_of(const PlanRequest& request, const Layout& l) {
    const ParallelConfig config = config_of(request, l);
    std::string text = fmt::format("--tp {} --cp {} --dp {} --pp {}", l.tp, l.cp, l.dp, l.pp);
    if (l.ep > 1) text += fmt::format(" --ep {}", l.ep);
    text += fmt::format(" --zero {}", l.zero);
    if (l.hybrid_shard > 0) text += fmt::format(" --hybrid-shard {}", l.hybrid_shard);
    if (l.pp > 1) text += " --pipeline " + config.pipeline.schedule;
    if (config.pipeline.virtual_stages > 0) text += fmt::format(" --virtual-stages {}", l.virtual_stages);
    for (size_t i = 0; i < config.pipeline.stage_layers.size(); ++i)
        text += fmt::format("{}{}", i == 0 ? " --stage-layers " : ",", config.pipeline.stage_layers[i]);
    if (l.sequence_parallel) text += " --sequence-parallel on";
    if (config.tensor.overlap) text += " --tp-overlap on";
    if (l.cp > 1) text += " --cp-algorithm " + request.cp_algorithm;
    if (request.fp8.recipe != "off") text += " --fp8 " + request.fp8.recipe;
    if (request.optimizer != "adamw") text += " --optimizer " + request.optimizer;
    return text + fmt::format(" --micro-batch {} --recompute {}", l.micro_batch, name_of(l.recompute));
}

}  // namespace train70b
