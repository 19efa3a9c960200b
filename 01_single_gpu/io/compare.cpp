// Two reference runs, held against each other: per parameter |gradient a - gradient b| / |gradient b| at step 1, the
// weights that step 1 leaves, and the losses and gradient norms of the first steps. Losses alone can agree with a
// gradient scaled wrongly: AdamW hides it.
//
// Run:   build/bin/01_single_gpu --steps 4 --save-reference a
//        build/bin/01_single_gpu --steps 4 --micro-batch 4 --save-reference b
//        build/bin/compare a b
// Watch: the order of a sum is all that differs: about 1e-7. Exit code 0: within the tolerance, 1: not.
#include "01_single_gpu/io/flags.h"
#include "01_single_gpu/io/reference.h"

using namespace train70b;

int main(int argc, char** argv) {
    int exit_code = 0;
    const int failure = run_program(argc, argv, [&exit_code](int argc, char** argv) {
        Flags flags("Compares two reference runs (folders that --save-reference wrote)");
        std::string a, b;
        double tolerance = -1;  // by the dtypes of the runs
        flags.add("A", a, "the run in question").required();
        flags.add("B", b, "the run to hold it against").required();
        flags.add("--tolerance", tolerance, "relative", real_number(0, 1))
            .default_text("fp64 1e-10, fp32 5e-6, bf16 2e-2");
        flags.parse(argc, argv);
        const Comparison comparison = compare_references(a, b);
        if (tolerance < 0) tolerance = comparison.default_tolerance();
        fmt::print("{}", comparison_table(comparison, tolerance));
        exit_code = comparison.within(tolerance) ? 0 : 1;
    });
    return failure ? failure : exit_code;
}
