#pragma once
// What attention_tiled_kernel.cpp computes: one head at a time, on plain pointers. (It does not include tensor.h:
// attention_tiled_kernel.cpp says why.)
#include "01_single_gpu/core/dtype.h"
#include "01_single_gpu/ops/attention_shape.h"

namespace train70b::cpu {

// A tensor (rows, cols); a head is head_dim adjacent columns of it, in lse one column.
struct Heads {
    void* data = nullptr;
    DType dtype = DType::f32;  // or bf16, f64
    int64_t cols = 0;
};

struct AttentionArgs {
    AttentionShape shape;
    const int32_t* starts;  // DocumentStarts; null: every sequence is one document
    Heads q, k, v, out, lse;
    Heads dout, dq, dk, dv;  // of the backward pass
};

enum class Direction { forward, backward };

// The kernels, compiled for one instruction set. They compute in double if q is fp64, else in float, and need a scratch
// buffer of scratch_elements() such numbers. A call of the forward pass computes one query head, 0 <= head < batch *
// heads; `packed` says whose keys are in the scratch buffer (-1: none), so that the next head can share them. A call of
// the backward pass computes one key/value head, 0 <= head < batch * kv_heads: its query heads add to the same dk, dv.
struct AttentionKernels {
    int64_t (*scratch_elements)(const AttentionShape& shape, Direction direction);
    void (*compute)(const AttentionArgs& args, Direction direction, int64_t head, void* scratch, int64_t& packed);
};

extern const AttentionKernels kPortableAttention;       // for the instruction set of the build (TRAIN70B_ARCH)
extern const AttentionKernels* const kAvx512Attention;  // nullptr if the build has none
const AttentionKernels* avx512_attention();             // kAvx512Attention if this machine can run it, else nullptr
const AttentionKernels*& chosen_attention();            // AVX-512 where possible; tests assign to it

}  // namespace train70b::cpu
