// Context parallelism: N ranks hold 1/N of every sequence's tokens; in attention keys and values go round, or
// heads do, or all keys and values are gathered.
//
// Run:   mpirun -np 2 build/bin/06_context_parallel --cp 2
//        mpirun --oversubscribe -np 4 build/bin/06_context_parallel --cp 4 --cp-algorithm ulysses
// Watch: the loss is chapter 01's, whatever the algorithm; activations shrink to 1/N; the plain ring's last rank works
//        while its first one waits, and zigzag's all do the same.
#include "02_data_parallel/data_parallel.h"
#include "02_data_parallel/runtime/launch.h"
#include "06_context_parallel/tables.h"

using namespace train70b;

namespace {

void print_tables(const TrainOptions& options, const Dataset& data, const Comm& world, const Comm& ranks,
                  const ContextParallelOptions& chosen) {
    std::vector<ContextRun> algorithms, lengths;
    for (const std::string& name : context_algorithms()) {
        ContextParallelOptions each{.algorithm = name};
        if (name == chosen.algorithm) each = chosen;
        try {
            context_layout(options.model, options.seq_len, ranks.size(), each);
        } catch (const UsageError& error) {
            say("{} left out: {}\n", name, error.what());
            continue;
        }
        algorithms.push_back(run_context(options, data, ranks, each));
    }
    say("\n{}\n{}", work_table(algorithms), traffic_table(algorithms));
    TrainOptions longer = options;
    longer.micro_batch = 1;
    for (const char* name : {"zigzag", "gather"})
        for (longer.seq_len = 512; longer.seq_len <= 4096; longer.seq_len *= 2)
            if (longer.seq_len % (2 * ranks.size()) == 0 && data.train_tokens() > longer.seq_len)
                lengths.push_back(run_context(
                    longer, Dataset(options.data, options.model.vocab, longer.seq_len, options.val_fraction), ranks,
                    {.algorithm = name}));
    say("\n{}\n{}", memory_table(lengths), error_table(world));
    if (this_rank == 0) say("\n{}", long_context_table());
    world.barrier().wait();
}

void program(int argc, char** argv) {
    TrainOptions options;
    CommOptions comm_options;
    DataParallelOptions dp_options;
    ContextParallelOptions context_options;
    int64_t dp = 0, cp = 0;
    bool tables = true;
    CommandLine command_line("Chapter 06: context parallelism", options);
    add_comm_flags(command_line, comm_options);
    add_data_parallel_flags(command_line, dp, dp_options);
    add_context_parallel_flags(command_line, cp, context_options);
    command_line.group("Output");
    command_line.add_switch("--tables", tables, "run all algorithms after training, and compare");
    command_line.parse(argc, argv);

    const Comm world = connect(comm_options, options);
    cp = ranks_per_copy(cp, dp, world);
    dp = data_parallel_ranks(dp, world, cp);
    command_line.check_batches(dp);
    const ContextLayout layout = context_layout(options.model, options.seq_len, cp, context_options);
    dp_options.micro_batches = options.accumulation(dp);

    std::optional<TrainingRun> run;
    together([&] { run.emplace(options, command_line.values()); });
    const Comm context_ranks = world.split([cp](int rank) { return int(rank / cp); }, "cp");
    const Comm copies = world.split([](int) { return 0; }, "dp_cp");  // gradients: over data and context ranks alike
    {
        apply_context_parallel(run->model, context_ranks, layout);
        DataParallel data_parallel(run->model, copies, dp_options);
        data_parallel.attach(run->trainer);
        attach_context_parallel(run->trainer, layout, context_ranks.rank(), world.rank() / cp, dp, options.seq_len);
        report_communication(run->trainer, world);
        run->materialise();
        say("{} context-parallel x {} data-parallel ranks ({}); {}: {} {}, {} divide heads\n", cp, dp, world.backend(),
            context_options.algorithm, layout.groups(), layout.gather ? "gather" : "in the ring", layout.ulysses);
        run->trainer.run();
    }
    run.reset();
    if (tables && cp > 1 && comm_options.backend != "fake")
        print_tables(options, Dataset(options.data, options.model.vocab, options.seq_len, options.val_fraction), world,
                     context_ranks, context_options);
    else if (tables)
        say("\n{}", long_context_table());
    world.finish();
}

}  // namespace

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
