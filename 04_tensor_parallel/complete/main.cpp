// Megatron tensor parallelism: Z = sum_r h(X A_r^T) B_r^T, each layer sharded over N ranks, one sum per half block.
//
// Run:   mpirun -np 2 build/bin/04_tensor_parallel --tp 2
//        mpirun --oversubscribe -np 4 build/bin/04_tensor_parallel --tp 4 --sequence-parallel on --tp-overlap on
// Watch: the loss is chapter 01's; params, grads and optimizer shrink to 1/N, activations do with --sequence-parallel;
//        every layer sends 4 all-reduces of its activations, or the same bytes as all-gathers and reduce-scatters.
#include "02_data_parallel/complete/data_parallel.h"
#include "02_data_parallel/runtime/program.h"
#include "04_tensor_parallel/complete/flags.h"
#include "04_tensor_parallel/complete/traffic.h"

using namespace train70b;

static void say_layout(const Program& p, int64_t tp, const TensorParallelOptions& o) {
    say("{} tensor-parallel x {} data-parallel ranks ({}); sequence parallelism {}, overlap {}\n", tp, p.dp,
        p.world.backend(), o.sequence_parallel ? "on" : "off", o.overlap ? "on" : "off");
}

// What a rank keeps and sends in the run's last step, measured and computed.
static void print_tables(const Program& p, int64_t tp, const TensorParallelOptions& options) {
    if (!p.prints_tables()) return;
    const TrainOptions& o = p.options;
    const Llama::Options& types = p.model().options;
    const StepReport& step = p.last_step();
    const std::string name =
        fmt::format("tp {}{}{}", tp, options.sequence_parallel ? ", sequence" : "", options.overlap ? ", overlap" : "");
    const int64_t n = tensor_parallel_elements(o.model, tp);
    const ActivationFormula activations =
        activation_formula(o.model, o.micro_batch, o.seq_len, types.dtype, types.recompute,
                           {tp, options.sequence_parallel, types.loss_chunk, types.recompute_every});
    say(memory_table(fmt::format("bytes of rank {}: peak of the last step; below it the formula", p.world.rank()),
                     {{name,
                       step.peak,
                       {size_of(types.dtype) * n, size_of(types.grad_dtype) * n, AdamW::state_bytes(types.dtype) * n,
                        activations.total, -1, -1, -1}}}));
    if (tp == 1) return;
    const TrafficShape shape{o.micro_batch * o.seq_len, tp, types.dtype, types.grad_dtype, options, types.recompute,
                             types.recompute_every};
    const Traffic block = layer_traffic(o.model, shape);
    Table traffic("bytes that a rank sends to the others of its tp group",
                  {"", "block: formula", "step", "formula", Column("a block's collectives").left()});
    traffic.row({name, block.bytes(), sent_bytes(step, "tp"),
                 step_traffic(o.model, shape, o.accumulation(p.dp)).bytes(), block.text()});
    say(traffic);
}

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
