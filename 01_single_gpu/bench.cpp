#include "01_single_gpu/bench.h"

#include "01_single_gpu/profile.h"

namespace train70b {

namespace {

// Median-of-runs would hide nothing here: the minimum is the time without the machine's noise, the mean is what one
// pays.
void print_sums(const std::map<std::string, Profile::Sum>& sums, double seconds) {
    std::vector<std::pair<std::string, Profile::Sum>> rows(sums.begin(), sums.end());
    std::sort(rows.begin(), rows.end(),
              [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
    fmt::print("{:<24}{:>8}{:>12}{:>9}{:>12}{:>10}\n", "op", "calls", "ms", "share", "GFLOP/s", "GB/s");
    double covered = 0;
    for (const auto& [name, sum] : rows) {
        covered += sum.seconds;
        fmt::print("{:<24}{:>8}{:>12.2f}{:>8.1f}%{:>12}{:>10.1f}\n", name, sum.calls, 1e3 * sum.seconds,
                   100 * sum.seconds / seconds,
                   sum.flops > 0 ? fmt::format("{:.1f}", sum.flops / sum.seconds / 1e9) : "-",
                   sum.bytes / sum.seconds / 1e9);
    }
    fmt::print("{:<24}{:>8}{:>12.2f}{:>8.1f}%\n", "between the ops", "", 1e3 * (seconds - covered),
               100 * (seconds - covered) / seconds);
}

}  // namespace

void bench(const TrainOptions& options, Llama& model, Trainer& trainer) {
    constexpr int kWarmup = 2, kSteps = 5;
    const Device device = model.options.device;
    AdamW adamw(whole_segments(model.params()), options.adamw());
    Profile& p = profile();
    p.wait_for = device;
    std::vector<double> step_seconds;
    for (int64_t step = 1; step <= kWarmup + kSteps; ++step) {
        p.sums_on = step > kWarmup;
        const double begin = now_seconds();
        for (Param* param : model.params()) fill(param->grad, 0);
        const Tensor loss = trainer.forward_backward(step);
        trainer.gradient_norm();
        adamw.step(float(options.lr), 1);
        synchronize(device);
        if (p.sums_on) step_seconds.push_back(now_seconds() - begin);
    }
    p.sums_on = false;
    double total = 0;
    for (double seconds : step_seconds) total += seconds;
    std::sort(step_seconds.begin(), step_seconds.end());
    const double median = step_seconds[step_seconds.size() / 2];
    const double tokens = double(options.global_batch) * double(options.seq_len);
    fmt::print("\n{} steps of {} tokens: median {:.1f} ms, {} tokens/s, {:.1f} model GFLOP/s\n\n", kSteps, tokens,
               1e3 * median, human_count(tokens / median),
               flops_per_token(model.config, options.seq_len) * tokens / median / 1e9);
    print_sums(p.sums, total);
}

}  // namespace train70b
