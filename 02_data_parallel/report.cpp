#include "02_data_parallel/report.h"

namespace train70b {

void DataParallelReport::add_flags(CommandLine& flags) {
    flags.group("Output");
    flags.add_output("--all-reduce-csv", all_reduce_csv_, "FILE.csv: write the table of all-reduce algorithms");
    flags.add_output("--modes-csv", modes_csv_, "FILE.csv: write the table of data-parallel modes");
}

void DataParallelReport::open(const Program& p) {
    const bool asked = !all_reduce_csv_.empty() || !modes_csv_.empty();
    if (asked && !p.tables)
        usage_error("--all-reduce-csv, --modes-csv: with --tables off there is nothing to write; leave them out");
    if (asked && !p.compares(p.dp))
        usage_error("--all-reduce-csv, --modes-csv: one rank has nothing to compare; start two or more (mpirun -np 2)");
    if (this_rank == 0 && !all_reduce_csv_.empty()) all_reduce_file_.emplace("--all-reduce-csv", all_reduce_csv_);
    if (this_rank == 0 && !modes_csv_.empty()) modes_file_.emplace("--modes-csv", modes_csv_);
}

void DataParallelReport::say_layout(const Program& p, const DataParallel& store) const {
    const int64_t micro_batches = p.options.accumulation(p.dp);
    say("{} data-parallel ranks over {}; gradients: {} in {} bucket(s), {}\n", p.dp, p.world.backend(),
        human_bytes(double(store.gradient_bytes())), store.buckets(),
        micro_batches > 1 ? fmt::format("once per {} micro-batches", micro_batches) : "every step");
}

void DataParallelReport::print(Program& p, const Comm& ranks, DataParallel& store, const DataParallelOptions& options) {
    const TrainOptions& o = p.options;
    if (o.steps > 0)
        say("\nrank 0:\n{}", memory_table(o.model, p.model().options, o.micro_batch, o.seq_len, p.trainer().peak()));
    if (!p.compares(p.dp)) return;
    std::vector<int64_t> sizes;
    for (int64_t bytes = 1 << 10; bytes <= 64 << 20; bytes *= 4) sizes.push_back(bytes);
    const auto times = time_all_reduce(ranks, p.model().options.device, sizes);
    say("\n{}", all_reduce_table(times, ranks.size()));
    const auto modes = time_data_parallel(ranks, p.trainer(), store, options, o.steps);
    say("\n{}", data_parallel_table(modes));
    const auto write = [](std::optional<OutputFile>& file, const std::string& text) {
        if (!file) return;
        file->write(text);
        file->commit();
    };
    write(all_reduce_file_, all_reduce_csv(times, ranks.size()));
    write(modes_file_, data_parallel_csv(modes, ranks.size()));
}

}  // namespace train70b
