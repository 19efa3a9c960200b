#include "08_3d_full/plan_simulate.h"

#include <sys/wait.h>
#include <unistd.h>

#include <sstream>

#include "08_3d_full/record.h"

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
    Prediction prediction{candidate, step.seconds, true, step.bubble, {}};
    for (const auto& [group, seconds] : step.exposed)
        prediction.exposed.emplace_back(group == "dp_cp" ? "dp" : group, seconds);
    return prediction;
}

namespace {

// Of one worker: candidate number, seconds, bubble, groups and their seconds; a line each.
void work(const std::vector<Candidate>& candidates, size_t first, size_t stride,
          const std::function<Prediction(const Candidate&)>& simulate, FILE* out) {
    for (size_t i = first; i < candidates.size(); i += stride) {
        const Prediction p = simulate(candidates[i]);
        std::string line = fmt::format("{} {:.17g} {:.17g}", i, p.seconds, p.bubble);
        for (const auto& [group, seconds] : p.exposed) line += fmt::format(" {} {:.17g}", group, seconds);
        std::fputs((line + "\n").c_str(), out);
    }
}

}  // namespace

std::vector<Prediction> simulated(const std::vector<Candidate>& candidates, int64_t processes,
                                  const std::function<Prediction(const Candidate&)>& simulate) {
    const size_t count = std::min(size_t(std::max<int64_t>(processes, 1)), candidates.size());
    std::vector<Prediction> all(candidates.size());
    if (count <= 1) {
        for (size_t i = 0; i < candidates.size(); ++i) all[i] = simulate(candidates[i]);
        return all;
    }
    std::fflush(nullptr);
    std::vector<std::pair<pid_t, FILE*>> workers;
    for (size_t w = 0; w < count; ++w) {
        int ends[2];
        if (pipe(ends) != 0) throw CommonError("a pipe to a simulating process cannot be made");
        const pid_t child = fork();
        if (child < 0) throw CommonError("a simulating process cannot be started");
        if (child == 0) {
            int code = 1;
            try {
                close(ends[0]);
                FILE* out = fdopen(ends[1], "w");
                work(candidates, w, count, simulate, out);
                code = std::fclose(out) == 0 ? 0 : 1;
            } catch (const std::exception& error) { std::fprintf(stderr, "plan: %s\n", error.what()); }
            std::_Exit(code);
        }
        close(ends[1]);
        workers.emplace_back(child, fdopen(ends[0], "r"));
    }
    bool failed = false;
    for (const auto& [child, in] : workers) {
        std::string text;
        char buffer[4096];
        for (size_t n; (n = std::fread(buffer, 1, sizeof buffer, in)) > 0;) text.append(buffer, n);
        std::fclose(in);
        int status = 0;
        if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) failed = true;
        std::istringstream lines(text);
        for (std::string line; std::getline(lines, line);) {
            std::istringstream words(line);
            size_t i = 0;
            double seconds = 0, bubble = 0;
            words >> i >> seconds >> bubble;
            Prediction prediction{candidates.at(i), seconds, true, bubble, {}};
            std::string group;
            for (double exposed = 0; words >> group >> exposed;) prediction.exposed.emplace_back(group, exposed);
            all[i] = std::move(prediction);
        }
    }
    if (failed) throw CommonError("a simulating process failed");
    for (const Prediction& each : all) CHECK(each.simulated, "a layout was not simulated");
    return all;
}

}  // namespace train70b
