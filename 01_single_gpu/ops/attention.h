#pragma once
// Scaled dot-product attention with grouped queries. For each sequence and query head h, with key/value head
// h / (H / K) (Vaswani et al. 2017, eq. 1; Dao et al. 2022, algorithms 1 and 4):
//   forward    S = q k^T / sqrt(D), -inf where the mask hides a key;  lse = log sum_j e^S;  P = e^(S - lse);  out = P v
//   backward   dP = dout v^T;  dS = P (dP - sum(dout * out))
//              dq = dS k / sqrt(D);  dk = dS^T q / sqrt(D);  dv = P^T dout
// With `causal`, query i of Tq sees the keys j <= i + Tk - Tq; with documents, the keys j >= starts[i] - key_offset: i
// and j count from the first query and key of the call. A query that sees no key gets out = 0 and lse = -inf.
//
// q, out, dq, dout (B*Tq, H*D);  k, v, dk, dv (B*Tk, K*D);  lse (B*Tq, H) stats_dtype: the log of the sum of the
// exponentials of each row of scores.
//
//   attention.cpp                the definition, naive_attention(), with its T x T matrix; checks and dispatch
//   attention_tiled.cpp          the CPU: heads over threads, and the choice between the two files below
//   attention_tiled_kernel.cpp   one head, tile by tile with an online softmax: no T x T matrix is stored
//   attention_tiled_avx512.cpp   the same compiled for AVX-512
//   attention_cuda.cu            the GPU in plain CUDA, fp32 arithmetic, any head size
//   attention_mma.cu             the GPU's tensor cores, bf16, head sizes 64 and 128, of the tiles in
//                                attention_tiles.cuh
//   attention_cudnn.cpp          cuDNN's fused kernels on a GPU, bf16: where the build has them
#include <memory>

#include "01_single_gpu/core/tensor.h"
#include "01_single_gpu/ops/attention_shape.h"

namespace train70b {

// Whose kernels compute attention on a GPU (--attention): cuDNN's where it can, else those of this program.
enum class AttentionBy { automatic, own, cudnn };
inline AttentionBy attention_by = AttentionBy::automatic;  // of this process

// Empty, or why cuDNN computes no attention of this kind: in one line.
std::string why_not_cudnn(Device device, DType dtype, int64_t head_dim, bool documents);
// What a run says of it: "cuDNN 9.19.0", or "own kernels (why)".
std::string attention_text(Device device, DType dtype, int64_t head_dim, bool documents);

// Where the documents of packed sequences begin: for each query, the index in its sequence of the first key that it may
// see: the first token of its document, or of a window inside it. Ascending within the queries of a sequence. Empty:
// every sequence is one document.
struct DocumentStarts {
    Tensor on_device;                        // (B*Tq) i32
    std::shared_ptr<const int32_t> on_host;  // the same numbers: what is computed at all is decided on the host

    DocumentStarts() = default;
    DocumentStarts(const std::vector<int32_t>& starts, Device device);
    explicit operator bool() const { return bool(on_device); }
    DocumentStarts rows(int64_t begin, int64_t end) const;  // of queries [begin, end)
};

void attention(Tensor& out, Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v, const AttentionShape& shape,
               const DocumentStarts& documents = {});

// out and lse are arguments: ring attention passes the merged values of all its steps, and gets this step's share of
// the gradients (chapter 06). dq, dk, dv may be fp32 while the rest is bf16. Workspace on a GPU: B*Tq*H floats; with
// few keys per device (attention_mma.cu, parts_of) 2*P*B*Tk*K*D floats more, for dk and dv of P parts of each key/value
// head's query heads: 34 MB for 4,096 keys of one key/value head with D = 128 and 8 query heads. cuDNN asks for its
// own, up to kMostWorkspace (attention_cudnn.cpp).
void attention_backward(Tensor& dq, Tensor& dk, Tensor& dv, const Tensor& dout, const Tensor& q, const Tensor& k,
                        const Tensor& v, const Tensor& out, const Tensor& lse, const AttentionShape& shape,
                        const DocumentStarts& documents = {});

// Pairs (query, key) that the mask leaves in all sequences and heads: attention computes 4 D operations for each,
// attention_backward 10 D.
double visible_pairs(const AttentionShape& shape, const DocumentStarts& documents = {});

// Merges the results for two sets of keys (chapter 06): out (R, H*D) and lse (R, H), in the stats_dtype of part_out
// (R, H*D), become those of both sets. An lse of -inf stands for a set without keys.
//   l = log(e^lse + e^part_lse),  out = out e^(lse - l) + part_out e^(part_lse - l),  lse = l
void merge_attention(Tensor& out, Tensor& lse, const Tensor& part_out, const Tensor& part_lse);

// The definition, with every score in memory: what the implementations above are tested against. The same arguments;
// CPU tensors of any float dtype, arithmetic in double.
decltype(attention) naive_attention;
decltype(attention_backward) naive_attention_backward;

}  // namespace train70b
