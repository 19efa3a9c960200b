// FP8 training: the products of the linear layers in 8 bits, Y = s_x s_w X8 W8^T with X = s_x X8; moments in 8 bits.
//
// Run:   build/bin/07_fp8 --dtype bf16                      (--fp8 current)
//        build/bin/07_fp8 --dtype bf16 --fp8 blockwise --optimizer adamw8bit
//        mpirun -np 2 build/bin/07_fp8 --zero 3             (weights are gathered in FP8)
// Watch: the loss is near chapter 01's, never equal to it; activations and, with adamw8bit, optimizer states shrink; a
//        product's error depends on its scales, not on its size.
#include "03_zero/flags.h"
#include "04_tensor_parallel/flags.h"
#include "07_fp8/flags.h"
#include "07_fp8/report.h"

using namespace train70b;

namespace {

void program(int argc, char** argv) {
    Program p("Chapter 07: FP8", "compare precisions after training");
    ZeroOptions zero{.stage = 0};
    Precision precision;
    Fp8Report report;
    int64_t tp = 1;
    add_zero_flags(p.flags, p.dp, zero);
    p.flags.add("--tp", tp, "tensor-parallel ranks", integer_from(1));
    add_fp8_flags(p.flags, precision.fp8, precision.optimizer);
    report.add_flags(p.flags);

    p.connect(argc, argv);
    report.check(p);
    p.divide(tp);
    check_tensor_parallel(p.options.model, p.options.seq_len, tp, {});
    p.prepare([&, node_ranks = ranks_on_this_node()] {
        const TrainOptions& o = p.options;
        check_precision(precision.fp8, precision.optimizer, o.dtype);
        check_zero(zero, o, p.dp, node_ranks, moment_bytes(precision.optimizer, o.llama().dtype));
        check_fp8(precision.fp8, o.model, o.micro_batch * o.seq_len, tp);
        report.open();
    });

    const Layout layout{p.world.split([tp](int rank) { return int(rank / tp); }, "tp"),
                        p.world.split([tp](int rank) { return int(rank % tp); }, "dp")};
    {
        const Composition composition(p.model(), p.trainer(), p.options, layout, zero, precision);
        p.allocate();
        for (const std::string& why : composition.fp8.left_out()) say("stays in {}: {}\n", p.options.dtype, why);
        say("{} of {} linear layers of the blocks in 8 bits ({}); {}; {} tensor-parallel x {} data-parallel ranks "
            "({}), ZeRO stage {}\n",
            composition.fp8.layers().size(), 4 * p.options.model.layers, precision.fp8.recipe, precision.optimizer, tp,
            p.dp, p.world.backend(), zero.stage);
        p.train();
    }
    p.release();
    if (p.tables && p.world.has_peers()) report.print(p, layout, zero, precision);
    p.finish();
}

}  // namespace

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
