// Products of the emulated libraries, by definition. Of what the documentation of cuBLASLt ("cublasLtMatmul()")
// supports on Hopper, there is what the project uses.
#include "products.h"

#include <cblas.h>
#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <algorithm>
#include <vector>

namespace emulate {
namespace {

constexpr int64_t kBlock = 128;  // terms of the sum that share a scale in the last two modes

const char* name_of(cudaDataType_t type) {
    switch (type) {
        case CUDA_R_32F: return "fp32";
        case CUDA_R_16BF: return "bf16";
        case CUDA_R_8F_E4M3: return "e4m3";
        case CUDA_R_8F_E5M2: return "e5m2";
        default: return nullptr;
    }
}

const char* reason_against_fp8(const Product& p) {
    if (!p.x[A].fp8() || !p.x[B].fp8()) return "only one of A and B is FP8";
    if (p.x[A].type == CUDA_R_8F_E5M2 && p.x[B].type == CUDA_R_8F_E5M2) return "A and B are both e5m2";
    if (p.x[C].fp8()) return "a result in FP8, which the emulator lacks";
    if (!p.ta() || p.tb()) return "Hopper multiplies FP8 only with A transposed and B not";
    if (p.m() % 16 != 0 || p.n() % 16 != 0 || p.k() % 16 != 0) return "FP8: m, n and k must be multiples of 16";
    for (const Layout& each : p.x)
        if (each.ld * each.element() % 16 != 0) return "FP8: leading dimensions must be multiples of 16 bytes";
    if (capability() < 89) return "FP8 before Ada";
    if (p.operation.modes != Operation{}.modes && capability() / 10 != 9) return "scales by row or block but on Hopper";
    using Modes = std::array<ScaleMode, 2>;
    for (const Modes& each :
         {Modes{kTensor, kTensor}, {kOuter, kOuter}, {kVec128, kVec128}, {kVec128, kBlock128}, {kBlock128, kVec128}})
        if (p.operation.modes == each) return nullptr;
    return "scale modes of A and B that do not go together";
}
}  // namespace

std::string to_string(const Product& p) {
    std::string text = "m " + std::to_string(p.m()) + ", n " + std::to_string(p.n()) + ", k " + std::to_string(p.k()) +
                       (p.ta() ? ", A^T" : ", A") + (p.tb() ? " B^T" : " B") + ", types";
    for (const Layout& each : p.x) text += std::string(" ") + (name_of(each.type) ? name_of(each.type) : "unknown");
    return text;
}

const char* reason_against(const Product& p) {
    for (const Layout& each : p.x) {
        if (!name_of(each.type)) return "a type that the emulator lacks";
        if (each.rows < 1 || each.cols < 1) return "a dimension is 0";
        if (each.ld < each.rows) return "a leading dimension is less than the number of rows";
    }
    if (p.operation.compute != CUBLAS_COMPUTE_32F || p.operation.scale != CUDA_R_32F)
        return "a compute type or scale type that the emulator lacks";
    if ((p.tb() ? p.x[B].cols : p.x[B].rows) != p.k()) return "A and B differ in k";
    for (const Layout& each : {p.x[C], p.x[D]})
        if (each.rows != p.m() || each.cols != p.n()) return "C or D is not (m, n)";
    if (p.x[C].type != p.x[D].type) return "C and D of different types";
    if (p.x[A].fp8() || p.x[B].fp8()) return reason_against_fp8(p);
    if (p.operation.modes != Operation{}.modes) return "scale modes without FP8";
    if (p.x[A].type != p.x[B].type) return "A and B of different types";
    return p.x[C].type == p.x[A].type || p.x[C].type == CUDA_R_32F ? nullptr : "C of a type that A and B do not allow";
}

namespace {
int64_t blocks(int64_t n) { return (n + kBlock - 1) / kBlock; }
int64_t padded_blocks(int64_t k) { return (blocks(k) + 3) / 4 * 4; }  // in a row of 128 x 128 blocks
}  // namespace

size_t scale_bytes(ScaleMode mode, int64_t rows, int64_t k) {
    const int64_t count = mode == kTensor   ? 1
                          : mode == kOuter  ? rows
                          : mode == kVec128 ? rows * blocks(k)
                                            : blocks(rows) * padded_blocks(k);
    return sizeof(float) * size_t(count);
}
namespace {
// For each row, the scale of its terms in a block.
std::vector<float> scales_of(const void* scales, ScaleMode mode, int64_t rows, int64_t k, int64_t block) {
    std::vector<float> result(size_t(rows), 1);
    const float* from = static_cast<const float*>(scales);
    for (int64_t row = 0; scales && row < rows; ++row)
        result[size_t(row)] = from[mode == kTensor   ? 0
                                   : mode == kOuter  ? row
                                   : mode == kVec128 ? block * rows + row
                                                     : row / kBlock * padded_blocks(k) + block];
    return result;
}

std::array<float, 256> fp8_values(__nv_fp8_interpretation_t format) {
    std::array<float, 256> values;
    for (size_t i = 0; i < 256; ++i)
        values[i] = __half2float(__half(__nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t(i), format)));
    return values;
}
// The matrix in fp32, its columns without gaps.
std::vector<float> to_fp32(const void* data, const Layout& x) {
    static const std::array<float, 256> e4m3 = fp8_values(__NV_E4M3), e5m2 = fp8_values(__NV_E5M2);
    const auto& values = x.type == CUDA_R_8F_E4M3 ? e4m3 : e5m2;
    std::vector<float> wide(size_t(x.rows * x.cols));
    for (int64_t col = 0; col < x.cols; ++col)
        for (int64_t row = 0, from = col * x.ld; row < x.rows; ++row, ++from)
            wide[size_t(col * x.rows + row)] = x.type == CUDA_R_32F ? static_cast<const float*>(data)[from]
                                               : x.type == CUDA_R_16BF
                                                   ? __bfloat162float(static_cast<const __nv_bfloat16*>(data)[from])
                                                   : values[static_cast<const uint8_t*>(data)[from]];
    return wide;
}

}  // namespace

