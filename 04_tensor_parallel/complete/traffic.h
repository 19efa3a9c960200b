#pragma once
// What a rank holds and what it sends under tensor parallelism, computed: the tests hold the programs to it.
#include "02_data_parallel/comm.h"
#include "04_tensor_parallel/complete/tensor_parallel.h"

namespace train70b {

// Parameters that one rank holds: sharded ones divided by tp, norm weights whole, at least one key/value head, and the
// vocabulary's rows rounded up.
int64_t tensor_parallel_elements(const LlamaConfig& config, int64_t tp);

// Collectives of one rank: calls and bytes sent by operation, as Comm books them.
struct Traffic {
    struct Entry {
        int64_t calls = 0, bytes = 0;
        bool operator==(const Entry&) const = default;
    };
    std::map<std::string, Entry> operations;  // "tp.all_reduce"

    void add(const CommStats& stats);
    int64_t bytes() const;
    std::string text() const;  // "4 all_reduce"
};
struct TrafficShape {
    int64_t rows, tp;  // R = B*T of a micro-batch
    DType dtype, grad_dtype;
    TensorParallelOptions options;
    Recompute recompute = Recompute::none;
    int64_t recompute_every = 1;
};
// Of the first block, forward and backward, for n = R*E*size bytes:
//   without sequence parallelism   4 all-reduces, each 2 n (N-1)/N          (full recomputation: 6)
//   with it                        4 all-gathers, 4 reduce-scatters, each n (N-1)/N, and 2 all-gathers for the weight
//                                  gradients                                (full recomputation: 8 and 6)
//   with overlap                   forward, and for the gradient of g's input, N - 1 shifts in the place of each
Traffic layer_traffic(const LlamaConfig& config, const TrafficShape& shape);
// Of a whole step of m micro-batches: the layers, the embedding, the head, the loss, the gradients of copied
// parameters.
Traffic step_traffic(const LlamaConfig& config, const TrafficShape& shape, int64_t micro_batches);

}  // namespace train70b
