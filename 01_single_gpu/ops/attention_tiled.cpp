// Attention on the CPU: heads over threads. What one head computes is in attention_tiled_kernel.cpp, in tiles with an
// online softmax; the definition, with its T x T matrix, is in attention.cpp.
// A thread takes consecutive heads and computes each of them alone, so no result depends on the number of threads.
#include "01_single_gpu/ops/attention_tiled.h"

#include <omp.h>

#include "01_single_gpu/core/blas_core.h"
#include "01_single_gpu/ops/attention.h"

namespace train70b::cpu {

// The build is for AVX2 (x86-64-v3), so that it runs on any machine of the last ten years. AVX-512 is worth a second
// set of kernels here: twice the elements per instruction and twice the registers. OpenBLAS makes the same choice.
const AttentionKernels* avx512_attention() { return cpu_vectors() >= CpuVectors::avx512 ? kAvx512Attention : nullptr; }

const AttentionKernels*& chosen_attention() {
    static const AttentionKernels* chosen = avx512_attention() ? avx512_attention() : &kPortableAttention;
    return chosen;
}

namespace {

Heads heads_of(const Tensor& x) {
    const DType dtype = x.dtype();
    return {x.raw(),
            dtype == DType::f64    ? Element::f64
            : dtype == DType::bf16 ? Element::bf16
                                   : Element::f32,
            x.cols()};
}

// One row of scratch for each thread that has work; for one thread if there is none.
Tensor scratch_for(const AttentionShape& s, Direction direction, int64_t units, DType dtype) {
    return Tensor(
        {std::clamp<int64_t>(units, 1, omp_get_max_threads()), chosen_attention()->scratch_elements(s, direction)},
        stats_dtype(dtype), Device::cpu, Memory::workspace);
}

}  // namespace

void attention(Tensor& out, Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& s,
               const DocumentStarts& documents) {
    AttentionArgs args{s, heads_of(q), heads_of(k), heads_of(v), heads_of(out), heads_of(lse)};
    args.starts = documents.on_host.get();
    const int64_t units = s.batch * s.heads;
    Tensor scratch = scratch_for(s, Direction::forward, units, q.dtype());
#pragma omp parallel num_threads(scratch.rows())
    {
        char* thread_scratch = scratch.data<char>() + omp_get_thread_num() * (scratch.bytes() / scratch.rows());
        int64_t packed = -1;
#pragma omp for schedule(static)
        for (int64_t head = 0; head < units; ++head) chosen_attention()->forward(args, head, thread_scratch, packed);
    }
}

void attention_backward(Tensor& dq, Tensor& dk, Tensor& dv, const Tensor& dout, const Tensor& q, const Tensor& k,
                        const Tensor& v, const Tensor& out, const Tensor& lse, const AttentionShape& s,
                        const DocumentStarts& documents) {
    AttentionArgs args{s, heads_of(q), heads_of(k), heads_of(v), heads_of(out), heads_of(lse)};
    args.dout = heads_of(dout);
    args.dq = heads_of(dq), args.dk = heads_of(dk), args.dv = heads_of(dv);
    args.starts = documents.on_host.get();
    const int64_t units = s.batch * s.kv_heads;
    Tensor scratch = scratch_for(s, Direction::backward, units, q.dtype());
#pragma omp parallel num_threads(scratch.rows())
    {
        char* thread_scratch = scratch.data<char>() + omp_get_thread_num() * (scratch.bytes() / scratch.rows());
#pragma omp for schedule(static)
        for (int64_t kv_head = 0; kv_head < units; ++kv_head)
            chosen_attention()->backward(args, kv_head, thread_scratch);
    }
}

}  // namespace train70b::cpu
