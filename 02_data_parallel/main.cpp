// Data parallelism: each of N ranks holds the whole model and computes 1/N of the batch; g = sum_r g_r by all-reduce.
//
// Run:   mpirun -np 2 build/bin/02_data_parallel
//        mpirun -np 4 --oversubscribe build/bin/02_data_parallel --all-reduce ring --bucket-mb 0.5 --steps 20
// Watch: the loss is chapter 01's, whatever N; each rank sends 2 G (N-1)/N bytes per step for G bytes of gradients;
//        params, grads and optimizer take as much memory on every rank as they did on one.
#include "02_data_parallel/benchmarks.h"
#include "02_data_parallel/runtime/launch.h"

using namespace train70b;

namespace {

void program(int argc, char** argv) {
    TrainOptions options;
    CommOptions comm_options;
    DataParallelOptions dp_options;
    int64_t dp = 0;
    bool tables = true;
    std::string all_reduce_csv_path, modes_csv_path;
    CommandLine command_line("Chapter 02: data parallelism", options);
    add_comm_flags(command_line, comm_options);
    add_data_parallel_flags(command_line, dp, dp_options);
    command_line.group("Output");
    command_line.add_switch("--tables", tables, "time all-reduce and data parallelism after training");
    command_line.add_output("--all-reduce-csv", all_reduce_csv_path, "FILE.csv: the first table");
    command_line.add_output("--modes-csv", modes_csv_path, "FILE.csv: the second table");
    command_line.parse(argc, argv);

    if (!tables && !(all_reduce_csv_path.empty() && modes_csv_path.empty()))
        usage_error("--all-reduce-csv, --modes-csv: with --tables off there is nothing to write; leave them out");

    const Comm world = connect(comm_options, options);
    dp = data_parallel_ranks(dp, world, 1);
    command_line.check_batches(dp);
    dp_options.micro_batches = options.accumulation(dp);

    std::optional<TrainingRun> run;
    std::optional<OutputFile> all_reduce_file, modes_file;
    const bool compares = tables && dp > 1 && comm_options.backend != "fake";
    together([&] {
        if (!compares && !(all_reduce_csv_path.empty() && modes_csv_path.empty()))
            usage_error(
                "--all-reduce-csv, --modes-csv: one rank has nothing to compare; start two or more (mpirun -np 2)");
        if (this_rank == 0 && !all_reduce_csv_path.empty())
            all_reduce_file.emplace("--all-reduce-csv", all_reduce_csv_path);
        if (this_rank == 0 && !modes_csv_path.empty()) modes_file.emplace("--modes-csv", modes_csv_path);
        run.emplace(options, command_line.values());
    });
    const Comm ranks = world.split([](int) { return 0; }, "dp");
    DataParallel data_parallel(run->model, ranks, dp_options);
    data_parallel.attach(run->trainer);
    report_communication(run->trainer, world);
    run->materialise();
    say("{} data-parallel ranks over {}; gradients: {} in {} bucket(s), {}\n", dp, world.backend(),
        human_bytes(double(data_parallel.gradient_bytes())), data_parallel.buckets(),
        options.accumulation(dp) > 1 ? fmt::format("once per {} micro-batches", options.accumulation(dp))
                                     : "every step");
    run->trainer.run();
    if (options.steps > 0)
        say("\nrank 0:\n{}",
            memory_table(options.model, run->model.options, options.micro_batch, options.seq_len, run->trainer.peak()));
    if (!compares) return world.finish();

    std::vector<int64_t> sizes;
    for (int64_t bytes = 1 << 10; bytes <= 64 << 20; bytes *= 4) sizes.push_back(bytes);
    const auto times = time_all_reduce(ranks, run->model.options.device, sizes);
    say("\n{}", all_reduce_table(times, ranks.size()));
    const auto modes = time_data_parallel(ranks, run->model, run->trainer, data_parallel, dp_options);
    say("\n{}", data_parallel_table(modes));
    if (all_reduce_file) {
        all_reduce_file->write(all_reduce_csv(times, ranks.size()));
        all_reduce_file->commit();
    }
    if (modes_file) {
        modes_file->write(data_parallel_csv(modes, ranks.size()));
        modes_file->commit();
    }
    world.finish();
}

}  // namespace

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
