// Context parallelism: each of N ranks holds 1/N of every sequence's tokens; in attention, keys and values are passed
// around a ring, or heads are exchanged for tokens, or all keys and values are gathered.
//
// Run:   mpirun -np 2 build/bin/06_context_parallel --cp 2
//        mpirun --oversubscribe -np 4 build/bin/06_context_parallel --cp 4 --cp-algorithm ulysses
// Watch: the loss is chapter 01's, whatever the algorithm; activations shrink to 1/N; in the plain ring the first
//        rank waits for the last one, with zigzag all do the same work.
#include "02_data_parallel/data_parallel.h"
#include "06_context_parallel/flags.h"
#include "06_context_parallel/report.h"

using namespace train70b;

namespace {

void program(int argc, char** argv) {
    Program p("Chapter 06: context parallelism", "compare all algorithms after training");
    DataParallelOptions dp_options;
    ContextParallelOptions options;
    int64_t cp = 0;
    add_data_parallel_flags(p.flags, p.dp, dp_options);
    add_context_parallel_flags(p.flags, cp, options);

    p.connect(argc, argv);
    p.divide(cp = ranks_per_copy(cp, p.dp, p.world));
    const ContextLayout layout = context_layout(p.options.model, p.options.seq_len, cp, options);
    p.prepare();

    const Comm ranks = p.world.split([cp](int rank) { return int(rank / cp); }, "cp");
    const Comm copies = p.world.split([](int) { return 0; }, "dp_cp");  // gradients: over data and context ranks alike
    {
        apply_context_parallel(p.model(), ranks, layout);
        DataParallel store(p.model(), copies, dp_options, AdamW::maker(p.options.adamw()));
        p.use(store, copies);
        p.trainer().groups.cp = group_of(ranks);
        p.trainer().groups.dp = std::make_shared<Coordinate>(p.world.rank() / cp, p.dp);
        p.trainer().batches.tokens = layout.tokens_of(ranks.rank(), p.options.seq_len);
        p.allocate();
        say("{} context-parallel x {} data-parallel ranks ({}); {}: {} {}, {} divide heads\n", cp, p.dp,
            p.world.backend(), options.algorithm, layout.groups(), layout.gather ? "gather" : "in the ring",
            layout.ulysses);
        p.train();
    }
    p.release();
    if (p.compares(cp))
        print_tables(p, ranks, options);
    else if (p.tables)
        say("\n{}", long_context_table());
    p.finish();
}

}  // namespace

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
