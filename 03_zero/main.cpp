// ZeRO: data parallelism without duplicates. Stage 1 shards the optimizer states, 2 the gradients too, 3 everything.
//
// Run:   mpirun -np 2 build/bin/03_zero --zero 3
//        mpirun --oversubscribe -np 4 build/bin/03_zero --zero 3 --hybrid-shard 2 --prefetch 2 --offload optimizer
// Watch: the loss is chapter 02's to the last bit, whatever the stage; optimizer, grads and params shrink to 1/N, one
//        after the other; stage 3 sends 1.5 times the bytes of the others.
#include "02_data_parallel/runtime/launch.h"
#include "03_zero/tables.h"

using namespace train70b;

namespace {

void print_tables(const TrainOptions& options, const Dataset& data, const Comm& ranks, const ZeroOptions& chosen) {
    ZeroOptions zero = chosen;
    zero.hybrid_shard = 0;
    zero.offload = Offload::none;
    zero.bucket_mb = -1;
    zero.micro_batches = 1;
    std::vector<ZeroRun> memory, wire, prefetch;
    for (zero.stage = 0; zero.stage <= 3; ++zero.stage)
        memory.push_back(run_zero(options, data, ranks, zero, fmt::format("stage {}", zero.stage)));
    zero.stage = 3;
    zero.offload = Offload::optimizer;
    memory.push_back(run_zero(options, data, ranks, zero, "3, offload optimizer"));
    zero.offload = Offload::all;
    memory.push_back(run_zero(options, data, ranks, zero, "3, offload all"));
    zero.offload = Offload::none;
    say("\n{}", memory_table(memory, ranks.size()));

    for (const int64_t m : {1, 2, 4}) {
        if (options.global_batch % (ranks.size() * m) != 0) continue;
        zero.micro_batches = m;
        for (zero.stage = 0; zero.stage <= 3; ++zero.stage)
            wire.push_back(run_zero(options, data, ranks, zero, fmt::format("stage {}", zero.stage), 1));
    }
    say("\n{}", wire_table(wire, ranks.size()));

    zero.micro_batches = 1;
    zero.stage = 3;
    for (zero.prefetch = 0; zero.prefetch <= 2; ++zero.prefetch)
        prefetch.push_back(run_zero(options, data, ranks, zero, fmt::format("--prefetch {}", zero.prefetch), 3));
    say("\n{}\n{}", prefetch_table(prefetch), projection_table());
}

void program(int argc, char** argv) {
    TrainOptions options;
    CommOptions comm_options;
    ZeroOptions zero_options;
    int64_t dp = 0;
    bool tables = true;
    CommandLine command_line("Chapter 03: ZeRO", options);
    add_comm_flags(command_line, comm_options);
    add_zero_flags(command_line, dp, zero_options);
    command_line.group("Output");
    command_line.add_switch("--tables", tables, "run all stages after training, and compare");
    command_line.parse(argc, argv);

    const Comm world = connect(comm_options, options);
    dp = data_parallel_ranks(dp, world, 1);
    command_line.check_batches(dp);
    zero_options.micro_batches = options.accumulation(dp);

    const int64_t node_ranks = ranks_on_this_node();
    std::optional<TrainingRun> run;
    together([&] {
        check_zero(zero_options, options, dp, node_ranks);
        run.emplace(options, command_line.values());
    });
    const Comm ranks = world.split([](int) { return 0; }, "dp");
    {
        Zero zero(run->model, ranks, zero_options, options.adamw());
        zero.attach(run->trainer);
        report_communication(run->trainer, world);
        run->materialise();
        say("ZeRO stage {} over {} of {} data-parallel ranks ({}); {} elements of padding\n", zero_options.stage,
            zero.shard_ranks(), dp, world.backend(), zero.padded_elements() - options.model.parameters());
        run->trainer.run();
    }
    run.reset();
    if (tables && dp > 1 && comm_options.backend != "fake")
        print_tables(options, Dataset(options.data, options.model.vocab, options.seq_len, options.val_fraction), ranks,
                     zero_options);
    world.finish();
}

}  // namespace

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
