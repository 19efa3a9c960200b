#pragma once
// Multi-token prediction (DeepSeek-V3, 2024, section 2.2), with one module. From the final hidden state of token i and
// the embedding of token i+1, one more block predicts token i+2, with the model's own embedding and head:
//
//   u = W_p [norm(embedding(t_(i+1))) | norm(h_i)]      (R, 2E) -> (R, E);  h: behind the final norm
//   loss = cross-entropy(head(h), t_(i+1)) + weight * cross-entropy(head(norm(block(u))), t_(i+2))
//
// Both are divided by the same number of targets, though the last token of a sequence has only the first. The block is
// the last of Llama::blocks, with the number of layers as its own. In a pipeline it runs where the head is, which then
// has a copy of the embedding's matrix, as with tied embeddings.
#include "01_single_gpu/complete/config.h"
#include "01_single_gpu/complete/layers.h"
#include "01_single_gpu/complete/unit.h"

namespace train70b {

struct MultiToken {
    MultiToken(const LlamaConfig& config, double init_std);
    MultiToken(const MultiToken&) = delete;

    Param embedding_norm, hidden_norm, project, norm;  // in the block's unit
    Linear projection;
    Unit embedding_unit, head_unit;  // the second use of the model's
    std::vector<Param*> params() { return {&embedding_norm, &hidden_norm, &project, &norm}; }
    Var input(Tape& tape, const Var& embedded, const Var& hidden) {  // u
        return projection(tape, join_columns(tape, {rmsnorm(tape, embedded, embedding_norm, eps_),
                                                    rmsnorm(tape, hidden, hidden_norm, eps_)}));
    }

  private:
    const double eps_;
};

}  // namespace train70b
