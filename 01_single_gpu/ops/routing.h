#pragma once
// Routing: which experts a token's row goes to, with which weight, and the permutation of rows by experts.
//
// R rows, N experts, k chosen for each row. A slot is a row with one of its choices, number row * k + j. S slots are
// kept, at most R k: all of them unless experts have a capacity. Scores, weights and logits have the stats_dtype. The
// rows are divided into P pieces of equal length, for sums by sequence.
//
// Softmax over all experts (Qwen3-MoE; with `normalize` it equals Mixtral's softmax over the chosen ones), or a sigmoid
// of each logit (DeepSeek-V3, arXiv:2412.19437, section 2.1.2). Ties go to the lower index.
#include "01_single_gpu/core/tensor.h"
#include "01_single_gpu/ops/grouped_matmul.h"

namespace train70b {

struct RouterShape {
    int64_t experts = 0, top_k = 0;      // N, k
    bool sigmoid = false;                // of each logit, instead of a softmax
    bool normalize = true;               // the weights of a row sum to `scale`
    double scale = 1;                    // of the weights
    int64_t groups = 1, top_groups = 1;  // experts are chosen from the best groups of N / groups, by their two best
};

// chosen (R, k) i32: the experts with the largest p + bias, the largest first. p: softmax or sigmoid of logits (R, N);
// bias (N), or empty: 0. It decides on the choice, not on the weights.
void choose_experts(Tensor& chosen, const Tensor& logits, const Tensor& bias, const RouterShape& shape);

// weights (R, k) = scale p_i, or scale p_i / (sum of the chosen p), of the chosen experts.
void router_weights(Tensor& weights, const Tensor& logits, const Tensor& chosen, const RouterShape& shape);

// Losses of the router, whose gradients router_backward adds: sums (2) fp64 += over all rows
//   sum_i piece_grads[piece of the row, i] q_i     q: p, of the sigmoid p / sum of p: a balancing loss, linear in q
//   z_loss log(sum of exp(logits))^2
// piece_grads (P, N), or empty: none.
void router_losses(Tensor& sums, const Tensor& logits, const Tensor& piece_grads, double z_loss,
                   const RouterShape& shape);

// dlogits (R, N): the gradient through router_weights of dweights (R, k), and of router_losses.
void router_backward(Tensor& dlogits, const Tensor& dweights, const Tensor& logits, const Tensor& chosen,
                     const Tensor& piece_grads, double z_loss, const RouterShape& shape);

// counts (P, N) i32: slots of each piece that chose each expert.
void count_choices(Tensor& counts, const Tensor& chosen);

// A rank's rows are in pieces of equal length, each of consecutive tokens of one sequence of the micro-batch.
struct RowPiece {
    int64_t sequence, position;  // of its first token in the sequence
};
struct PieceCounts {
    std::vector<RowPiece> pieces;
    std::vector<double> counts;  // (P, N): slots of each piece that chose each expert
};

// begin_keep of place_slots for the pieces `mine`; `all`: also those of other ranks with tokens of the same sequences.
// Of the slots of a sequence, `slots` of them, that chose an expert, it keeps the first ceil(factor slots / N), in the
// order of positions; factor 0: all. Places are numbered expert by expert, within an expert piece by piece.
std::vector<int32_t> begin_keep_of(const PieceCounts& local, const PieceCounts& all, double factor, int64_t slots);

// Counting sort, stable: of the slots of piece p that chose expert e, the first keep[p, e] go to begin[p, e] and
// behind. order (S) i32: the slot at each place; place (R, k) i32: the place of each slot, -1 if it is dropped.
// begin_keep (2, P, N) i32.
void place_slots(Tensor& order, Tensor& place, const Tensor& chosen, const Tensor& begin_keep);

// ---- rows of activations --------------------------------------------------------------------------------------------

// y (S, E): y_s = w_i x_(i / k), i = order[s]. weights (R, k), or empty: 1.
void gather_slots(Tensor& y, const Tensor& x, const Tensor& order, int64_t top_k, const Tensor& weights = {});
// y (R, E): y_r = sum over the kept slots j of w_rj z_(place[r, j]), in their order. weights (R, k), or empty: 1.
void sum_slots(Tensor& y, const Tensor& z, const Tensor& place, const Tensor& weights = {});
// dots (R, k) = dy_r . z_(place[r, j]); 0 for a dropped slot: the gradient of sum_slots' weights.
void slot_products(Tensor& dots, const Tensor& dy, const Tensor& z, const Tensor& place);

}  // namespace train70b
