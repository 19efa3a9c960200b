#include "02_data_parallel/benchmarks.h"

#include "01_single_gpu/ops/ops.h"
#include "02_data_parallel/all_reduce.h"

namespace train70b {

namespace {

// The test values are small integers, so any order of the sum is exact.
void check_result(const Comm& ranks, const Tensor& x, const std::string& algorithm) {
    const int N = ranks.size();
    std::vector<int32_t> numbers(x.size());
    for (int64_t i = 0; i < x.size(); ++i) numbers[i] = int32_t(i % 13) * (ranks.rank() + 1);
    Tensor host(x.shape(), DType::f32, Device::cpu, Memory::workspace);
    for (int64_t i = 0; i < x.size(); ++i) host.data<float>()[i] = float(numbers[i]);
    Tensor to = x;
    copy(to, host);
    ranks.all_reduce(x).wait();
    const std::vector<double> sums = read(x);
    for (int64_t i = 0; i < x.size(); ++i)
        CHECK(sums[i] == double(i % 13) * double(N * (N + 1) / 2), "{}: element {} of {} is {}", algorithm, i, x.size(),
              sums[i]);
}

// Seconds of one all-reduce on the slowest rank. Small ones are repeated within one measurement.
double time_once(const Comm& ranks, const Tensor& x, const std::string& algorithm) {
    const int repeats = x.bytes() <= (64 << 10) ? 20 : 1;
    ranks.use(algorithm);
    ranks.barrier().wait();
    const double begin = now_seconds();
    for (int i = 0; i < repeats; ++i) ranks.all_reduce(x).wait();
    synchronize(x.device());
    return ranks.max((now_seconds() - begin) / repeats);
}

}  // namespace

std::vector<AllReduceTime> time_all_reduce(const Comm& ranks, Device device, const std::vector<int64_t>& sizes) {
    constexpr int kLeast = 5, kMost = 51;
    constexpr double kBudget = 0.5;  // seconds per size
    std::vector<AllReduceTime> table;
    const std::vector<std::string> algorithms = all_reduce_names();
    const std::string before = ranks.use("library");
    for (const int64_t bytes : sizes) {
        Tensor x({bytes / 4}, DType::f32, device, Memory::workspace);
        for (const std::string& algorithm : algorithms) {
            ranks.use(algorithm);
            check_result(ranks, x, algorithm);
        }
        fill(x, 0);
        std::map<std::string, std::vector<double>> seconds, ratios;
        int rounds = kLeast;
        for (int round = -1; round < rounds;
             ++round) {  // round -1 warms up and determines how many rounds fit the budget
            std::map<std::string, double> now;
            const double begin = now_seconds();
            for (size_t i = 0; i < algorithms.size(); ++i) {  // each round begins with another algorithm
                const std::string& algorithm = algorithms[(i + size_t(round + 1)) % algorithms.size()];
                now[algorithm] = time_once(ranks, x, algorithm);
            }
            if (round < 0) {
                rounds = std::clamp(int(kBudget / ranks.max(now_seconds() - begin)), kLeast, kMost);
                continue;
            }
            for (const std::string& algorithm : algorithms) {
                seconds[algorithm].push_back(now[algorithm]);
                ratios[algorithm].push_back(now[algorithm] / now["library"]);
            }
        }
        for (const std::string& algorithm : algorithms)
            table.push_back({bytes, algorithm, median(seconds[algorithm]), median(ratios[algorithm])});
    }
    ranks.use(before);
    return table;
}

std::string all_reduce_table(const std::vector<AllReduceTime>& times, int ranks) {
    std::string text = fmt::format("all-reduce over {} ranks\n{:>10}  {:<10}{:>12}{:>12}{:>12}{:>12}\n", ranks, "size",
                                   "algorithm", "time", "algbw", "busbw", "x library");
    for (const AllReduceTime& t : times) {
        const double bandwidth = double(t.bytes) / t.seconds / 1e9;
        text += fmt::format("{:>10}  {:<10}{:>9.1f} us{:>7.2f} GB/s{:>7.2f} GB/s{:>12.2f}\n",
                            t.algorithm == all_reduce_names()[0] ? human_bytes(double(t.bytes)) : "", t.algorithm,
                            t.seconds * 1e6, bandwidth, bandwidth * 2 * (ranks - 1) / ranks, t.ratio);
    }
    return text;
}

std::string all_reduce_csv(const std::vector<AllReduceTime>& times, int ranks) {
    std::string text = "ranks,bytes,algorithm,seconds,algorithm_bytes_per_s,bus_bytes_per_s,times_library\n";
    for (const AllReduceTime& t : times) {
        const double bandwidth = double(t.bytes) / t.seconds;
        text += fmt::format("{},{},{},{:.9g},{:.6g},{:.6g},{:.4g}\n", ranks, t.bytes, t.algorithm, t.seconds, bandwidth,
                            bandwidth * 2 * (ranks - 1) / ranks, t.ratio);
    }
    return text;
}

std::vector<DataParallelTime> time_data_parallel(const Comm& ranks, Trainer& trainer, DataParallel& store,
                                                 const DataParallelOptions& options, int64_t steps_done) {
    constexpr double kBudget = 5;  // seconds
    const double bucket_mb = options.bucket_mb > 0 ? options.bucket_mb : 25;
    std::vector<DataParallelTime> table = {{.form = "naive", .bucket_mb = 0},
                                           {.form = "bucketed", .bucket_mb = bucket_mb},
                                           {.form = "bucketed", .bucket_mb = 1},
                                           {.form = "overlapped", .bucket_mb = bucket_mb},
                                           {.form = "overlapped", .bucket_mb = 1}};
    std::vector<std::vector<double>> waiting(table.size());
    const auto seconds = alternate(table.size(), kBudget, [&](size_t i) {
        DataParallelTime& row = table[i];
        store.use({row.bucket_mb, row.form == "overlapped"});
        const MeasuredStep step = measure_steps(trainer, ranks, 1, ++steps_done).front();
        waiting[i].push_back(step.comm.waited);
        row.bytes = step.wire_bytes();
        row.collectives = step.comm.operations.at(ranks.name() + ".all_reduce").calls;
        return step.slowest_s;
    });
    for (size_t i = 0; i < table.size(); ++i) {
        table[i].step_s = median(seconds[i]);
        table[i].waiting_s = median(waiting[i]);
    }
    store.use(options);
    return table;
}

std::string data_parallel_table(const std::vector<DataParallelTime>& times) {
    std::string text = fmt::format("data parallelism, per step\n{:<12}{:>10}{:>12}{:>12}{:>16}{:>14}\n", "form",
                                   "bucket", "step", "waiting", "bytes sent", "all-reduces");
    for (const DataParallelTime& t : times)
        text += fmt::format("{:<12}{:>10}{:>9.1f} ms{:>9.1f} ms{:>16}{:>14}\n", t.form,
                            t.bucket_mb > 0 ? fmt::format("{:g} MiB", t.bucket_mb) : "-", t.step_s * 1e3,
                            t.waiting_s * 1e3, t.bytes, t.collectives);
    return text;
}

std::string data_parallel_csv(const std::vector<DataParallelTime>& times, int ranks) {
    std::string text = "ranks,form,bucket_mb,step_s,waiting_s,bytes,all_reduces\n";
    for (const DataParallelTime& t : times)
        text += fmt::format("{},{},{:g},{:.6g},{:.6g},{},{}\n", ranks, t.form, t.bucket_mb, t.step_s, t.waiting_s,
                            t.bytes, t.collectives);
    return text;
}

}  // namespace train70b
