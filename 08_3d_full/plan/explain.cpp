#include "08_3d_full/plan/explain.h"

#include <algorithm>
#include <span>

#include "07_fp8/complete/optimizers.h"
#include "08_3d_full/experts/expert_parallel.h"

namespace train70b {

namespace {

std::string human(double number) {  // 1.5e13 -> "15 T"
    const char* units[] = {"", " k", " M", " G", " T", " P"};
    int unit = 0;
    while (number >= 999.5 && unit < 5) number /= 1000, ++unit;
    return fmt::format("{:.{}f}{}", number, unit == 0 || number >= 100 ? 0 : number < 10 ? 2 : 1, units[unit]);
}

std::string share(double part, double of) { return fmt::format("{:.1f}%", 100 * part / of); }

std::string largest_kind(const MemoryPeak& peak) {
    const auto largest = std::max_element(peak.kind.begin(), peak.kind.begin() + kDeviceMemoryKinds);
    return fmt::format("{} {} GB", kMemoryNames[size_t(largest - peak.kind.begin())], gigabytes(double(*largest)));
}

Column ep_column(bool shown) { return shown ? Column("ep") : Column("ep").text_only().csv_only(); }

// The fastest layout that fits, of the groups for which `which` is true.
const Candidate* fastest(const Choice& choice, const auto& which) {
    const Candidate* found = nullptr;
    for (const LayoutGroup& group : choice.groups)
        if (group.best && which(group) && (!found || group.best->estimate.seconds() < found->estimate.seconds()))
            found = &*group.best;
    return found;
}

// Why data parallelism alone is none of the layouts.
std::string why_not_alone(const PlanRequest& r) {
    for (const auto& [flag, values] : {std::pair("--tp", &r.tp), {"--cp", &r.cp}, {"--pp", &r.pp}, {"--ep", &r.ep}})
        if (!allowed<int64_t>(*values, 1)) return fmt::format("not among the layouts that {} asks for", flag);
    if (!allowed(r.dp, r.gpus)) return "not among the layouts that --dp asks for";
    return fmt::format("not possible, --global-batch {} has {:.3g} sequences per device", r.global_batch,
                       double(r.global_batch) / double(r.gpus));
}

}  // namespace

std::string text_of(const LeftOut& other) {
    std::string text = other.what;
    for (size_t i = 0; i < other.sizes.size(); ++i) text += fmt::format("{} {}", i > 0 ? "," : "", other.sizes[i]);
    return text + ": " + other.why;
}

std::string gigabytes(double bytes) {
    return fmt::format("{:.{}f}", bytes / 1e9, bytes < 9.95e9 ? 2 : bytes < 999.5e9 ? 1 : 0);
}

double Prediction::tokens_per_s_per_gpu(const PlanRequest& r) const {
    return double(r.global_batch) * double(r.seq_len) / seconds / double(r.gpus);
}

double Prediction::mfu(const PlanRequest& r, const DeviceModel& device) const {
    return tokens_per_s_per_gpu(r) * flops_per_token(r.model, r.model.attended(double(r.seq_len))) / device.peak_bf16;
}

Prediction estimated(const Candidate& candidate) {
    const Estimate& e = candidate.estimate;
    Prediction p{
        candidate, e.seconds(), false, e.bubble / e.seconds(), {{"tp", e.tp}, {"cp", e.cp}, {"pp", e.pp}, {"dp", e.dp}},
        0};
    if (e.ep > 0) p.exposed.emplace_back("ep", e.ep);
    return p;
}

std::vector<Prediction> ordered(std::vector<Prediction> all, double device_bytes, double limit) {
    std::ranges::stable_sort(all, {}, &Prediction::seconds);
    const auto key = [&](const Prediction& p) {
        const bool tight = limit - p.candidate.bytes() < device_bytes / 10;
        return std::tuple(tight, p.candidate.layout.axes());
    };
    for (size_t begin = 0, end = 0; begin < all.size(); begin = end) {
        const double slowest = (1 + kEqual) * all[begin].seconds;
        while (end < all.size() && all[end].seconds <= slowest) all[end++].equal_to = int64_t(begin) + 1;
        std::ranges::stable_sort(all.begin() + std::ptrdiff_t(begin), all.begin() + std::ptrdiff_t(end), {}, key);
    }
    return all;
}

Table best_table(const PlanRequest& request, const DeviceModel& device, const std::vector<Prediction>& best,
                 const Choice& choice, const std::string& caption) {
    Table table(caption,
                {Column("").left(), Column("layout").left(), "tokens/s/GPU", "MFU", "step, s", "GB", "free, GB",
                 "pp wait", "tp", "cp", "pp", "dp", ep_column(request.model.experts.count > 0), Column("by").left()});
    int64_t number = 0;
    bool some_equal = false;
    for (const Prediction& prediction : best) {
        const auto exposed = [&](const std::string& name) {
            double seconds = 0;
            for (const auto& [group, s] : prediction.exposed)
                if (group == name) seconds += s;
            return percent(seconds / prediction.seconds);
        };
        const bool equal = ++number != prediction.equal_to;
        some_equal = some_equal || equal;
        const int64_t bytes = prediction.candidate.memory.total;
        table.row({equal ? fmt::format("{} = {}", number, prediction.equal_to) : std::to_string(number),
                   short_text(prediction.candidate.layout), fixed(prediction.tokens_per_s_per_gpu(request), 0),
                   percent(prediction.mfu(request, device)), fixed(prediction.seconds, 2),
                   Cell(gigabytes(double(bytes)), std::to_string(bytes)), gigabytes(choice.limit - double(bytes)),
                   percent(prediction.pp_wait), exposed("tp"), exposed("cp"), exposed("pp"), exposed("dp"),
                   exposed("ep"), prediction.simulated ? "simulation" : "estimate"});
    }
    if (!some_equal) return table;
    table.note(
        fmt::format("= N: as fast as N: within {:.0f}%, the median error of such a ratio in 13 published pairs, "
                    "ten of one sweep (docs/published.md);",
                    100 * kEqual));
    table.note(
        "of equal ones those with a tenth of the device's memory free come first, then those with the fewest axes");
    return table;
}

Table groups_table(const Choice& choice, const Candidate& winner, const DeviceModel& device, size_t most_rows) {
    const bool experts = std::ranges::any_of(choice.groups, [](const LayoutGroup& g) { return g.ep > 1; });
    Table table("why the others lost",
                {"tp", "cp", "pp", ep_column(experts), "layouts", "fit", "best of them", Column("why").left()});
    std::vector<const LayoutGroup*> order;
    for (const LayoutGroup& group : choice.groups) order.push_back(&group);
    const auto key = [](const LayoutGroup* g) {
        return std::tuple(!g->best, g->best ? g->best->estimate.seconds() : g->smallest->bytes(), g->tp, g->pp, g->ep);
    };
    std::ranges::sort(order, {}, key);
    const double fastest_s = winner.estimate.seconds();
    const Layout& w = winner.layout;
    for (const LayoutGroup* g : std::span(order).first(std::min(order.size(), most_rows))) {
        std::string best = "-", why;
        if (g->best) {
            best = fmt::format("{:.2f} x", g->best->estimate.seconds() / fastest_s);
            const bool won = std::tuple(g->tp, g->cp, g->pp, g->ep) == std::tuple(w.tp, w.cp, w.pp, w.ep);
            why = won ? "holds the first" : why_slower(g->best->estimate, winner.estimate);
        } else {
            const double total = g->smallest->bytes();
            why = fmt::format("memory: at least {} GB, {} too much for a {} ({})", gigabytes(total),
                              gigabytes(total - choice.limit), device.name, largest_kind(g->smallest->memory));
        }
        table.row({g->tp, g->cp, g->pp, g->ep, g->layouts, g->fit, best, why});
    }
    if (order.size() > most_rows)
        table.note(fmt::format("({} more groups: slower still, or larger; --groups {} shows all)",
                               order.size() - most_rows, order.size()));
    table.note(
        "best of them: the step of the group's fastest layout over that of the first above, both by the estimate; why: "
        "what it loses, in");
    table.note("percent of the first one's step");
    for (const LeftOut& other : choice.others) table.note(text_of(other));
    return table;
}

Table memory_table(const std::vector<Prediction>& best, const Choice& choice) {
    std::vector<Column> columns = {"", "rank"};
    columns.insert(columns.end(), kMemoryNames.begin(), kMemoryNames.begin() + kDeviceMemoryKinds);
    columns.insert(columns.end(), {"total", "free"});
    const bool recorded = !best.empty() && best[0].simulated;
    Table table(fmt::format("memory of the largest rank, GB, peaks of a step{}", recorded ? "" : " by formula"),
                columns);
    int64_t number = 0;
    for (const Prediction& prediction : best) {
        const MemoryPeak& peak = prediction.candidate.memory;
        std::vector<Cell> cells = {++number, prediction.candidate.rank};
        for (int kind = 0; kind < kDeviceMemoryKinds; ++kind)
            cells.push_back(Cell(gigabytes(double(peak.kind[kind])), std::to_string(peak.kind[kind])));
        cells.push_back(Cell(gigabytes(double(peak.total)), std::to_string(peak.total)));
        cells.push_back(gigabytes(choice.limit - double(peak.total)));
        table.row(cells);
    }
    return table;
}

std::vector<std::string> decision_steps(const PlanRequest& r, const ClusterModel& cluster, const Choice& choice,
                                        const Prediction& winner) {
    std::vector<std::string> steps;
    const Layout& w = winner.candidate.layout;
    const LlamaConfig& c = r.model;
    const double parameters = double(c.parameters()), gpus = double(r.gpus);
    const double states =
        double(size_of(r.dtype) + size_of(r.grad_dtype)) + state_bytes(r.optimizer, r.dtype, muon_share(r.model));
    const double all = parameters * states, best_s = winner.candidate.estimate.seconds();
    const auto against = [&](const Candidate& other) {
        return fmt::format("{:.2f} x the chosen step ({})", other.estimate.seconds() / best_s,
                           why_slower(other.estimate, winner.candidate.estimate));
    };

    steps.push_back(fmt::format(
        "Does it fit on one {}? {} parameters x {:.4g} bytes (weights {}, gradients {}, optimizer {:.4g}) = {} GB of "
        "states; it has {} GB for them and for activations: {}",
        cluster.device.name, human(parameters), states, size_of(r.dtype), size_of(r.grad_dtype),
        states - double(size_of(r.dtype) + size_of(r.grad_dtype)), gigabytes(all), gigabytes(choice.limit),
        all < choice.limit ? "yes, if its activations do."
                           : fmt::format("no, {:.1f} times too large.", all / choice.limit)));

    const auto data_alone = [](const auto& l) { return l.tp == 1 && l.cp == 1 && l.pp == 1 && l.ep == 1; };
    const Candidate* data = fastest(choice, data_alone);
    const double batch = double(r.global_batch) / gpus;
    if (data) {
        steps.push_back(fmt::format(
            "Data parallelism alone: ZeRO-{} over {} devices holds {} GB of {} GB; {:.3g} sequences per device. {}",
            data->layout.zero, data->layout.dp * data->layout.cp, gigabytes(data->bytes()), gigabytes(choice.limit),
            batch,
            data_alone(w) ? fmt::format("Chosen, with ZeRO-{}.", w.zero)
                          : fmt::format("It takes {}.", against(*data))));
    } else {
        const auto group = std::find_if(choice.groups.begin(), choice.groups.end(), data_alone);
        steps.push_back(
            group == choice.groups.end()
                ? fmt::format("Data parallelism alone: {}.", why_not_alone(r))
                : fmt::format("Data parallelism alone: even ZeRO-{} over {} devices needs {} GB ({}): {} too much.",
                              group->smallest->layout.zero, r.gpus, gigabytes(group->smallest->bytes()),
                              largest_kind(group->smallest->memory),
                              gigabytes(group->smallest->bytes() - choice.limit)));
    }

    const Estimator estimator(r, cluster);
    Layout full = w;
    full.tp = std::max<int64_t>(w.tp, 2);
    const double rows = double(w.micro_batch * r.seq_len / w.cp);
    const Candidate* none = fastest(choice, [](const LayoutGroup& g) { return g.tp == 1; });
    const Candidate* beyond = fastest(choice, [&](const LayoutGroup& g) { return g.tp > cluster.gpus_per_node; });
    std::string text = fmt::format(
        "Tensor parallelism, inside a node of {}: {} heads and {} key/value heads; {} MB per layer and micro-batch "
        "({:.0f} tokens), {}. Chosen: tp {}",
        cluster.gpus_per_node, c.heads, c.kv_heads, fmt::format("{:.0f}", estimator.tp_bytes_per_layer(full) / 1e6),
        rows, w.tp_overlap || w.tp == 1 ? "hidden where --tp-overlap puts a product beside it" : "none of it hidden",
        w.tp);
    if (w.tp > 1)
        text += fmt::format(", {} of the step; tp 1{}", share(winner.candidate.estimate.tp, best_s),
                            none ? ": " + against(*none) : " fits in no layout");
    if (beyond) text += fmt::format("; tp {}, over nodes: {}", beyond->layout.tp, against(*beyond));
    steps.push_back(text + ".");

    if (c.experts.count > 0) {
        const double routed = double(c.sparse_layers() * c.experts.count) * 3 * double(c.experts.ffn * c.hidden);
        const Candidate* other = fastest(choice, [&](const LayoutGroup& g) { return g.ep != w.ep; });
        const int64_t ep = w.ep > 1 || !other ? w.ep : other->layout.ep;
        text = fmt::format(
            "Expert parallelism, over consecutive ranks: {} of the parameters are experts', {} of {} in a layer for a "
            "token; with ep {} a rank sends {:.0f} MB per layer and micro-batch. Chosen: ep {}, {} of the step "
            "exposed; {} rank{} with the same experts",
            share(routed, parameters), c.experts.top_k, c.experts.count, ep,
            double(expert_traffic(c, ep, w.micro_batch * r.seq_len / (w.cp * w.tp), r.dtype, w.recompute)) / 1e6, w.ep,
            share(winner.candidate.estimate.ep, best_s), w.edp(), w.edp() == 1 ? "" : "s");
        if (other) text += fmt::format("; the best with another: ep {}, {}", other->layout.ep, against(*other));
        steps.push_back(text + ".");
    }

    const Candidate* flat = fastest(choice, [](const LayoutGroup& g) { return g.pp == 1; });
    const int64_t m = r.global_batch / (w.dp * w.micro_batch);
    if (w.pp > 1) {
        const ScheduleGenerator& generator = w.generator();
        text = fmt::format(
            "Pipeline: what tp leaves are {} GB of states per model copy and tp rank. Chosen: pp {}, {}{}, {} "
            "micro-batches; bubble {:.1f}% by formula",
            gigabytes(all / double(w.tp)), w.pp, generator.name,
            w.virtual_stages > 1 && generator.chunks == ScheduleGenerator::Chunks::loop
                ? fmt::format(" with {} model chunks per rank", w.virtual_stages)
                : "",
            m, 100 * generator.bubble({w.pp, m, w.virtual_stages}));
        text +=
            flat ? fmt::format("; without a pipeline: {}.", against(*flat)) : "; without a pipeline no layout fits.";
    } else {
        const Candidate* some = fastest(choice, [](const LayoutGroup& g) { return g.pp > 1; });
        text = "Pipeline: not needed";
        text += some ? fmt::format("; the best with one: pp {}, {}.", some->layout.pp, against(*some)) : ".";
    }
    steps.push_back(text);

    const double attention = 6.0 * double(c.layers) * double(c.q_width()) * c.attended(double(r.seq_len));
    text = fmt::format("Context parallelism: at {} tokens attention is {} of the FLOPs. Chosen: cp {}", r.seq_len,
                       share(attention, flops_per_token(c, c.attended(double(r.seq_len)))), w.cp);
    const Candidate* whole = fastest(choice, [](const LayoutGroup& g) { return g.cp == 1; });
    const Candidate* divided = fastest(choice, [](const LayoutGroup& g) { return g.cp > 1; });
    if (w.cp > 1) {
        text += fmt::format(", {} of the step exposed; ", share(winner.candidate.estimate.cp, best_s));
        text += whole ? fmt::format("cp 1: {}", against(*whole)) : "with whole sequences no layout fits";
    } else if (divided) {
        text += fmt::format("; the best with more: cp {}, {}", divided->layout.cp, against(*divided));
    }
    for (const LeftOut& other : choice.others)
        if (other.what == "cp" && other.why.find("rows") != other.why.npos) text += "; left out: " + text_of(other);
    steps.push_back(text + ".");
    steps.push_back(fmt::format(
        "What is left, {} / ({} x {} x {}) = {}, is data parallelism, with ZeRO-{}{}: {} of the step exposed. "
        "Micro-batches of {} sequence{}; recomputation: {}, {} of the step{}. {} of {} GB.",
        r.gpus, w.tp, w.cp, w.pp, w.dp, w.zero,
        w.hybrid_shard > 0
            ? fmt::format(" in groups of {}, replicated over {}", w.hybrid_shard, w.dp * w.cp / w.hybrid_shard)
            : "",
        share(winner.candidate.estimate.dp, best_s), w.micro_batch, w.micro_batch == 1 ? "" : "s", name_of(w.recompute),
        share(winner.candidate.estimate.recompute, best_s),
        w.sequence_parallel ? "; sequence parallelism divides the rest of the activations by tp" : "",
        gigabytes(winner.candidate.bytes()), gigabytes(choice.limit)));
    return steps;
}

RunCost run_cost(double tokens, double tokens_per_s, double gpus, double price_per_gpu_hour) {
    const double seconds = tokens / tokens_per_s, hours = gpus * seconds / 3600;
    return {seconds / kSecondsPerDay, hours, hours * price_per_gpu_hour};
}

double checkpoint_bytes(const PlanRequest& r) {
    return double(r.model.parameters()) * checkpoint_bytes(r.optimizer, r.dtype, muon_share(r.model));
}

Table budget_table(const PlanRequest& r, const Prediction& winner, const BudgetOptions& o) {
    const double gpus = double(r.gpus), rate = winner.tokens_per_s_per_gpu(r) * gpus;
    const double parameters = double(r.model.parameters()), batch = double(r.global_batch * r.seq_len);
    Table table(fmt::format("budget: {} tokens per day at {:.0f} tokens/s of all GPUs; {:.4g} dollars per GPU-hour",
                            human(rate * kSecondsPerDay), rate, o.price),
                {Column("tokens").left(), "number", "steps", "days", "GPU-hours", "dollars"});
    const auto row = [&](const std::string& name, double tokens) {
        const RunCost cost = run_cost(tokens, rate, gpus, o.price);
        table.row({name, Cell(human(tokens), tokens), fixed(tokens / batch, 0), fixed(cost.days, 1),
                   Cell(human(cost.gpu_hours), cost.gpu_hours), Cell(human(cost.price), cost.price)});
    };
    row("20 per parameter (Chinchilla)", kTokensPerParameter * parameters);
    row("--tokens", o.tokens);
    table.note(fmt::format("checkpoint: {} GB; its weights alone: {} GB", gigabytes(checkpoint_bytes(r)),
                           gigabytes(double(size_of(stats_dtype(r.dtype))) * parameters)));
    return table;
}

}  // namespace train70b
