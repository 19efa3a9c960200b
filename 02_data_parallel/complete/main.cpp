// Data parallelism: each of N ranks holds the whole model and computes 1/N of the batch; g = sum_r g_r by all-reduce.
//
// Run:   mpirun -np 2 build/bin/02_data_parallel
//        mpirun -np 4 --oversubscribe build/bin/02_data_parallel --all-reduce ring --bucket-mb 0.5 --steps 20
//        mpirun -np 2 build/bin/02_data_parallel --outer-steps 10
// Watch: the loss is chapter 01's, whatever N; each rank sends 2 G (N-1)/N bytes per step for G bytes of gradients;
//        params, grads and optimizer take as much memory on every rank as they did on one.
#include "02_data_parallel/complete/data_parallel.h"
#include "02_data_parallel/complete/outer_run.h"

using namespace train70b;

static void say_layout(const Program& p, const DataParallel& store) {
    const int64_t micro_batches = p.options.accumulation(p.dp);
    say("{} data-parallel ranks over {}; gradients: {} in {} bucket(s), {}\n", p.dp, p.world.backend(),
        human_bytes(double(store.gradient_bytes())), store.buckets(),
        micro_batches > 1 ? fmt::format("once per {} micro-batches", micro_batches) : "every step");
}

static void print_table(Program& p) {
    const TrainOptions& o = p.options;
    say("\nrank {}:\n{}", p.world.rank(),
        memory_table(o.model, p.model().options, o.micro_batch, o.seq_len, p.trainer().peak()).text());
}

static void program(int argc, char** argv) {
    Program p("Chapter 02: data parallelism", "print the memory of the run beside its formula");
    DataParallelOptions options;
    add_data_parallel_flags(p.flags, p.dp, options);
    OuterOptions outer;
    add_outer_flags(p.flags, outer);

    p.connect(argc, argv);
    p.divide(1);
    p.prepare([&] { check_outer_steps(outer, p.options, p.flags); });

    const Comm ranks = p.world.split([](int) { return 0; }, "dp");
    if (outer.every > 0) {
        train_by_outer_steps(p, ranks, outer);
        return p.finish();
    }
    DataParallel store(p.model(), ranks, options, AdamW::maker(p.options.adamw()));
    p.use(store, ranks);
    p.allocate();
    say_layout(p, store);
    p.train();
    if (p.prints_tables()) print_table(p);
    p.finish();
}

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
