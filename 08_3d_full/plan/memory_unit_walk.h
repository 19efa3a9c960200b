#pragma once
// One unit on a walk of its own: what its forward pass, its backward pass and its weight gradients hold, tensor by
// tensor, in the order of the model (01_single_gpu/llama.cpp) and of its tape. Every held() is a term of the formula,
// with its shape; a term that nothing keeps is a moment.
#include "08_3d_full/plan/memory_units.h"

namespace train70b {

constexpr Memory kActivations = Memory::activations, kComm = Memory::comm, kWorkspace = Memory::workspace;

struct Fp8Tensor {
    Held data, scales;  // 8 bits
};

// What a block keeps for its backward pass (none of it while it runs silently, to be recomputed in full).
struct SavedBlock {
    Held x, x_inv_rms, x_normed;                 // the input norm: its input, and its output, which qkv reads
    Held qkv;                                    // before RoPE: with norms of the heads, or where RoPE is recomputed
    Held q, k, v;                                // as attention reads them
    Held out, lse;                               // of attention
    Held middle, middle_inv_rms, middle_normed;  // the second norm
    Held gate_up, h;
    Fp8Tensor transposed[4];  // FP8: the input of each layer, (in, R)
};

// A weight gradient dW += dY^T X, now or in the schedule's W. Holds what X is made of.
struct WeightGradient {
    Layer layer = Layer::qkv;
    Held dy, x;
    Fp8Tensor x_transposed, dy_transposed;
    Held biases_dy;      // FP8: the gradients of the biases need dY itself
    bool has_x = false;  // x has been made
    Held made_from[10];  // what is recomputed, or made again from these
};

// One unit on a walk of its own: forward pass, backward pass, weight gradients.
class UnitWalk {
  public:
    UnitWalk(const UnitShapes& shapes, bool split) : s_(shapes), split_(split) {}
    MemoryWalk& walk() { return walk_; }

    Held block_forward(const Held& x, SavedBlock* saved);
    Held block_backward(SavedBlock& saved, Held dy);
    Held head_product(const Held& normed);
    Held head_product_backward(Held dlogits, Held normed);
    Held norm_backward(Held& x, Held& inv_rms, Held dy, Held dx);
    void weight_gradients();

    Held held(Memory kind, int64_t bytes) { return Held(walk_, kind, bytes); }
    void moment(Memory kind, int64_t bytes) { held(kind, bytes); }
    Held residual() { return held(Memory::activations, s_.a * s_.R_l * s_.E); }  // (R_l, E)
    Held all_rows(Memory kind) { return held(kind, s_.a * s_.R * s_.E); }        // (R, E)
    Held row_stats() { return held(Memory::activations, s_.s * s_.R_l); }        // (R_l)

  private:
    struct Fp8Pair {
        Fp8Tensor rowwise, columnwise;
    };
    struct Attended {
        Held out, lse;
    };
    struct QKV {
        Held q, k, v;
    };

    Held attention_half(const Held& x, const Held& inv_rms, Held normed, SavedBlock* saved);
    Held mlp_half(const Held& normed, SavedBlock* saved);
    Held attention_half_backward(SavedBlock& saved, Held dz);
    Held mlp_half_backward(SavedBlock& saved, Held dy);
    Held input_of_column(const Held& normed);
    Held linear(Layer layer, Memory y_kind, int64_t y_bytes, Fp8Tensor* transposed);
    Held row_parallel(Layer layer, Fp8Tensor* transposed);
    Held input_gradient(Layer layer, Held dy, WeightGradient& gradient);
    Held linear_backward(Layer layer, Held dy, Held x, Fp8Tensor x_transposed);
    Held overlapped_backward(Layer layer, Held dy, Held x);
    Held scatter_rows(Held full);
    Held gather_rows(Held part);
    void weight_gradient(WeightGradient gradient);
    void run(WeightGradient& gradient);

    QKV q_k_v(int64_t rows, int64_t q, int64_t kv);
    QKV split_rope();
    void recompute_qkv(SavedBlock& saved, QKV& by_tokens);
    Attended attend();
    Attended ring_attention();
    Attended gather_attention();
    QKV attend_backward();
    QKV ring_attention_backward();
    QKV gather_attention_backward();
    Held scatter_heads(int64_t width);
    Held gather_heads(int64_t width);

    Fp8Tensor quantized(int64_t rows, int64_t cols, Scaling scaling, Memory kind);
    Fp8Pair quantize(int64_t rows, int64_t cols, Scaling scaling, bool rowwise, bool columnwise, Memory kind);

    MemoryWalk walk_;
    const UnitShapes& s_;
    const bool split_;
    std::vector<WeightGradient> deferred_;
};

}  // namespace train70b
