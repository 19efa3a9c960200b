#pragma once
// The programs of the chapters, called in this process.
#include <string>

namespace train70b::test {

// What main() hands to run_program() or run_ranks(). name: 01_single_gpu to 08_3d_full, schedule and plan.
void call_program(const std::string& name, int argc, char** argv);

}  // namespace train70b::test
