// Two reference runs, held against each other: per parameter |gradient a - gradient b| / |gradient b| at step 1, and
// the losses and gradient norms of all steps. Losses alone can agree with a gradient scaled wrongly: AdamW hides it.
//
// Run:   build/bin/01_single_gpu --steps 4 --save-reference a
//        build/bin/01_single_gpu --steps 4 --micro-batch 4 --save-reference b
//        build/bin/compare a b
// Watch: the order of a sum is all that differs: about 1e-7. Exit code 0: within the tolerance, 1: not.
#include <CLI/CLI.hpp>

#include "01_single_gpu/reference.h"

using namespace train70b;

int main(int argc, char** argv) {
    int exit_code = 0;
    const int failure = run_program(argc, argv, [&exit_code](int argc, char** argv) {
        CLI::App app("Compares two reference runs (folders that --save-reference wrote)");
        std::string a, b;
        double tolerance = 5e-6;
        app.add_option("A", a, "the run in question")->required();
        app.add_option("B", b, "the run to hold it against")->required();
        app.add_option("--tolerance", tolerance, "relative")->check(real_number(0, 1))->capture_default_str();
        try {
            app.parse(argc, argv);
        } catch (const CLI::CallForHelp&) {
            fmt::print("{}", app.help());
            return;
        } catch (const CLI::ParseError& error) { usage_error("{}", error.what()); }
        const Comparison comparison = compare_references(a, b);
        fmt::print("{}", comparison_table(comparison, tolerance));
        exit_code = comparison.within(tolerance) ? 0 : 1;
    });
    return failure ? failure : exit_code;
}
