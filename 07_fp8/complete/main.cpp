// FP8 training: the products of the linear layers in 8 bits, Y = s_x s_w X8 W8^T with X = s_x X8; moments in 8 bits.
//
// Run:   build/bin/07_fp8 --dtype bf16                      (--fp8 current)
//        build/bin/07_fp8 --dtype bf16 --fp8 blockwise --optimizer adamw8bit
//        mpirun -np 2 build/bin/07_fp8 --zero 3             (weights are gathered in FP8)
// Watch: the loss is near chapter 01's, never equal to it; activations and, with adamw8bit, optimizer states shrink; a
//        product's error depends on its scales, not on its size.
#include "03_zero/complete/flags.h"
#include "04_tensor_parallel/complete/flags.h"
#include "07_fp8/complete/flags.h"
#include "07_fp8/complete/training_report.h"

using namespace train70b;

static void program(int argc, char** argv) {
    Program p("Chapter 07: FP8", "print what the run keeps and sends, beside the formulas");
    ZeroOptions zero{.stage = 0};
    Precision precision;
    int64_t tp = 1;
    add_zero_flags(p.flags, p.dp, zero);
    p.flags.add("--tp", tp, "tensor-parallel ranks", integer_from(1));
    add_fp8_flags(p.flags, precision.fp8, precision.optimizer);

    p.connect(argc, argv);
    together([&] { check_llama(p.options.model); });
    p.divide(tp, 0, "--tp");
    p.prepare([&, node_ranks = ranks_on_this_node()] {
        const TrainOptions& o = p.options;
        check_tensor_parallel(o.model, o.seq_len, tp, {});
        check_precision(precision.fp8, precision.optimizer, o, zero.offload != Offload::none);
        check_zero(zero, o, p.dp, node_ranks, state_bytes(precision.optimizer, o.llama().dtype, 0));
        check_fp8(precision.fp8, o.model, o.micro_batch * o.seq_len, tp);
    });
    const TensorComms layout = split(p.world, tp);
    const Fp8Trainer composed(p.model(), p.trainer(), p.options, p.world, layout, zero, precision);
    p.allocate();
    say_layout(p, composed, layout, zero, precision);
    p.train();
    print_table(p, layout, precision);
    p.finish();
}

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
