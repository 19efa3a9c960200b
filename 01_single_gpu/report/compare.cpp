// Compares two reference runs: |gradient a - gradient b| / |gradient b| of each parameter at step 1, the weights after
// step 1, and the losses and gradient norms of the first steps. Losses alone may agree although gradients are scaled
// wrongly, because AdamW is invariant to their scale.
//
// Run:   build/bin/01_single_gpu --steps 4 --save-reference a
//        build/bin/01_single_gpu --steps 4 --micro-batch 4 --save-reference b
//        build/bin/compare a b
// Watch: only the order of sums differs: deviations of about 1e-7. Exit code 0 if within the tolerance, else 1.
#include "01_single_gpu/flags/flags.h"
#include "01_single_gpu/report/comparison.h"

using namespace train70b;

int main(int argc, char** argv) {
    int exit_code = 0;
    const int failure = run_program(argc, argv, [&exit_code](int argc, char** argv) {
        Flags flags("Compare two reference runs, which --save-reference wrote");
        std::string a, b;
        double tolerance = -1;  // < 0: depends on the dtypes of the runs
        const Check folder = {[](const std::string& path) { return path.empty() ? "must name a folder" : ""; }, "DIR"};
        flags.add("A", a, "folder of the run to check", folder).required();
        flags.add("B", b, "folder of the reference run", folder).required();
        flags.add("--tolerance", tolerance, "maximum relative deviation", real_number(0, 1))
            .default_text("by dtype: fp64 1e-10, fp32 5e-6, bf16 2e-2");
        flags.parse(argc, argv);
        const Comparison comparison = compare_references(a, b);
        if (tolerance < 0) tolerance = comparison.default_tolerance();
        std::fputs(comparison_table(comparison, tolerance).c_str(), stdout);
        exit_code = comparison.within(tolerance) ? 0 : 1;
    });
    return failure ? failure : exit_code;
}
