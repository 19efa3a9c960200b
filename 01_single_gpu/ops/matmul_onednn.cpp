// Products in fp32 and bf16 by oneDNN, in builds that have it (TRAIN70B_ONEDNN).
#include "01_single_gpu/core/blas_core.h"
#include "01_single_gpu/core/check.h"
#include "01_single_gpu/ops/matmul.h"

#if TRAIN70B_ONEDNN
#include <dnnl.hpp>

namespace train70b::cpu {

std::string onednn_kernels() {
    constexpr std::pair<int, const char*> kNames[] = {{0x3e7, "avx512_core_amx"},
                                                      {0xe7, "avx512_core_bf16"},
                                                      {0x67, "avx512_core_vnni"},
                                                      {0x27, "avx512_core"},
                                                      {0x407, "avx2_vnni"},
                                                      {0x7, "avx2"},
                                                      {0x3, "avx"},
                                                      {0x1, "sse41"}};
    const int here = int(dnnl_get_effective_cpu_isa());
    for (const auto& [instructions, name] : kNames)
        if ((here & instructions) == instructions) return fmt::format("oneDNN {}", name);
    return "oneDNN";
}

bool onednn_matmul_into(Tensor& c, const Tensor& a, const Tensor& b, Transpose transpose, float beta) {
    using dnnl::memory;
    using enum memory::data_type;
    const bool ta = transpose == Transpose::a, tb = transpose == Transpose::b;
    const int64_t m = c.rows(), n = c.cols(), k = ta ? a.rows() : a.cols();
    if (a.dtype() == DType::f32 && c.dtype() == DType::f32) {
        const dnnl_status_t status = dnnl_sgemm(ta ? 'T' : 'N', tb ? 'T' : 'N', m, n, k, 1, a.data<float>(), a.cols(),
                                                b.data<float>(), b.cols(), beta, c.data<float>(), n);
        CHECK(status == dnnl_success, "oneDNN: {}", int(status));
        return true;
    }
    if (a.dtype() != DType::bf16 || cpu_vectors() < CpuVectors::avx512_bf16) return false;  // emulated: slower
    static const dnnl::engine here(dnnl::engine::kind::cpu, 0);
    static const dnnl::stream calls(here);
    const auto layout = [](const Tensor& x, bool transposed) {
        const auto type = x.dtype() == DType::bf16 ? bf16 : f32;
        return transposed ? memory::desc({x.cols(), x.rows()}, type, {1, x.cols()})
                          : memory::desc({x.rows(), x.cols()}, type, {x.cols(), 1});
    };
    const memory::desc da = layout(a, ta), db = layout(b, tb), dc = layout(c, false);
    dnnl::primitive_attr attributes;
    if (beta != 0) {
        dnnl::post_ops sum;
        sum.append_sum(beta);
        attributes.set_post_ops(sum);
    }
#if DNNL_VERSION_MAJOR < 3
    const dnnl::matmul::primitive_desc product({da, db, dc}, attributes, here);
#else
    const dnnl::matmul::primitive_desc product(here, da, db, dc, attributes);
#endif
    const auto of = [](const Tensor& x) { return const_cast<void*>(x.raw()); };
    dnnl::matmul(product).execute(  // the library keeps the kernels that it has made
        calls,
        {{DNNL_ARG_SRC, {da, here, of(a)}}, {DNNL_ARG_WEIGHTS, {db, here, of(b)}}, {DNNL_ARG_DST, {dc, here, of(c)}}});
    return true;
}

}  // namespace train70b::cpu

#else

namespace train70b::cpu {
std::string onednn_kernels() { return ""; }
bool onednn_matmul_into(Tensor&, const Tensor&, const Tensor&, Transpose, float) { return false; }
}  // namespace train70b::cpu

#endif
