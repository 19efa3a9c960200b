#include "01_single_gpu/ops/matmul_own.h"

#include <array>

#include "01_single_gpu/core/check.h"

namespace train70b {

std::string why_not_matmul(MatmulBy by, Device device, DType dtype) {
    if (by == MatmulBy::cublaslt) return "";
    const char* const name = std::array{"cublaslt", "naive", "tiled", "registers", "mma"}[size_t(by)];
    if (device == Device::cpu) return fmt::format("{}: kernels for --device cuda, not cpu (try --matmul auto)", name);
    if (by == MatmulBy::mma && dtype != DType::bf16)
        return fmt::format("mma: products of bf16, not {} (try --matmul registers)", name_of(dtype));
    return "";
}

}  // namespace train70b
