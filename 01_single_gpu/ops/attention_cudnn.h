#pragma once
// cuDNN's attention beside that of attention_cuda.cu, without CUDA's headers.
#include "01_single_gpu/ops/attention.h"

namespace train70b::cuda {

// attention_cudnn.cpp; where the build has it (TRAIN70B_CUDNN), else only why_no_cudnn().
std::string why_no_cudnn();  // empty, or what is missing: headers, the library
std::string cudnn_version();
// Empty, or why cuDNN does not compute this one: bf16, a head size that cudnn_refuses() does not name, one document.
std::string cudnn_lacks(const AttentionShape& shape, bool backward);
void cudnn_attention(Tensor& out, Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                     const AttentionShape& shape);
void cudnn_attention_backward(Tensor& dq, Tensor& dk, Tensor& dv, const Tensor& dout, const Tensor& q, const Tensor& k,
                              const Tensor& v, const Tensor& out, const Tensor& lse, const AttentionShape& shape);

// attention_cuda.cu. packed (B, h, Tq) and the columns [first, first + h) of lse (B*Tq, H): one is copied to the other.
enum class PackLse { there, back };
void pack_lse(Tensor& packed, const Tensor& lse, const AttentionShape& shape, int64_t first, PackLse direction);

}  // namespace train70b::cuda
