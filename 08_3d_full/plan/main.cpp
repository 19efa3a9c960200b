// The planner: for a model and a cluster, which layout to train with, what it will reach, and why not another.
//
// Run:   build/bin/plan --model 70b --gpus 64 --cluster h100-8x8.json --seq-len 4096 --global-batch 1024
//        build/bin/plan --model 8b --gpus 128 --cluster h100-8x8.json --seq-len 1048576 --global-batch 8 --csv 1m.csv
//        build/bin/plan --tp-efficiency 08_3d_full/complete/layout/links.json
//        build/bin/plan --model 405b --gpus 16384 --cluster h100-8x8.json --seq-len 8192 --global-batch 2048 --tp 8
// Watch: memory excludes most layouts; bubble, tp and recomputation decide among the rest. The first list comes after
//        seconds, by the estimate; then the best are simulated, and each comes with the flags of chapter 08. Exit code
//        2 if no layout fits: how much is missing, and how many devices do.
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <nlohmann/json.hpp>
#include <thread>

#include "01_single_gpu/complete/data/data.h"
#include "01_single_gpu/complete/flags/options.h"
#include "01_single_gpu/complete/report/report.h"
#include "01_single_gpu/core/files.h"
#include "01_single_gpu/core/registry.h"
#include "07_fp8/complete/flags.h"
#include "08_3d_full/plan/simulate_best.h"
#include "08_3d_full/plan/tp_efficiency.h"

using namespace train70b;

namespace {

// How far a computation is, on stderr: on a terminal one line, written again and again; else one every ten seconds.
class ProgressLine {
  public:
    ~ProgressLine() { clear(); }
    void show(const char* what, double part) {
        const auto now = std::chrono::steady_clock::now();
        if (now < next_) return;
        next_ = now + (terminal_ ? std::chrono::milliseconds(200) : std::chrono::seconds(10));
        fmt::print(stderr, "{}plan: {}: {:.0f}%{}", terminal_ ? "\r\033[K" : "", what, 100 * part,
                   terminal_ ? "" : "\n");
        shown_ = terminal_;
    }
    void clear() {
        if (std::exchange(shown_, false)) std::fputs("\r\033[K", stderr);
    }

