#pragma once
// Which GPUs and drivers a build can run on.
#include <string>
#include <string_view>

namespace train70b {

// Empty, or that a build for these architectures has no code for a GPU of compute capability major.minor. They are
// CMake's, with commas: "90a-real,80-virtual". N-real: machine code, for N and later minor versions of the same major.
// N-virtual: PTX, which the driver translates for any later GPU at the program's first start. N: both. Code of an
// architecture with an a runs on exactly that one.
std::string no_code_for(std::string_view architectures, int major, int minor);

// The FP8 recipes (chapter 07) whose products cuBLASLt 13 has for a GPU, by its documentation.
std::string fp8_recipes_of(int major, int minor);

// Empty, or that the driver does not know the CUDA version of this build. Both as 1000 major + 10 minor.
std::string driver_too_old(int driver, int runtime);

}  // namespace train70b
