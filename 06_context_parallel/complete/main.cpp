// Context parallelism: N ranks hold 1/N of every sequence and exchange keys and values, or heads, in attention.
//
// Run:   mpirun -np 2 build/bin/06_context_parallel --cp 2
//        mpirun --oversubscribe -np 4 build/bin/06_context_parallel --cp 4 --cp-algorithm ulysses
// Watch: the loss is chapter 01's, whatever the algorithm; activations shrink to 1/N; in the plain ring the first
//        rank waits for the last one, with zigzag all do the same work.
#include "02_data_parallel/complete/data_parallel.h"
#include "06_context_parallel/complete/training_report.h"

using namespace train70b;

static void program(int argc, char** argv) {
    Program p("Chapter 06: context parallelism", "print who computes, sends and keeps how much, beside the formulas");
    DataParallelOptions dp_options;
    ContextParallelOptions options;
    int64_t cp = 0;
    add_data_parallel_flags(p.flags, p.dp, dp_options);
    add_context_parallel_flags(p.flags, cp, options);

    p.connect(argc, argv);
    together([&] { check_llama(p.options.model); });
    p.divide(cp = ranks_per_copy(cp, p.dp, p.world), 0, "--cp");
    const ContextLayout layout = context_layout(p.options.model, p.options.seq_len, cp, options);
    p.prepare();
    const Comm ranks = p.world.split([cp](int rank) { return int(rank / cp); }, "cp", GroupLoad::light);
    const Comm copies = p.world.split([](int) { return 0; }, "dp_cp");  // gradients: over data and context ranks alike
    apply_context_parallel(p.model(), ranks, layout);
    DataParallel store(p.model(), copies, dp_options, AdamW::maker(p.options.adamw()));
    p.use(store, copies, ranks);
    p.trainer().batches.of_rank = layout.of_rank(ranks.rank());
    p.allocate();
    say_layout(p, options.algorithm, layout);
    AttentionWork work(p.trainer(), ranks);
    p.train();
    print_tables(p, ranks, options.algorithm, layout, work);
    p.finish();
}

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
