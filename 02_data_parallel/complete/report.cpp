#include "02_data_parallel/complete/report.h"

#include "02_data_parallel/complete/all_reduce.h"
#include "02_data_parallel/runtime/measure.h"

namespace train70b {

namespace {

// The test values are small integers, so any order of the sum is exact.
void check_result(const Comm& ranks, Tensor x, const std::string& algorithm) {
    const int N = ranks.size();
    Tensor host(x.shape(), DType::f32, Device::cpu, Memory::workspace);
    for (int64_t i = 0; i < x.size(); ++i) host.data<float>()[i] = float(i % 13) * float(ranks.rank() + 1);
    copy(x, host);
    ranks.use(algorithm);
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

Table all_reduce_table(const Comm& ranks, Device device, const std::vector<int64_t>& sizes) {
    constexpr double kBudget = 0.5;  // seconds per size
    const int N = ranks.size();
    Table table(fmt::format("all-reduce over {} ranks", N),
                {Column("ranks").csv_only(), Column("size", "bytes"), Column("algorithm").left(),
                 Column("time", "seconds"), Column("algbw", "algorithm_bytes_per_s"),
                 Column("busbw", "bus_bytes_per_s"), Column("x library", "times_library")});
    const auto bandwidth = [](double bytes_per_s) {
        return Cell(fmt::format("{:.2f} GB/s", bytes_per_s / 1e9), bytes_per_s);
    };
    const std::vector<std::string> algorithms = all_reduce_names();
    const size_t library = size_t(std::find(algorithms.begin(), algorithms.end(), "library") - algorithms.begin());
    const std::string before = ranks.use("library");
    for (const int64_t bytes : sizes) {
        Tensor x({bytes / 4}, DType::f32, device, Memory::workspace);
        for (const std::string& algorithm : algorithms) check_result(ranks, x, algorithm);
        fill(x, 0);
        const auto rounds = alternate(
            algorithms.size(), kBudget, [&](size_t i) { return time_once(ranks, x, algorithms[i]); }, 5, 51);
        for (size_t i = 0; i < algorithms.size(); ++i) {
            std::vector<double> ratios;
            for (size_t r = 0; r < rounds[i].size(); ++r) ratios.push_back(rounds[i][r] / rounds[library][r]);
            const double seconds = median(rounds[i]), rate = double(bytes) / seconds;
            table.row({N, Cell(i == 0 ? human_bytes(double(bytes)) : "", std::to_string(bytes)), algorithms[i],
                       Cell(fmt::format("{:.1f} us", 1e6 * seconds), seconds), bandwidth(rate),
                       bandwidth(rate * 2 * (N - 1) / N), fixed(median(ratios), 2)});
        }
    }
    ranks.use(before);
    return table;
}

Table data_parallel_table(const Comm& ranks, Trainer& trainer, DataParallel& store, const DataParallelOptions& options,
                          int64_t steps_done) {
    constexpr double kBudget = 5;  // seconds
    const double bucket_mb = options.bucket_mb > 0 ? options.bucket_mb : 25;
    struct Form {
        const char* name;
        DataParallelOptions options;
        std::vector<double> waiting;
        int64_t bytes = 0, all_reduces = 0;
    };
    std::vector<Form> forms = {{"naive", {0, false}},
                               {"bucketed", {bucket_mb, false}},
                               {"bucketed", {1, false}},
                               {"overlapped", {bucket_mb, true}},
                               {"overlapped", {1, true}}};
    const auto seconds = alternate(forms.size(), kBudget, [&](size_t i) {
        Form& form = forms[i];
        store.use(form.options);
        const MeasuredStep step = measure_steps(trainer, ranks, 1, ++steps_done).front();
        form.waiting.push_back(step.comm.waited);
        form.bytes = step.wire_bytes();
        form.all_reduces = step.comm.operations.at(ranks.name() + ".all_reduce").calls;
        return step.slowest_s;
    });
    store.use(options);
    Table table("data parallelism, per step",
                {Column("ranks").csv_only(), "form", Column("bucket", "bucket_mb"), Column("step", "step_s"),
                 Column("waiting", "waiting_s"), Column("bytes sent", "bytes"), Column("all-reduces", "all_reduces")});
    for (size_t i = 0; i < forms.size(); ++i) {
        const double mb = forms[i].options.bucket_mb;
        table.row({ranks.size(), forms[i].name, Cell(mb > 0 ? fmt::format("{:g} MiB", mb) : "-", mb),
                   milliseconds(median(seconds[i])), milliseconds(median(forms[i].waiting)), forms[i].bytes,
                   forms[i].all_reduces});
    }
    return table;
}

void say_layout(const Program& p, const DataParallel& store) {
    const int64_t micro_batches = p.options.accumulation(p.dp);
    say("{} data-parallel ranks over {}; gradients: {} in {} bucket(s), {}\n", p.dp, p.world.backend(),
        human_bytes(double(store.gradient_bytes())), store.buckets(),
        micro_batches > 1 ? fmt::format("once per {} micro-batches", micro_batches) : "every step");
}

DataParallelReport::DataParallelReport(CommandLine& flags) {
    flags.group("Output");
    flags.add_output(all_reduce_, "FILE.csv: write the table of all-reduce algorithms");
    flags.add("--all-reduce-mb", largest_mb_, "largest message of the table of all-reduce algorithms, in MiB",
              integer_from(1, 1 << 14));
    flags.add_output(modes_, "FILE.csv: write the table of data-parallel modes");
}

void DataParallelReport::open(const Program& p) {
    const bool asked = all_reduce_.given() || modes_.given();
    if (asked && !p.tables)
        usage_error("--all-reduce-csv, --modes-csv: with --tables off there is nothing to write; leave them out");
    if (asked && !p.compares(p.dp))
        usage_error("--all-reduce-csv, --modes-csv: one rank has nothing to compare; start two or more (mpirun -np 2)");
    all_reduce_.open();
    modes_.open();
}

void DataParallelReport::print(Program& p, const Comm& ranks, DataParallel& store, const DataParallelOptions& options) {
    const TrainOptions& o = p.options;
    if (o.steps > 0)
        say("\nrank 0:\n{}",
            memory_table(o.model, p.model().options, o.micro_batch, o.seq_len, p.trainer().peak()).text());
    if (!p.compares(p.dp)) return;
    std::vector<int64_t> sizes;
    for (int64_t bytes = 1 << 10; bytes <= largest_mb_ << 20; bytes *= 4) sizes.push_back(bytes);
    const Table all_reduce = all_reduce_table(ranks, p.model().options.device, sizes);
    say(all_reduce);
    const Table modes = data_parallel_table(ranks, p.trainer(), store, options, o.steps);
    say(modes);
    all_reduce_.write(all_reduce.csv());
    modes_.write(modes.csv());
}

}  // namespace train70b
