#include "08_3d_full/plan/simulate_best.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <sstream>

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

Prediction simulated(const PlanRequest& request, const ClusterModel& cluster, const Dataset& data,
                     const Candidate& candidate) {
    const ParallelConfig config = config_of(request, candidate.layout);
    const Recording recording = record_step(options_of(request, candidate.layout), data, config, {.most_ranks = 1});
    const SimulatedStep step = simulate_step(recording, cluster);
    Prediction prediction{candidate, step.seconds, true, step.bubble, {}, 0};
    for (const auto& [group, seconds] : step.exposed)
        prediction.exposed.emplace_back(group == "dp_cp" ? "dp" : group, seconds);
    return prediction;
}

namespace {

// One worker's: for every candidate a line with its number, seconds, wait along pp, and groups with their seconds. Lines
// are shorter than what a pipe passes as one piece.
void work(const std::vector<Candidate>& candidates, size_t first, size_t stride,
          const std::function<Prediction(const Candidate&)>& simulate, int out) {
    for (size_t i = first; i < candidates.size(); i += stride) {
        const Prediction p = simulate(candidates[i]);
        std::string line = fmt::format("{} {:.17g} {:.17g}", i, p.seconds, p.pp_wait);
        for (const auto& [group, seconds] : p.exposed) line += fmt::format(" {} {:.17g}", group, seconds);
        line += "\n";
        CHECK(::write(out, line.data(), line.size()) == ssize_t(line.size()), "a simulating process cannot report");
    }
}

}  // namespace

std::vector<Prediction> simulated(const std::vector<Candidate>& candidates, int64_t processes,
                                  const std::function<Prediction(const Candidate&)>& simulate,
                                  const OnProgress& progress) {
    const size_t count = std::min(size_t(std::max<int64_t>(processes, 1)), candidates.size());
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
                work(candidates, w, count, simulate, ends[1]);
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
    for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line);
        size_t i = 0;
        double seconds = 0, pp_wait = 0;
        words >> i >> seconds >> pp_wait;
        Prediction prediction{candidates.at(i), seconds, true, pp_wait, {}, 0};
        std::string group;
        for (double exposed = 0; words >> group >> exposed;) prediction.exposed.emplace_back(group, exposed);
        all[i] = std::move(prediction);
    }
    for (const Prediction& each : all) CHECK(each.simulated, "a layout was not simulated");
    return all;
}

}  // namespace train70b
