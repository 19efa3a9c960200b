// Megatron tensor parallelism: Z = sum_r h(X A_r^T) B_r^T, each layer divided over N ranks, one sum per half block.
//
// Run:   mpirun -np 2 build/bin/04_tensor_parallel --tp 2
//        mpirun --oversubscribe -np 4 build/bin/04_tensor_parallel --tp 4 --sequence-parallel on --tp-overlap on
// Watch: the loss is chapter 01's; params, grads and optimizer shrink to 1/N, activations do with --sequence-parallel;
//        every layer sends 4 all-reduces of its activations, or the same bytes as all-gathers and reduce-scatters.
#include "02_data_parallel/data_parallel.h"
#include "02_data_parallel/runtime/launch.h"
#include "04_tensor_parallel/tables.h"

using namespace train70b;

namespace {

// Layouts of fewer ranks than the chosen one hold more of the model; of a large one they might not fit.
constexpr int64_t kSmallModel = 500'000'000;  // parameters

void print_tables(const TrainOptions& options, const Dataset& data, const Comm& world, int64_t chosen) {
    std::vector<TensorParallelRun> runs, plain;
    for (int64_t tp = options.model.parameters() > kSmallModel ? chosen : 1; tp <= world.size(); ++tp)
        for (const TensorParallelOptions& how :
             {TensorParallelOptions{false, false}, {false, true}, {true, false}, {true, true}}) {
            const bool power = (tp & (tp - 1)) == 0, changes = tp > 1 || !(how.sequence_parallel || how.overlap);
            if (world.size() % tp != 0 || !(power || tp == chosen) || !changes) continue;
            try {
                check_tensor_parallel(options.model, options.seq_len, tp, how);
            } catch (const UsageError&) { continue; }
            runs.push_back(run_tensor_parallel(options, data, world, tp, how));
            if (!how.overlap) plain.push_back(runs.back());
        }
    say("\n{}\n{}\n{}", memory_table(plain, options.llama()), traffic_table(runs), time_table(runs));
}

void program(int argc, char** argv) {
    TrainOptions options;
    CommOptions comm_options;
    DataParallelOptions dp_options;
    TensorParallelOptions tp_options;
    int64_t dp = 0, tp = 0;
    bool tables = true;
    std::string links_path, efficiency_csv_path;
    CommandLine command_line("Chapter 04: tensor parallelism", options);
    add_comm_flags(command_line, comm_options);
    add_data_parallel_flags(command_line, dp, dp_options);
    add_tensor_parallel_flags(command_line, tp, tp_options);
    command_line.group("Output");
    command_line.add_switch("--tables", tables, "run all layouts after training, and compare");
    command_line.add_input("--links", links_path,
                           "FILE.json: the links of the estimated table [04_tensor_parallel/links.json]");
    command_line.add_output("--efficiency-csv", efficiency_csv_path, "FILE.csv: the estimated table");
    command_line.parse(argc, argv);

    const Comm world = connect(comm_options, options);
    tp = ranks_per_copy(tp, dp, world);
    dp = data_parallel_ranks(dp, world, tp);
    command_line.check_batches(dp);
    check_tensor_parallel(options.model, options.seq_len, tp, tp_options);
    dp_options.micro_batches = options.accumulation(dp);
    if (!tables && !(links_path.empty() && efficiency_csv_path.empty()))
        usage_error("--links, --efficiency-csv: belong to the tables; leave out --tables off");

    std::optional<TrainingRun> run;
    std::optional<OutputFile> efficiency_file;
    Links links;
    together([&] {
        if (tables)
            links = read_links(links_path.empty() ? repository_file("04_tensor_parallel/links.json") : links_path);
        if (this_rank == 0 && !efficiency_csv_path.empty())
            efficiency_file.emplace("--efficiency-csv", efficiency_csv_path);
        run.emplace(options, command_line.values());
    });
    const Comm tensor_ranks = world.split([tp](int rank) { return int(rank / tp); }, "tp");
    const Comm data_ranks = world.split([tp](int rank) { return int(rank % tp); }, "dp");
    {
        const TensorParallel tensor_parallel = apply_tensor_parallel(run->model, tensor_ranks, tp_options);
        DataParallel data_parallel(run->model, data_ranks, dp_options);
        data_parallel.attach(run->trainer);
        tensor_parallel.attach(run->trainer);
        report_communication(run->trainer, world);
        run->materialise();
        say("{} tensor-parallel x {} data-parallel ranks ({}); sequence parallelism {}, overlap {}\n", tp, dp,
            world.backend(), tp_options.sequence_parallel ? "on" : "off", tp_options.overlap ? "on" : "off");
        run->trainer.run();
    }
    run.reset();
    if (efficiency_file) {
        efficiency_file->write(efficiency_csv(links));
        efficiency_file->commit();
    }
    if (tables && world.size() > 1 && comm_options.backend != "fake")
        print_tables(options, Dataset(options.data, options.model.vocab, options.seq_len, options.val_fraction), world,
                     tp);
    if (tables) say("\n{}", efficiency_table(links));
    world.finish();
}

}  // namespace

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
