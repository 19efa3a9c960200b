#include "08_3d_full/plan/simulate_best.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <sstream>
#include <tuple>

#include "08_3d_full/plan/record.h"

namespace train70b {

TrainOptions options_of(const PlanRequest& request, const Layout& layout) {
    TrainOptions o;
    o.model = request.model;
    o.seq_len = request.seq_len;
    o.global_batch = request.global_batch;
    o.micro_batch = layout.micro_batch;
    o.dtype = "bf16";
    o.grad_dtype = request.grad_dtype == DType::bf16 ? "bf16" : "fp32";
    o.recompute = name_of(layout.recompute);
    o.min_lr = o.lr / 10;
    o.dry_run = true;
    return o;
}

namespace {

// Seconds of a step and of what it waits for, by name.
std::map<std::string, double> seconds_of(const Recording& recording, const ClusterModel& cluster) {
    const SimulatedStep step = simulate_step(recording, cluster);
    std::map<std::string, double> seconds = {{"step", step.seconds}, {"bubble", step.bubble * step.seconds}};
    for (const auto& [group, exposed] : step.exposed)
        seconds["exposed " + (group == "dp_cp" || group == "edp" ? "dp" : group)] += exposed;
    return seconds;
}

// From steps of m, m + d and m + 2 d micro-batches to one of `more` d beyond, if what the second d takes is what the
// first one takes.
bool extend(std::map<std::string, double>& m, std::map<std::string, double>& m1, std::map<std::string, double>& m2,
            double more) {
    constexpr double kRounding = 1e-9;
    const double step = m2["step"];
    for (auto& [name, seconds] : m2) {
        const double slope = seconds - m1[name];
        if (!(std::abs(slope - (m1[name] - m[name])) <= kRounding * step)) return false;
        seconds += more * slope;
    }
    return true;
}

}  // namespace

Prediction simulated(const PlanRequest& request, const ClusterModel& cluster, const Dataset& data,
                     const Candidate& candidate, double limit) {
    const ParallelConfig config = config_of(request, candidate.layout);
    const TrainOptions options = options_of(request, candidate.layout);
    const int64_t all = options.accumulation(config.mesh.dp), d = config.mesh.pp;
    std::vector<int64_t> counts, begins;
    for (const int64_t m : {6 * d + all % d, 18 * d + all % d})
        if (3 * (m + 2 * d) < all) begins.push_back(m), counts.insert(counts.end(), {m, m + d, m + 2 * d});
    Prediction prediction{candidate};
    if (candidate.bytes() > limit) {  // by formula: the rank that this is said of decides
        std::tie(prediction.candidate.rank, prediction.candidate.memory) =
            largest_rank(record_step(options, data, config, {.only = candidate.rank}));
        if (prediction.candidate.bytes() > limit) return prediction;
    }
    const std::vector<Recording> steps = record_steps(options, data, config, counts, {.most_ranks = 1});
    std::tie(prediction.candidate.rank, prediction.candidate.memory) = largest_rank(steps[0]);
    if (prediction.candidate.bytes() > limit) return prediction;
    std::map<std::string, double> seconds;
    for (size_t i = 0; i < begins.size() && seconds.empty() && steps.size() > 1; ++i) {
        std::map<std::string, double> first = seconds_of(steps[3 * i + 1], cluster);
        std::map<std::string, double> second = seconds_of(steps[3 * i + 2], cluster);
        seconds = seconds_of(steps[3 * i + 3], cluster);
        if (!extend(first, second, seconds, double((all - begins[i]) / d - 2))) seconds.clear();
    }
    if (seconds.empty()) seconds = seconds_of(steps[0], cluster);
    prediction.seconds = seconds["step"];
    prediction.simulated = true;
    prediction.pp_wait = seconds["bubble"] / seconds["step"];
    for (const auto& [name, exposed] : seconds)
        if (name.starts_with("exposed ")) prediction.exposed.emplace_back(name.substr(8), exposed);
    return prediction;
}

std::vector<Prediction> simulated(const PlanRequest& request, const ClusterModel& cluster, const Dataset& data,
                                  const std::vector<Candidate>& candidates, double limit, int64_t processes,
                                  const OnProgress& progress) {
    const size_t count = std::min(size_t(std::max<int64_t>(processes, 1)), candidates.size());
    // What a process finds for a candidate is a line of JSON, shorter than what a pipe passes as one piece.
    using Report = std::tuple<size_t, int64_t, int64_t, MemoryBytes, bool, double, double,
                              std::vector<std::pair<std::string, double>>>;
    const auto work = [&](size_t first, int out) {
        for (size_t i = first; i < candidates.size(); i += count) {
            const Prediction p = simulated(request, cluster, data, candidates[i], limit);
            const auto& [layout, estimate, memory, rank] = p.candidate;
            const Report report{i, rank, memory.total, memory.kind, p.simulated, p.seconds, p.pp_wait, p.exposed};
            const std::string line = nlohmann::json(report).dump() + "\n";
            CHECK(::write(out, line.data(), line.size()) == ssize_t(line.size()), "a simulating process cannot report");
        }
    };
    std::vector<Prediction> all(candidates.size());
    int ends[2];
    if (pipe(ends) != 0) throw CommonError("a pipe to simulating processes cannot be made");
    std::fflush(nullptr);
    std::vector<pid_t> workers;
    for (size_t w = 0; w < count; ++w) {
        const pid_t child = fork();
        if (child < 0) throw CommonError("a simulating process cannot be started");
        if (child == 0) {
            int code = 0;
            try {
                ::close(ends[0]);
                work(w, ends[1]);
            } catch (const std::exception& error) {
                std::fprintf(stderr, "plan: %s\n", error.what());
                code = 1;
            }
            std::_Exit(code);
        }
        workers.push_back(child);
    }
    ::close(ends[1]);
    std::string text;
    char buffer[4096];
    for (ssize_t n, lines = 0; (n = ::read(ends[0], buffer, sizeof buffer)) > 0;) {
        text.append(buffer, size_t(n));
        lines += std::count(buffer, buffer + n, '\n');
        progress("simulating layouts", double(lines) / double(candidates.size()));
    }
    ::close(ends[0]);
    bool failed = false;
    for (const pid_t child : workers) {
        int status = 0;
        if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) failed = true;
    }
    if (failed) throw CommonError("a simulating process failed");
    std::istringstream lines(text);
    size_t reported = 0;
    for (std::string line; std::getline(lines, line); ++reported) {
        const auto [i, rank, total, kind, simulated, seconds, pp_wait, exposed] =
            nlohmann::json::parse(line).get<Report>();
        const Candidate& c = candidates.at(i);
        all[i] = {{c.layout, c.estimate, {kind, total}, rank}, seconds, simulated, pp_wait, exposed};
    }
    CHECK(reported == all.size(), "{} of {} layouts were reported", reported, all.size());
    return all;
}

}  // namespace train70b
