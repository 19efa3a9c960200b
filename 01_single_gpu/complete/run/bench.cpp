#include "01_single_gpu/complete/run/bench.h"

#include <numeric>

#include "01_single_gpu/core/cpu_threads.h"

namespace train70b {

double median_seconds(Device device, int calls, const std::function<void()>& body) {
    for (int i = 0; i < (device == Device::cuda ? 3 : 1); ++i) body();  // a GPU that idled raises its clock
    std::vector<double> seconds;
    for (int i = 0; i < calls; ++i) {
        synchronize(device);
        const double begin = now_seconds();
        body();
        synchronize(device);
        seconds.push_back(now_seconds() - begin);
    }
    std::sort(seconds.begin(), seconds.end());
    return seconds[seconds.size() / 2];
}

namespace {

constexpr int kSteps = 5;

// The device's limits, measured in the same run as the ops that are compared with them.
struct Ceilings {
    double copy_bytes_per_s;     // copying a large fp32 array; bytes read plus bytes written
    double product_flops_per_s;  // a large square matrix product in the model's dtype
};

// Seconds of a call of body, the last of `warm_s` seconds of calls; between some of them, the host waits.
double warm_seconds(Device device, double warm_s, const std::function<void()>& body) {
    constexpr int kCalls = 10;
    double seconds_per_call = 0;
    for (const double begin = now_seconds(); now_seconds() - begin < warm_s;) {
        const double first = now_seconds();
        for (int i = 0; i < kCalls; ++i) body();
        synchronize(device);
        seconds_per_call = (now_seconds() - first) / kCalls;
    }
    return seconds_per_call;
}

// side: of the product; 0: large on this device. warm_s > 0: after so many seconds of each without a pause, as training
// has them: a GPU that reaches its power limit lowers its clock. 0: a few single calls on a device that idled.
Ceilings measure_ceilings(Device device, DType dtype, int64_t side, double warm_s = 0) {
    const bool gpu = device == Device::cuda;
    if (side == 0) side = gpu ? 8192 : 2048;
    const int64_t elements = (gpu ? 4 : 8) * side * side;
    const auto seconds_of = [&](const std::function<void()>& body) {
        return warm_s > 0 ? warm_seconds(device, warm_s, body) : median_seconds(device, 11, body);
    };
    Ceilings ceilings{};
    {
        Tensor from({elements}, DType::f32, device, Memory::workspace), to = Tensor::like(from, Memory::workspace);
        fill(from, 1);
        ceilings.copy_bytes_per_s = 2.0 * double(from.bytes()) / seconds_of([&] { copy(to, from); });
    }
    Tensor a({side, side}, dtype, device, Memory::workspace), b = Tensor::like(a, Memory::workspace);
    Tensor c = Tensor::like(a, Memory::workspace);
    fill_normal(a, 1, {.cols = side, .global_cols = side}, 1);  // with zeros, a GPU draws less power and runs faster
    fill_normal(b, 2, {.cols = side, .global_cols = side}, 1);
    const double seconds = seconds_of([&] { matmul_into(c, a, b, Transpose::b); });
    ceilings.product_flops_per_s = 2.0 * double(side) * double(side) * double(side) / seconds;
    return ceilings;
}

void print_limits(const Llama& model, const Ceilings& ceilings, const char* title) {
    const std::string cpu = fmt::format(" ({}, {} thread{})", cpu::product_kernels(model.options.dtype), cpu_threads(),
                                        cpu_threads() == 1 ? "" : "s");
    say("\n{}: copy {:.1f} GB/s, {} product {:.2f} TFLOP/s{}\n", title, ceilings.copy_bytes_per_s / 1e9,
        name_of(model.options.dtype), ceilings.product_flops_per_s / 1e12,
        model.options.device == Device::cpu ? cpu : "");
}

void print_rates(const Llama& model, const Ceilings& ceilings, double tokens, double step_flops, double step_s,
                 bool documents) {
    const Device device = model.options.device;
    const double flops = step_flops / step_s;
    print_limits(model, ceilings, "measured limits");
    say("a step of {} tokens: {:.2f} ms (median of {}), {} tokens/s\n", tokens, 1e3 * step_s, kSteps,
        human_count(tokens / step_s));
    say("model FLOPs ({}{}): {:.3f} TFLOP/s, {:.1f}% of the measured product rate\n", kModelFlops,
        documents ? fmt::format("; {}", kDocumentFlops) : "", flops / 1e12, 100 * flops / ceilings.product_flops_per_s);
    if (const auto peak = peak_flops(device, model.options.dtype))
        say("MFU {:.1f}%. {}\n", 100 * flops / *peak, mfu_text(device, model.options.dtype, documents));
}

// Of kSteps steps that took `seconds`: each op, the slowest first. step_s: of a step in which no op is waited for.
Table op_table(const std::map<std::string, Profile::Sum>& sums, const Ceilings& ceilings, double seconds, double step_s,
               double step_flops, Device device) {
    std::vector<std::pair<std::string, Profile::Sum>> ops(sums.begin(), sums.end());
    std::sort(ops.begin(), ops.end(), [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
    Table table(device == Device::cuda ? "per step, each op between two events:" : "per step, each op waited for:",
                {"op", "calls", "ms", Column("floor ms", "floor_ms"), Column("x floor").text_only(), "share",
                 Column("GFLOP/s", "gflops"), Column("GB/s", "gbytes_per_s")});
    double covered = 0;
    for (const auto& [name, sum] : ops) {
        const double floor = std::max(sum.bytes / ceilings.copy_bytes_per_s, sum.flops / ceilings.product_flops_per_s);
        table.row({name, sum.calls / kSteps, fixed(1e3 * sum.seconds / kSteps, 3), fixed(1e3 * floor / kSteps, 3),
                   fixed(sum.seconds / floor, 1), percent(sum.seconds / seconds),
                   fixed(sum.flops / sum.seconds / 1e9, 1), fixed(sum.bytes / sum.seconds / 1e9, 1)});
        covered += sum.seconds;
    }
    const double rest = seconds - covered;
    table.row({"between the ops", "", fixed(1e3 * rest / kSteps, 3), "", "", percent(rest / seconds)});
    table.row({Cell("a whole step", "whole_step"), 1, fixed(1e3 * step_s, 3), "", "", Cell("", 1.0),
               fixed(step_flops / step_s / 1e9, 1)});
    return table;
}

}  // namespace

void Bench::add_flags(CommandLine& flags) {
    flags.group("Output");
    flags.add_flag("--bench", bench_, "time every op and a training step instead of training");
    flags.add("--bench-side", side_,
              "side of the matrix product that measures the limit of --bench; 0: 8192 on a GPU, 2048 on a CPU",
              integer_from(0));
    flags.add("--bench-warm-ms", warm_ms_,
              "measure the limits of --bench once more after so many milliseconds of each without a pause, and take "
              "these for the floors; 0: only on a device that idled",
              integer_from(0));
    flags.add_output(csv_, "FILE.csv: write the table of --bench (implies --bench)");
}

void Bench::open(const TrainOptions& options, const CommandLine& flags) {
    if (!asked()) {
        if (side_ > 0) usage_error("--bench-side {}: requires --bench", side_);
        if (warm_ms_ > 0) usage_error("--bench-warm-ms {}: requires --bench", warm_ms_);
        return;
    }
    for (const char* flag :
         {"--save-hf", "--save-reference", "--metrics", "--trace", "--memory-timeline", "--generate"})
        if (flags.given(flag)) usage_error("{}: --bench measures and does not train; leave out one of them", flag);
    const double side = double(side_), bytes = (8 * 4 * 2 + 3 * 4) * side * side;  // measure_ceilings, on a CPU
    if (options.device_kind() == Device::cpu)
        if (const std::string shortage = memory_shortage(bytes, bytes); !shortage.empty())
            usage_error("--bench-side {}: needs {} (try 2048)", side_, shortage);
    csv_.open();
}

void Bench::run(const TrainOptions& options, TrainingRun& run) {
    const Device device = run.model.options.device;
    Ceilings ceilings = measure_ceilings(device, run.model.options.dtype, side_);
    if (warm_ms_ > 0) {
        print_limits(run.model, ceilings, "measured limits, cold");
        ceilings = measure_ceilings(device, run.model.options.dtype, side_, 1e-3 * double(warm_ms_));
    }
    run.trainer.start();
    int64_t step = 0;
    std::vector<double> step_flops;
    const auto run_step = [&] { step_flops.push_back(run.trainer.step(++step).flops); };
    run_step();
    step_flops.clear();
    const double seconds = median_seconds(device, kSteps, run_step);
    const double tokens = double(options.global_batch) * double(options.seq_len);
    const double flops = std::accumulate(step_flops.begin(), step_flops.end(), 0.0) /
                         double(step_flops.size());  // with documents they differ
    print_rates(run.model, ceilings, tokens, flops, seconds, options.masks_keys());

    const ProfileScope scope({.sums_on = true, .device = device});
    const double begin = now_seconds();
    for (int i = 0; i < kSteps; ++i) run_step();
    const double watched = now_seconds() - begin;
    profile().collect();
    const Table table = op_table(profile().sums, ceilings, watched, seconds, flops, device);
    say(table);
    csv_.write(table.csv());
}

}  // namespace train70b
