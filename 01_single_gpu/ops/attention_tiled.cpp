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

Heads heads_of(const Tensor& x) { return {x.raw(), x.dtype(), x.cols()}; }

// All heads, over threads.
void compute(const AttentionArgs& args, Direction direction) {
    const AttentionShape& s = args.shape;
    const AttentionKernels& kernels = *chosen_attention();
    const int64_t heads = s.batch * (direction == Direction::forward ? s.heads : s.kv_heads);
    // One row of scratch for each thread that has work; for one thread if there is none.
    Tensor scratch({std::clamp<int64_t>(heads, 1, omp_get_max_threads()), kernels.scratch_elements(s, direction)},
                   stats_dtype(args.q.dtype), Device::cpu, Memory::workspace);
#pragma omp parallel num_threads(scratch.rows())
    {
        char* thread_scratch = scratch.data<char>() + omp_get_thread_num() * (scratch.bytes() / scratch.rows());
        int64_t packed = -1;
#pragma omp for schedule(static)
        for (int64_t head = 0; head < heads; ++head) kernels.compute(args, direction, head, thread_scratch, packed);
    }
}

}  // namespace

void attention(Tensor& out, Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& s,
               const DocumentStarts& documents) {
    const int32_t* starts = documents.on_host.get();
    compute({s, starts, heads_of(q), heads_of(k), heads_of(v), heads_of(out), heads_of(lse)}, Direction::forward);
}

void attention_backward(Tensor& dq, Tensor& dk, Tensor& dv, const Tensor& dout, const Tensor& q, const Tensor& k,
                        const Tensor& v, const Tensor& out, const Tensor& lse, const AttentionShape& s,
                        const DocumentStarts& documents) {
    const int32_t* starts = documents.on_host.get();
    AttentionArgs args{s, starts, heads_of(q), heads_of(k), heads_of(v), heads_of(out), heads_of(lse)};
    args.dout = heads_of(dout), args.dq = heads_of(dq), args.dk = heads_of(dk), args.dv = heads_of(dv);
    compute(args, Direction::backward);
}

}  // namespace train70b::cpu
