#pragma once
// The file of --matmul-autotune: for each product on a GPU the fastest of the algorithms that cuBLASLt's heuristic
// names first (matmul.cu). A line: GPU and version of cuBLASLt; product; algorithm. Ranks may share it: each appends
// what it has timed and reads again, and of a product's lines the first counts: all ranks run the same kernels.
#include <array>
#include <cstdint>
#include <optional>
#include <string>

namespace train70b {

inline std::string matmul_autotune;  // the file, of this process; empty: the heuristic's first choice

// A cublasLtMatmulAlgo_t, which the same version of cuBLASLt may restore.
using AlgorithmWords = std::array<uint64_t, 8>;
// The product's; empty: not in the file, which is created if there is none. Usage error unless it can be read and
// written, and all of its lines are of this GPU and cuBLASLt.
std::optional<AlgorithmWords> tuned_algorithm(const std::string& product);
void add_tuned_algorithm(const std::string& product, const AlgorithmWords& algorithm);
void warn_of_tuned_algorithm(const std::string& product);  // cuBLASLt does not take it

}  // namespace train70b
