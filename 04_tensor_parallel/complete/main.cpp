// Megatron tensor parallelism: Z = sum_r h(X A_r^T) B_r^T, each layer sharded over N ranks, one sum per half block.
//
// Run:   mpirun -np 2 build/bin/04_tensor_parallel --tp 2
//        mpirun --oversubscribe -np 4 build/bin/04_tensor_parallel --tp 4 --sequence-parallel on --tp-overlap on
// Watch: the loss is chapter 01's; params, grads and optimizer shrink to 1/N, activations do with --sequence-parallel;
//        every layer sends 4 all-reduces of its activations, or the same bytes as all-gathers and reduce-scatters.
#include "02_data_parallel/complete/data_parallel.h"
#include "04_tensor_parallel/complete/flags.h"
#include "04_tensor_parallel/complete/training_report.h"

using namespace train70b;

static void program(int argc, char** argv) {
    Program p("Chapter 04: tensor parallelism", "print what a rank keeps and sends, beside the formulas");
    DataParallelOptions dp_options;
    TensorParallelOptions options;
    int64_t tp = 0;
    add_data_parallel_flags(p.flags, p.dp, dp_options);
    add_tensor_parallel_flags(p.flags, tp, options);

    p.connect(argc, argv);
    together([&] { check_llama(p.options.model); });
    p.divide(tp = ranks_per_copy(tp, p.dp, p.world), 0, "--tp");
    check_tensor_parallel(p.options.model, p.options.seq_len, tp, options);
    p.prepare();
    const auto [tensor_ranks, data_ranks] = split(p.world, tp);
    const TensorParallel tensor_parallel(p.model(), tensor_ranks, options);
    DataParallel store(p.model(), data_ranks, dp_options, AdamW::maker(p.options.adamw()));
    p.use(store, data_ranks);
    p.trainer().groups.tp = group_of(tensor_ranks);
    p.allocate();
    say_layout(p, tp, options);
    p.train();
    print_tables(p, tp, options);
    p.finish();
}

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
