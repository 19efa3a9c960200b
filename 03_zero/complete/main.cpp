// ZeRO: data parallelism without replicated states. Stage 1 shards the optimizer states, 2 the gradients too, 3
// everything.
//
// Run:   mpirun -np 2 build/bin/03_zero --zero 3
//        mpirun --oversubscribe -np 4 build/bin/03_zero --zero 3 --hybrid-shard 2 --prefetch 2 --offload optimizer
// Watch: the loss is chapter 02's to the last bit, whatever the stage; optimizer, grads and params shrink to 1/N, one
//        after the other; stage 3 sends 1.5 times the bytes of the others.
#include "03_zero/complete/flags.h"
#include "03_zero/complete/training_report.h"

using namespace train70b;

static void program(int argc, char** argv) {
    Program p("Chapter 03: ZeRO", "print what the stage keeps and sends, beside the formulas");
    ZeroOptions options;
    add_zero_flags(p.flags, p.dp, options);

    p.connect(argc, argv);
    p.divide(1);
    p.prepare([&, node_ranks = ranks_on_this_node()] { check_zero(options, p.options, p.dp, node_ranks); });

    const Comm ranks = p.world.split([](int) { return 0; }, "dp");
    Zero store(p.model(), ranks, options, AdamW::maker(p.options.adamw()));
    p.use(store, ranks);
    p.allocate();
    say_layout(p, store, options);
    p.train();
    print_tables(p, store, options);
    p.finish();
}

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
