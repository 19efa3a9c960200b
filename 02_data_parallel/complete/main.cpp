// Data parallelism: each of N ranks holds the whole model and computes 1/N of the batch; g = sum_r g_r by all-reduce.
//
// Run:   mpirun -np 2 build/bin/02_data_parallel
//        mpirun -np 4 --oversubscribe build/bin/02_data_parallel --all-reduce ring --bucket-mb 0.5 --steps 20
// Watch: the loss is chapter 01's, whatever N; each rank sends 2 G (N-1)/N bytes per step for G bytes of gradients;
//        params, grads and optimizer take as much memory on every rank as they did on one.
#include "02_data_parallel/complete/report.h"

using namespace train70b;

static void program(int argc, char** argv) {
    Program p("Chapter 02: data parallelism", "measure all-reduce algorithms and data-parallel modes after training");
    DataParallelOptions options;
    add_data_parallel_flags(p.flags, p.dp, options);
    DataParallelReport report(p.flags);

    p.connect(argc, argv);
    p.divide(1);
    p.prepare([&] { report.open(p); });

    const Comm ranks = p.world.split([](int) { return 0; }, "dp");
    DataParallel store(p.model(), ranks, options, AdamW::maker(p.options.adamw()));
    p.use(store, ranks);
    p.allocate();
    say_layout(p, store);
    p.train();
    report.print(p, ranks, store, options);
    p.finish();
}

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
