#pragma once
// Every mathematical operation of the course, declared once. Which code runs follows from the tensors' device:
//   ops_cpu.cpp    the readable definition            ops_cuda.cu    the fast one, tested against the first
//   meta tensors   shapes are checked, nothing is computed
// Outputs are allocated by the caller (whoever allocates decides what memory is booked as). Storage is fp32, bf16 or,
// on the CPU, fp64; arithmetic and sums are fp32 or wider, and all fp64 where the storage is. Reductions have a fixed
// order, so a run repeats bit for bit.
//
// B batch, T tokens of a sequence, R = B*T rows, E hidden, H query heads, K key/value heads, D head size, F ffn, V
// vocabulary
#include "01_single_gpu/core/cuda_device.h"
#include "01_single_gpu/core/tensor.h"
#include "01_single_gpu/ops/attention_shape.h"

namespace train70b {

// Of what is kept beside tensors of `dtype`: 1/rms, lse, sums of a softmax, the loss, AdamW's moments, accumulators.
inline DType stats_dtype(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }

// ---- matrix product ------------------------------------------------------------------------------------------------
enum class Transpose { none, a, b };

// c (M, N) = op(a) op(b) + beta c.   none: a (M, K), b (K, N).   a: a (K, M), b (K, N).   b: a (M, K), b (N, K).
// a and b share a dtype; c may be fp32 while they are bf16 (weight gradients are summed in fp32 inside the product).
void matmul_into(Tensor& c, const Tensor& a, const Tensor& b, Transpose transpose = Transpose::none, float beta = 0);
Tensor matmul(const Tensor& a, const Tensor& b, Transpose transpose = Transpose::none,
              Memory kind = Memory::activations);  // c: dtype of a, booked as kind

// ---- element by element --------------------------------------------------------------------------------------------
void fill(Tensor& x, double value);                       // any float, i32, u8
void copy(Tensor& to, const Tensor& from);                // casts where dtypes differ; crosses devices
void scale(Tensor& x, double factor);                     // x *= factor
void add(Tensor& sum, const Tensor& a, const Tensor& b);  // sum = a + b; sum may be a or b
// to (b, a, w) = from (a, b, w) with its first two dimensions exchanged, whatever the tensors' own shapes; any dtype
void swap_blocks(Tensor& to, const Tensor& from, int64_t a, int64_t b);
void sum_squares(Tensor& out, const Tensor& x);  // out (1) fp64 = sum of x_i^2, summed in double

// ---- embedding -----------------------------------------------------------------------------------------------------
// y (R, E) = table[tokens - first_row]; tokens (R) i32. A token outside this table's rows gives zeros: its row lies on
// another rank (chapter 04).
void embedding(Tensor& y, const Tensor& tokens, const Tensor& table, int64_t first_row = 0);
void embedding_backward(Tensor& dtable, const Tensor& tokens, const Tensor& dy, int64_t first_row = 0);  // dtable +=

// ---- RMSNorm  (Zhang & Sennrich 2019, eq. 4) -----------------------------------------------------------------------
// y = x * inv_rms * weight, inv_rms (R) stats_dtype = 1 / sqrt(mean(x^2) + eps), kept for the backward pass.
void rmsnorm(Tensor& y, Tensor& inv_rms, const Tensor& x, const Tensor& weight, double eps);
// The residual addition fused in: sum = a + b, then y = rmsnorm(sum).
void add_rmsnorm(Tensor& sum, Tensor& y, Tensor& inv_rms, const Tensor& a, const Tensor& b, const Tensor& weight,
                 double eps);
// y again from x and the stored inv_rms: bitwise what rmsnorm gave (selective recomputation).
void rmsnorm_again(Tensor& y, const Tensor& x, const Tensor& inv_rms, const Tensor& weight);
// dx = gradient with respect to x;  dweight (E) +=.
void rmsnorm_backward(Tensor& dx, Tensor& dweight, const Tensor& dy, const Tensor& x, const Tensor& inv_rms,
                      const Tensor& weight);

// ---- RoPE  (Su et al. 2021, eq. 34; the rotate-half convention of the Hugging Face checkpoints) ---------------------
constexpr int kMaxHeadDim = 256;
struct Rope {
    int head_dim = 0;                       // D: even, at most kMaxHeadDim
    double inv_freq[kMaxHeadDim / 2] = {};  // radians per position, for each pair (i, i + D/2)
};
// Splits the rows of qkv (R, (H+2K)*D) into q (R, H*D), k and v (R, K*D), rotating q and k by their positions (R) i32.
void split_rope(Tensor& q, Tensor& k, Tensor& v, const Tensor& qkv, const Tensor& positions, const Rope& rope);
void split_rope_backward(Tensor& dqkv, const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& positions,
                         const Rope& rope);

// ---- attention  (Dao et al. 2022, algorithms 1 and 4) ---------------------------------------------------------------
// out = softmax(q k^T / sqrt(D) + mask) v per head, in tiles with an online softmax: no T x T matrix is ever stored.
// Query head h reads key/value head h / (H / K). With `causal`, query i of Tq sees the keys j <= i + Tk - Tq.
// AttentionShape{batch, query_len, key_len, heads, kv_heads, head_dim, causal}: attention_shape.h
// q, out (B*Tq, H*D); k, v (B*Tk, K*D); lse (B*Tq, H) stats_dtype: the log of the sum of exponentials of each row of
// scores. A query that sees no key gets out = 0 and lse = -inf.
void attention(Tensor& out, Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
               const AttentionShape& shape);
// out and lse come from outside: a ring passes the merged values of all its steps, and the same code gives this step's
// share (chapter 06). dq, dk, dv may be fp32 while the rest is bf16.
void attention_backward(Tensor& dq, Tensor& dk, Tensor& dv, const Tensor& dout, const Tensor& q, const Tensor& k,
                        const Tensor& v, const Tensor& out, const Tensor& lse, const AttentionShape& shape);

// Two sets of keys into one (chapter 06): out (R, H*D) and lse (R, H), stats_dtype of part_out, become those of both.
//   l = log(e^lse + e^part_lse),  out = out e^(lse - l) + part_out e^(part_lse - l); -inf: a set without keys
void merge_attention(Tensor& out, Tensor& lse, const Tensor& part_out, const Tensor& part_lse);

// ---- SwiGLU  (Shazeer 2020) -----------------------------------------------------------------------------------------
// h (R, F) = silu(gate) * up, with gate_up (R, 2F) = [gate | up].
void swiglu(Tensor& h, const Tensor& gate_up);
void swiglu_backward(Tensor& dgate_up, const Tensor& dh, const Tensor& gate_up);

// ---- cross-entropy --------------------------------------------------------------------------------------------------
// Three steps, so that a vocabulary split over ranks can reduce between them (chapter 04). V is this rank's part of the
// vocabulary, beginning at first_vocab; a target outside it gives target_logit = 0. Columns of tokens >= vocab are
// padding: they take no part in a softmax and get no gradient. All (R) stats_dtype; targets (R) i32.
//   row_max = max_v logits,  row_sum = sum_v exp(logits - row_max),  target_logit = logits[target - first_vocab]
void softmax_stats(Tensor& row_max, Tensor& row_sum, Tensor& target_logit, const Tensor& logits, const Tensor& targets,
                   int64_t first_vocab = 0, int64_t vocab = INT64_MAX);
//   row_sum <- row_sum * exp(row_max - whole_max): the sum of a part, on the scale of the whole row's maximum
void rescale_sums(Tensor& row_sum, const Tensor& row_max, const Tensor& whole_max);
//   lse = row_max + log(row_sum),  loss (1) = scale * sum over rows (lse - target_logit), summed in double
void cross_entropy(Tensor& loss, Tensor& lse, const Tensor& row_max, const Tensor& row_sum, const Tensor& target_logit,
                   double scale);
//   logits <- (softmax(logits) - onehot(target)) * scale, in place: logits and their gradient share one buffer
void cross_entropy_backward(Tensor& logits, const Tensor& targets, const Tensor& lse, double scale,
                            int64_t first_vocab = 0, int64_t vocab = INT64_MAX);

// ---- AdamW  (Loshchilov & Hutter 2019, algorithm 2) -----------------------------------------------------------------
struct AdamWStep {
    double lr, beta1, beta2, eps;
    double weight_decay;  // 0 for what is not a matrix
    double grad_scale;    // clipping: min(1, clip / norm)
    int64_t step;         // from 1: bias correction
};
// exp_avg, exp_avg_sq: stats_dtype of param. master: fp32 copy that is updated and rounded into a bf16 param; empty
// when param itself is fp32 or fp64. Computes in the dtype of the states.
void adamw(Tensor& param, Tensor& master, Tensor& exp_avg, Tensor& exp_avg_sq, const Tensor& grad,
           const AdamWStep& step);

// ---- initial values -------------------------------------------------------------------------------------------------
// Which elements of a global matrix a tensor holds: element i of the tensor is element offset + i of a rectangle, and
// the rectangle's (r, c) is the global element (row_begin + r) * global_cols + col_begin + c.
struct GlobalIndex {
    int64_t row_begin = 0, col_begin = 0, cols = 1, global_cols = 1, offset = 0;
};
// x = std * normal(key, global element index): a counter-based generator (SplitMix64's mixing function, then
// Box-Muller), so that any shard of any layout creates exactly its own values. They are rounded to fp32 first: fp32 and
// fp64 start from the same weights.
void fill_normal(Tensor& x, uint64_t key, const GlobalIndex& index, float std);

// ---- host -----------------------------------------------------------------------------------------------------------
std::vector<double> read(const Tensor& x);  // to the host, exactly; of a meta tensor: ones
Tensor upload(const std::vector<int32_t>& values, Shape shape, Device device, Memory kind = Memory::activations);
void synchronize(Device device);  // waits until everything issued so far is done
std::string why_no_cuda();        // empty when a CUDA device can be used; else what is missing

}  // namespace train70b