void multiply(const Product& p, const Data& data, int64_t parts) {
    for (size_t i = A; i <= D; ++i)
        if ((i != C || data.beta != 0) && !on_device(data.matrix(i), p.x[i].bytes()))
            fault("cuBLAS: " + describe(data.matrix(i)));
    const int64_t m = p.m(), n = p.n(), k = p.k();
    const std::vector<float> a = to_fp32(data.in[A], p.x[A]), b = to_fp32(data.in[B], p.x[B]);
    std::vector<float> sum(size_t(m * n)), part(size_t(m * n));
    const auto [a_mode, b_mode] = p.operation.modes;
    // Terms that are added before others join them, all with the same scales.
    const int64_t step = a_mode == kTensor || a_mode == kOuter ? (k + parts - 1) / parts : kBlock;
    for (int64_t first = 0; first < k; first += step) {
        cblas_sgemm(CblasColMajor, p.ta() ? CblasTrans : CblasNoTrans, p.tb() ? CblasTrans : CblasNoTrans, int(m),
                    int(n), int(std::min(step, k - first)), 1, a.data() + first * (p.ta() ? 1 : m), int(p.x[A].rows),
                    b.data() + first * (p.tb() ? n : 1), int(p.x[B].rows), 0, part.data(), int(m));
        const std::vector<float> a_scale = scales_of(data.scales[A], a_mode, m, k, first / kBlock),
                                 b_scale = scales_of(data.scales[B], b_mode, n, k, first / kBlock);
        for (size_t j = 0, at = 0; j < size_t(n); ++j)
            for (size_t i = 0; i < size_t(m); ++i, ++at) sum[at] += part[at] * a_scale[i] * b_scale[j];
    }
    if (data.beta != 0) part = to_fp32(data.in[C], p.x[C]);  // else C is not read
    for (int64_t j = 0, at = 0; j < n; ++j)
        for (int64_t i = 0; i < m; ++i, ++at) {
            const float added = data.beta != 0 ? data.beta * part[size_t(at)] : 0;
            const float value = data.alpha * sum[size_t(at)] + added;
            if (p.x[D].type == CUDA_R_32F)
                static_cast<float*>(data.out)[j * p.x[D].ld + i] = value;
            else
                static_cast<__nv_bfloat16*>(data.out)[j * p.x[D].ld + i] = __float2bfloat16_rn(value);
        }
}

bool overlap(const void* p, size_t p_bytes, const void* q, size_t q_bytes) {
    const auto a = reinterpret_cast<uintptr_t>(p), b = reinterpret_cast<uintptr_t>(q);
    return p_bytes > 0 && q_bytes > 0 && a < b + q_bytes && b < a + p_bytes;
}
bool fits(const void* p, size_t bytes, uint32_t alignment) {
    return reinterpret_cast<uintptr_t>(p) % alignment == 0 && on_device(p, bytes);
}

}  // namespace emulate