  private:
    const bool terminal_ = isatty(STDERR_FILENO) == 1;
    bool shown_ = false;
    std::chrono::steady_clock::time_point next_ =
        std::chrono::steady_clock::now() + (terminal_ ? std::chrono::milliseconds(500) : std::chrono::seconds(10));
};

// Beyond those that are printed, layouts that are slower than this by the estimate are not simulated.
constexpr double kFarBehind = 1.1;

constexpr int64_t kMostGpus = 131'072, kMostBatch = 1'000'000, kFirstList = 5;

class Planner {
  public:
    Planner() {
        const Check json_file{{}, "FILE.json"};
        const auto no_default = [this](const char* flag, auto& value, const char* text, const Check& check) {
            flags_.add(flag, value, text, check).default_text("");
        };
        model_.add_to(flags_);
        flags_.group("Cluster");
        no_default("--cluster", cluster_file_, "cluster file, or the name of one in 08_3d_full/plan/clusters",
                   json_file);
        flags_.add("--gpus", gpus_, "devices; more or fewer nodes like those of the file", integer_from(1, kMostGpus))
            .default_text("those of the file");
        flags_.add("--reserve-gb", reserve_gb_,
                   "GB of a device that are not for tensors: its context, NCCL's buffers, workspace of libraries, "
                   "fragmentation",
                   real_number(0, 1e6));
        no_default("--tp-efficiency", efficiency_file_,
                   "print only what the links of this cluster leave of tensor parallelism", json_file);
        flags_.group("Workload");
        flags_.add("--seq-len", request_.seq_len, "tokens per sequence", integer_from(1));
        no_default("--global-batch", request_.global_batch, "sequences per optimizer step",
                   integer_from(1, kMostBatch));
        flags_.add("--grad-dtype", grad_dtype_, "dtype of gradients; weights are bf16", one_of({"fp32", "bf16"}));
        flags_.add("--fp8", request_.fp8.recipe, "FP8 scaling recipe of the linear layers", one_of(fp8_values()));
        flags_.add("--optimizer", request_.optimizer,
                   "optimizer; adamw8bit: moments of 1 byte; muon: see 08_3d_full --help", one_of(optimizer_names()));
        flags_.add("--cp-algorithm", request_.cp_algorithm, "attention algorithm over the context-parallel ranks",
                   one_of(names_of(context_algorithms())));
        flags_.group("Layouts to choose from (a list a,b,...; default: all)");
        const auto ranks = integer_from(1, kMostGpus);
        no_default("--tp", request_.tp, "tensor-parallel ranks", ranks);
        no_default("--cp", request_.cp, "context-parallel ranks", ranks);
        no_default("--dp", request_.dp, "data-parallel ranks", ranks);
        no_default("--pp", request_.pp, "pipeline stages", ranks);
        no_default("--ep", request_.ep, "expert-parallel ranks, of the tp x cp x dp ranks of a stage", ranks);
        no_default("--zero", request_.zero, "ZeRO stages", integer_from(0, 3));
        no_default("--hybrid-shard", request_.hybrid_shard, "ranks of ZeRO's shard groups; 0: all",
                   integer_from(0, kMostGpus));
        no_default("--micro-batch", request_.micro_batch, "sequences per micro-batch", integer_from(1, kMostBatch));
        no_default("--virtual-stages", request_.virtual_stages, "model chunks per rank of --pipeline interleaved",
                   integer_from(1, 1000));
        no_default("--pipeline", request_.pipeline, "pipeline schedules", one_of(names_of(schedule_generators())));
        no_default("--recompute", request_.recompute, "what to recompute", one_of(recompute_names()));
        no_default("--sequence-parallel", request_.sequence_parallel, "sequence parallelism", one_of({"on", "off"}));
        no_default("--tp-overlap", request_.tp_overlap, "overlap tp's communication with matrix products",
                   one_of({"on", "off"}));
        flags_.group("Output");
        flags_.add("--best", best_, "layouts to print", integer_from(1, 1000));
        flags_
            .add("--simulations", asked_simulations_,
                 "most layouts to simulate, the best by the estimate; 0: the estimate alone", integer_from(0, 10'000))
            .default_text("24; 6 of more than 1024 devices");
        flags_.add("--groups", groups_, "rows of the table of the others", integer_from(0, 10'000));
        flags_.add("--price", budget_.price, "dollars per GPU-hour", real_number(0, 1e6));
        flags_.add("--tokens", budget_.tokens, "tokens to train on, of the budget", real_number(0, 1e18, false));
        no_default("--json", json_.path, "write everything", json_file);
        no_default("--csv", csv_.path, "write the table of the best layouts, or of --tp-efficiency", {{}, "FILE.csv"});
    }

    void run(int argc, char** argv) {
        flags_.parse(argc, argv);
        if (flags_.given("--tp-efficiency")) return print_tp_efficiency();
        for (const char* flag : {"--cluster", "--global-batch"})
            if (!flags_.given(flag)) usage_error("{} is required (--help lists all flags)", flag);
        request_.model = model_.shape(flags_);
        check_flags();
        for (OptionalOutput* file : {&json_, &csv_}) file->open();
        const double limit = cluster_.device.memory_bytes - reserve_gb_ * 1e9;
        Choice choice = choose(request_, cluster_, limit, std::max(best_, simulations_), show_);
        progress_.clear();
        if (choice.layouts == 0) no_layout(choice);
        if (choice.best.empty()) too_small(choice);
        print_first(choice);
        const std::vector<Prediction> best = predictions(choice);
        progress_.clear();
        print(choice, best);
    }

  private:
    // Of a file that must be there; no output overwrites it.
    ClusterModel cluster_of(const std::string& flag, const std::string& file) const {
        if (file.empty()) usage_error("{}: must name a file", flag);
        const std::string path = cluster_path(file);
        std::vector<PathUse> paths = {{flag, path, false}};
        for (const OptionalOutput* output : {&json_, &csv_}) {
            if (flags_.given(output->flag) && !output->given()) usage_error("{}: must name a file", output->flag);
            if (output->given()) paths.push_back({output->flag, output->path, true});
        }
        check_paths(paths);
        return read_cluster(path, flag);
    }

    void print_tp_efficiency() {
        for (const auto& [name, value] : flags_.values().items())
            if (flags_.given("--" + name) && name != "tp-efficiency" && name != "csv")
                usage_error("--{}: has no meaning with --tp-efficiency; leave it out", name);
        cluster_ = cluster_of("--tp-efficiency", efficiency_file_);
        const TpEfficiency tables = tp_efficiency_tables(cluster_, "--tp-efficiency " + efficiency_file_);
        csv_.open();
        say(tables.text);
        csv_.write(tables.csv.csv());
    }

    void check_flags() {
        cluster_ = cluster_of("--cluster", cluster_file_);
        if (gpus_ == 0) gpus_ = cluster_.devices();
        cluster_ = resized(cluster_, gpus_, fmt::format("--gpus {}", gpus_));
        request_.gpus = gpus_;
        simulations_ = asked_simulations_.value_or(gpus_ > 1024 ? 6 : 24);
        request_.gpus_per_node = std::max<int64_t>(cluster_.gpus_per_node, 1);
        request_.grad_dtype = grad_dtype_ == "bf16" ? DType::bf16 : DType::f32;
        if (!(cluster_.device.memory_bytes > 0))
            usage_error("--cluster {}: has no memory_bytes of the device, which a plan needs", cluster_file_);
        if (!(reserve_gb_ * 1e9 < cluster_.device.memory_bytes))
            usage_error("--reserve-gb {}: each {} has {} GB", reserve_gb_, cluster_.device.name,
                        gigabytes(cluster_.device.memory_bytes));
        check_on_gpu(request_.fp8, "--cluster " + cluster_file_);
        if (request_.fp8.recipe != "off" && !(cluster_.device.peak_fp8 > 0))
            usage_error("--fp8 {}: a {} has no FP8 products (try --fp8 off)", request_.fp8.recipe,
                        cluster_.device.name);
        if (request_.fp8.recipe != "off" && request_.tp_overlap == std::vector<std::string>{"on"})
            usage_error("--tp-overlap on: not supported with --fp8 {} (try --tp-overlap off, or --fp8 off)",
                        request_.fp8.recipe);
        for (const auto& [flag, given] :
             {std::pair("--kv-lora-rank", request_.model.latent.kv_rank > 0), {"--mtp on", request_.model.multi_token}})
            if (given) usage_error("{}: not supported by this program (try 08_3d_full --dry-run)", flag);
        const int64_t experts = request_.model.experts.count;
        if (request_.fp8.recipe != "off" && experts > 0)
            usage_error("--fp8 {}: not supported with --experts (try --fp8 off)", request_.fp8.recipe);
        for (const int64_t ep : request_.ep)
            if (ep > 1 && experts == 0) usage_error("--ep {}: needs a model with experts (try --experts {})", ep, ep);
        for (const auto& [flag, values] :
             {std::pair("--tp", &request_.tp), {"--cp", &request_.cp}, {"--dp", &request_.dp}, {"--pp", &request_.pp}})
            for (const int64_t value : *values)
                if (gpus_ % value != 0) usage_error("{} {}: --gpus {} is not divisible by it", flag, value, gpus_);
    }

    [[noreturn]] void no_layout(const Choice& choice) const {
        std::string why;
        for (size_t i = 0; i < choice.others.size() && i < 3; ++i)
            why += (i > 0 ? "; " : "") + text_of(choice.others[i]);
        usage_error("--gpus {}: no layout is possible: {}", gpus_, why.empty() ? "the flags exclude all" : why);
    }

    // Names what makes it large: the model, the shape's flags, the sequence and what is held in reserve.
    [[noreturn]] void too_small(const Choice& choice) const {
        const Candidate& smallest = *choice.smallest;
        const int64_t enough = fewest_gpus(request_, choice.limit);
        std::string flags = model_flags();
        if (!flags_.given("--model")) flags = " --model " + request_.model.name + flags;
        usage_error(
            "{} --seq-len {} --reserve-gb {} --gpus {}: fits in no layout: {} GB per device are missing ({} of {} "
            "GB, with {}); {}",
            flags.substr(1), request_.seq_len, reserve_gb_, gpus_, gigabytes(smallest.bytes() - choice.limit),
            gigabytes(smallest.bytes()), gigabytes(choice.limit), short_text(smallest.layout),
            enough > 0 ? fmt::format("the fewest that work: --gpus {}", enough)
                       : std::string("no number of devices works with these flags"));
    }

    std::string model_flags() const {  // those that were given
        std::string text;
        for (const std::string& flag : ModelFlags::names())
            if (flags_.given(flag))
                text += fmt::format(" {} {}", flag, flags_.values().at(flag.substr(2)).get<std::string>());
        return text;
    }

    // The best by simulation; without one, by the estimate and by formula.
    std::vector<Prediction> predictions(Choice& choice) {
        std::vector<Prediction> all;
        if (simulations_ > 0) {
            const EmptyText text(2 * request_.seq_len + 2);
            const Dataset data(text.path(), std::max<int64_t>(request_.model.vocab, 256), request_.seq_len, 0.0);
            std::vector<Candidate> candidates;
            int64_t fit = 0;  // by formula; of those that only may fit, the recording decides
            for (const Candidate& candidate : choice.best) {
                const bool far_behind =
                    candidate.estimate.seconds() > kFarBehind * choice.best.front().estimate.seconds();
                if (fit == simulations_ || (fit >= best_ && far_behind)) break;
                fit += candidate.bytes() <= choice.limit;
                candidates.push_back(candidate);
            }
            all = simulated(request_, cluster_, data, candidates, choice.limit,
                            int64_t(std::thread::hardware_concurrency()), show_);
            for (const Prediction& prediction : all)
                if (!prediction.simulated &&
                    (!choice.smallest || prediction.candidate.memory.total < choice.smallest->memory.total))
                    choice.smallest = prediction.candidate;
            std::erase_if(all, [](const Prediction& prediction) { return !prediction.simulated; });
        } else {
            all = estimates(choice);
        }
        if (all.empty()) too_small(choice);
        all = ordered(std::move(all), cluster_.device.memory_bytes, choice.limit);
        if (int64_t(all.size()) > best_) all.resize(size_t(best_));
        return all;
    }

    // Of those that fit by formula.
    std::vector<Prediction> estimates(const Choice& choice) const {
        std::vector<Prediction> all;
        for (const Candidate& candidate : choice.best)
            if (candidate.bytes() <= choice.limit) all.push_back(estimated(candidate));
        return all;
    }

    std::string dry_run(const Layout& layout) const {
        return fmt::format(
            "build/bin/08_3d_full{} --seq-len {} --global-batch {} --dtype bf16{} {} --comm fake --fake-world {} "
            "--dry-run",
            model_flags(), request_.seq_len, request_.global_batch,
            grad_dtype_ == "fp32" ? "" : " --grad-dtype " + grad_dtype_, flags_of(request_, layout), gpus_);
    }

    // Before anything is simulated.
    void print_first(const Choice& choice) {
        say("{} ({:.4g} parameters) on {} {} of {}; a step is {} sequences of {}\n", request_.model.name,
            double(request_.model.parameters()), gpus_, cluster_.device.name, cluster_.name, request_.global_batch,
            request_.seq_len);
        say("each has {} GB (of 10^9 bytes) for tensors: {} less --reserve-gb {}\n", gigabytes(choice.limit),
            gigabytes(cluster_.device.memory_bytes), reserve_gb_);
        if (simulations_ > 0) {
            std::vector<Prediction> first = ordered(estimates(choice), cluster_.device.memory_bytes, choice.limit);
            first.resize(std::min(first.size(), size_t(std::min(best_, kFirstList))));
            say(best_table(request_, cluster_.device, first, choice,
                           "first list, by the estimate; the simulation follows"));
        }
        std::fflush(stdout);
    }

    void print(const Choice& choice, const std::vector<Prediction>& best) {
        const Prediction& winner = best.front();
        say("\n{} layouts, of which {} fit {} GB by formula\n", choice.layouts, choice.fit, gigabytes(choice.limit));
        int step = 0;
        say("\nthe decision, step by step (times by the estimate)\n");
        for (const std::string& text : decision_steps(request_, cluster_, choice, winner))
            say("{}. {}\n", ++step, text);
        const Table table =
            best_table(request_, cluster_.device, best, choice, fmt::format("the {} best", best.size()));
        say(table);
        say(memory_table(best, choice));
        say("\ncommands, as dry runs; to train: the same under mpirun -np {}, without --comm fake, --fake-world and "
            "--dry-run\n",
            gpus_);
        for (size_t i = 0; i < best.size(); ++i) say("{}: {}\n", i + 1, dry_run(best[i].candidate.layout));
        if (groups_ > 0) say(groups_table(choice, winner.candidate, cluster_.device, size_t(groups_)));
        say(budget_table(request_, winner, budget_));
        csv_.write(table.csv());
        if (json_.given()) json_.write(report(choice, best).dump(2) + "\n");
    }

    nlohmann::ordered_json budget(const Prediction& winner) const {
        const double rate = winner.tokens_per_s_per_gpu(request_) * double(gpus_);
        const double parameters = double(request_.model.parameters());
        nlohmann::ordered_json all = {
            {"tokens_per_s", rate}, {"tokens_per_day", rate * kSecondsPerDay}, {"price_per_gpu_hour", budget_.price}};
        for (const auto& [name, tokens] :
             {std::pair("chinchilla", kTokensPerParameter * parameters), {"tokens", budget_.tokens}}) {
            const RunCost cost = run_cost(tokens, rate, double(gpus_), budget_.price);
            all[name] = {{"tokens", tokens}, {"days", cost.days}, {"gpu_hours", cost.gpu_hours}, {"price", cost.price}};
        }
        all["checkpoint_bytes"] = checkpoint_bytes(request_);
        return all;
    }

    nlohmann::ordered_json report(const Choice& choice, const std::vector<Prediction>& best) const {
        const bool experts = request_.model.experts.count > 0;
        nlohmann::ordered_json all;
        all["model"] = request_.model.name;
        all["parameters"] = request_.model.parameters();
        all["cluster"] = cluster_.name;
        all["device"] = cluster_.device.name;
        all["gpus"] = gpus_;
        all["seq_len"] = request_.seq_len;
        all["global_batch"] = request_.global_batch;
        all["limit_bytes"] = choice.limit;
        all["device_bytes"] = cluster_.device.memory_bytes;
        all["layouts"] = choice.layouts;
        all["fit"] = choice.fit;
        all["steps"] = decision_steps(request_, cluster_, choice, best.front());
        for (const Prediction& prediction : best) {
            const Layout& l = prediction.candidate.layout;
            nlohmann::ordered_json one;
            one["tp"] = l.tp, one["cp"] = l.cp, one["dp"] = l.dp, one["pp"] = l.pp;
            if (experts) one["ep"] = l.ep;
            one["zero"] = l.zero;
            one["pipeline"] = config_of(request_, l).pipeline.schedule;
            one["virtual_stages"] = l.virtual_stages;
            one["micro_batch"] = l.micro_batch;
            one["recompute"] = name_of(l.recompute);
            one["sequence_parallel"] = l.sequence_parallel;
            one["tp_overlap"] = l.tp_overlap;
            one["hybrid_shard"] = l.hybrid_shard;
            one["equal_to"] = prediction.equal_to;
            one["flags"] = flags_of(request_, l);
            one["dry_run"] = dry_run(l);
            one["predicted_by"] = prediction.simulated ? "simulation" : "estimate";
            one["step_s"] = prediction.seconds;
            one["tokens_per_s_per_gpu"] = prediction.tokens_per_s_per_gpu(request_);
            one["mfu"] = prediction.mfu(request_, cluster_.device);
            one["pp_wait"] = prediction.pp_wait;
            for (const auto& [group, seconds] : prediction.exposed) one["exposed_s"][group] = seconds;
            for (const auto& [part, seconds] : parts_of(prediction.candidate.estimate))
                if (experts || std::string_view(part) != "exposed ep") one["estimate_s"][part] = seconds;
            one["largest_rank"] = prediction.candidate.rank;
            for (int kind = 0; kind < kDeviceMemoryKinds; ++kind)
                one["memory"][kMemoryNames[size_t(kind)]] = prediction.candidate.memory.kind[size_t(kind)];
            one["memory"]["total"] = prediction.candidate.memory.total;
            all["best"].push_back(one);
        }
        all["budget"] = budget(best.front());
        for (const LayoutGroup& g : choice.groups) {
            nlohmann::ordered_json one = {{"tp", g.tp}, {"cp", g.cp}, {"pp", g.pp}};
            if (experts) one["ep"] = g.ep;
            one["layouts"] = g.layouts, one["fit"] = g.fit;
            if (g.best) {
                one["flags"] = flags_of(request_, g.best->layout);
                one["step_s_estimate"] = g.best->estimate.seconds();
                one["why"] = why_slower(g.best->estimate, best.front().candidate.estimate);
            } else {
                one["flags"] = flags_of(request_, g.smallest->layout);
                one["bytes"] = g.smallest->memory.total;
                one["bytes_too_many"] = g.smallest->bytes() - choice.limit;
            }
            all["groups"].push_back(one);
        }
        for (const LeftOut& other : choice.others)
            all["left_out"].push_back({{"what", other.what}, {"sizes", other.sizes}, {"why", other.why}});
        return all;
    }

    Flags flags_{"Plan a training run: the layouts of a model on a cluster, ranked, with the reasons"};
    ModelFlags model_;
    PlanRequest request_;
    std::string cluster_file_, efficiency_file_, grad_dtype_ = "fp32";
    ClusterModel cluster_;
    int64_t gpus_ = 0, best_ = 10, groups_ = 20, simulations_ = 0;
    std::optional<int64_t> asked_simulations_;
    double reserve_gb_ = 8;
    BudgetOptions budget_;
    OptionalOutput json_{"--json"}, csv_{"--csv"};
    ProgressLine progress_;
    const OnProgress show_ = [this](const char* what, double part) { progress_.show(what, part); };
};

}  // namespace

int main(int argc, char** argv) {
    return run_program(argc, argv, [](int argc, char** argv) { Planner().run(argc, argv); });
}
