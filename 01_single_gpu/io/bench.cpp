#include "01_single_gpu/io/bench.h"

#include "01_single_gpu/core/cpu_setup.h"
#include "01_single_gpu/core/profile.h"

namespace train70b {

double median_seconds(Device device, int calls, const std::function<void()>& body) {
    body();
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

double floor_seconds(const Profile::Sum& sum, const Ceilings& ceilings) {
    return std::max(sum.bytes / ceilings.copy_bytes_per_s, sum.flops / ceilings.product_flops_per_s);
}

}  // namespace

Ceilings measure_ceilings(Device device, DType dtype) {
    const bool gpu = device == Device::cuda;
    const int64_t elements = gpu ? int64_t(1) << 28 : int64_t(1) << 25, side = gpu ? 8192 : 2048;
    Ceilings ceilings{};
    {
        Tensor from({elements}, DType::f32, device, Memory::workspace), to = Tensor::like(from, Memory::workspace);
        fill(from, 1);
        ceilings.copy_bytes_per_s = 2.0 * double(from.bytes()) / median_seconds(device, 11, [&] { copy(to, from); });
    }
    Tensor a({side, side}, dtype, device, Memory::workspace), b = Tensor::like(a, Memory::workspace);
    Tensor c = Tensor::like(a, Memory::workspace);
    fill_normal(a, 1, {.cols = side, .global_cols = side}, 1);  // with zeros, a GPU draws less power and runs faster
    fill_normal(b, 2, {.cols = side, .global_cols = side}, 1);
    const double seconds = median_seconds(device, 11, [&] { matmul_into(c, a, b, Transpose::b); });
    ceilings.product_flops_per_s = 2.0 * double(side) * double(side) * double(side) / seconds;
    return ceilings;
}

void bench(const TrainOptions& options, TrainingRun& run, const std::string& csv_path) {
    constexpr int kWarmup = 2, kSteps = 5;
    std::optional<OutputFile> csv;
    if (!csv_path.empty()) csv.emplace("--bench-csv", csv_path);
    const Llama& model = run.model;
    const Device device = model.options.device;
    const Ceilings ceilings = measure_ceilings(device, model.options.dtype);
    run.trainer.start();
    int64_t step = 0;
    const auto run_step = [&] { run.trainer.step(++step); };
    for (int i = 1; i < kWarmup; ++i) run_step();
    const double seconds = median_seconds(device, kSteps, run_step);

    Profile& p = profile();
    p.wait_for = device;
    p.sums_on = true;
    const double begin = now_seconds();
    for (int i = 0; i < kSteps; ++i) run_step();
    const double watched = now_seconds() - begin;
    p.sums_on = false;

    const double tokens = double(options.global_batch) * double(options.seq_len);
    const double flops = flops_per_token(model.config, options.seq_len) * tokens / seconds;
    fmt::print("\nmeasured limits: copy {:.1f} GB/s, {} product {:.2f} TFLOP/s{}\n", ceilings.copy_bytes_per_s / 1e9,
               name_of(model.options.dtype), ceilings.product_flops_per_s / 1e12,
               device == Device::cpu ? fmt::format(" (OpenBLAS {}, {} thread{})", blas_core(), cpu_threads(),
                                                   cpu_threads() == 1 ? "" : "s")
                                     : "");
    fmt::print("a step of {} tokens: {:.2f} ms (median of {}), {} tokens/s\n", tokens, 1e3 * seconds, kSteps,
               human_count(tokens / seconds));
    fmt::print("model FLOPs ({}): {:.3f} TFLOP/s, {:.1f}% of the measured product rate\n", kModelFlops, flops / 1e12,
               100 * flops / ceilings.product_flops_per_s);
    if (const auto peak = peak_flops(device, model.options.dtype))
        fmt::print("MFU {:.1f}%. {}\n", 100 * flops / *peak, mfu_text(device, model.options.dtype));

    std::vector<std::pair<std::string, Profile::Sum>> rows(p.sums.begin(), p.sums.end());
    std::sort(rows.begin(), rows.end(),
              [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
    fmt::print("\nper step, synchronized after each op:\n{:<24}{:>7}{:>11}{:>11}{:>9}{:>8}{:>11}{:>9}\n", "op", "calls",
               "ms", "floor ms", "x floor", "share", "GFLOP/s", "GB/s");
    if (csv) csv->write("op,calls,ms,floor_ms,share,gflops,gbytes_per_s\n");
    double covered = 0;
    for (const auto& [name, sum] : rows) {
        const double ms = 1e3 * sum.seconds / kSteps, floor_ms = 1e3 * floor_seconds(sum, ceilings) / kSteps;
        const double share = sum.seconds / watched, gflops = sum.flops / sum.seconds / 1e9;
        const double gbytes = sum.bytes / sum.seconds / 1e9;
        covered += sum.seconds;
        fmt::print("{:<24}{:>7}{:>11.3f}{:>11.3f}{:>9.1f}{:>7.1f}%{:>11.1f}{:>9.1f}\n", name, sum.calls / kSteps, ms,
                   floor_ms, ms / floor_ms, 100 * share, gflops, gbytes);
        if (csv)
            csv->write(fmt::format("{},{},{:.6f},{:.6f},{:.5f},{:.2f},{:.2f}\n", name, sum.calls / kSteps, ms, floor_ms,
                                   share, gflops, gbytes));
    }
    const double between = 1e3 * (watched - covered) / kSteps;
    fmt::print("{:<24}{:>7}{:>11.3f}{:>28.1f}%\n", "between the ops", "", between, 100 * (watched - covered) / watched);
    if (csv) {
        csv->write(fmt::format("whole_step,1,{:.6f},,1,{:.2f},\n", 1e3 * seconds, flops / 1e9));
        csv->commit();
    }
}

}  // namespace train70b
