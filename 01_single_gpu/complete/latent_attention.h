#pragma once
// Multi-head latent attention (DeepSeek-V2, 2024, section 2.1): keys and values of all heads are made of one latent of
// C numbers per token, and queries of another of Q. A model that generates keeps C + P numbers per token and layer, not
// those of all heads.
//
//   [q_a | kv_a | k_rope] = x W_a^T          (R, E) -> (R, Q + C + P)       the same on all tensor-parallel ranks
//   q      = norm(q_a) W_qb^T                (R, Q) -> (R, H*(N+P))         by heads; Q = 0: x W_q^T
//   k, v   = norm(kv_a) W_kvb^T              (R, C) -> (R, H*2N)            by heads
//   attention of q, [k | k_rope], v with RoPE of the last P numbers (ops/latent_heads.h)
//
// f stands behind the latents, so that tensor parallelism sums or gathers Q + C + P numbers per token, not E. With
// --recompute selective the backward pass makes q, k and v from the latents again.
#include "01_single_gpu/complete/config.h"
#include "01_single_gpu/complete/layers.h"

namespace train70b {

class TensorParallelOps;  // llama.h

class LatentAttention {
  public:
    LatentAttention(const LlamaConfig& config, const std::string& prefix, double init_std);
    LatentAttention(const LatentAttention&) = delete;

    Param q_a_proj, q_a_norm, kv_a_proj, kv_a_norm;  // the first two with Q > 0
    Param q_proj, kv_b_proj;                         // q_proj: Hugging Face's q_b_proj, with Q = 0 its q_proj
    Linear down, q_up, kv_up;
    std::vector<Param*> undivided() {             // the same on all tensor-parallel ranks
        std::vector<Param*> list = down.weights;  // one behind the other: one product
        if (down.weights.size() > 1) list.push_back(&q_a_norm);
        list.push_back(&kv_a_norm);
        return list;
    }
    std::vector<Param*> params() {
        std::vector<Param*> list = undivided();
        list.insert(list.end(), {&q_proj, &kv_b_proj});
        return list;
    }

    QKV operator()(Tape& tape, const Var& x, const Tensor& positions, const TensorParallelOps& tensor_parallel);
    // Without the zeros that v was filled up with: (R, H_l*D) -> (R, H_l*N).
    Var values(Tape& tape, const Var& mixed) const;

  private:
    Var up(Tape& tape, const Var& latent, Linear& linear) const {
        Var y = linear(tape, latent);
        if (tape.recompute_attention)
            y.recomputed =
                Lazy<Tensor>([x = Saved(latent), &linear] { return matmul(x.get(), linear.weight(), Transpose::b); });
        return y;
    }
    const Rope rope_;      // of P numbers
    const int64_t width_;  // D = N + P
};

}  // namespace train70b
