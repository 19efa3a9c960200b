#pragma once
// The flags of context parallelism, the algorithms of attention over its ranks, and which of them holds which tokens.
#include <functional>

#include "01_single_gpu/complete/config.h"

namespace train70b {

class Flags;
struct TokenRange;  // 01_single_gpu/complete/data/batches.h
struct RankTokens;

struct ContextParallelOptions {
    std::string algorithm = "zigzag";  // one of context_algorithms()
    int64_t ulysses_size = 0;          // of hybrid; 0: 2
};
void add_context_parallel_flags(Flags& flags, int64_t& cp, ContextParallelOptions& options);

// One value of --cp-algorithm. To add one, add it to the list in context_layout.cpp: the flag, the checks, the tests
// and the tables iterate over that list.
struct ContextAlgorithm {
    std::string name, description;
    int64_t chunks;                                        // per group of ranks; 2: zigzag
    bool gather;                                           // an all-gather instead of the ring
    bool takes_ulysses_size;                               // --ulysses-size
    int64_t (*ulysses)(int64_t cp, int64_t ulysses_size);  // U, the ranks of a group that share the heads
};
const std::vector<ContextAlgorithm>& context_algorithms();

struct ContextLayout {
    int64_t ranks = 1;    // N
    int64_t ulysses = 1;  // U: ranks of a group that share the heads
    int64_t chunks = 1;   // per group; 2: zigzag
    bool gather = false;  // an all-gather of keys and values (gather_attention.h) instead of the ring

    int64_t groups() const { return ranks / ulysses; }
    // The index in the sequence, among all groups' chunks, of a group's local chunk.
    int64_t chunk_index(int64_t group, int64_t chunk) const;
    // The tokens of a rank, in the order of its rows. seq_len must be a multiple of granularity().
    std::vector<TokenRange> tokens_of(int64_t rank, int64_t seq_len) const;
    // The queries of a rank's attention, in the order of its rows: the tokens of its group.
    std::vector<TokenRange> queries_of(int64_t rank, int64_t seq_len) const;
    // Both as a function of seq_len, for Batches.
    std::function<RankTokens(int64_t seq_len)> of_rank(int64_t rank) const;
    int64_t granularity() const { return ranks * chunks; }
};
// The steps of a ring (ulysses: 1), ascending from 0, in which some rank sees keys of the rank that is so many before
// it: all, or with a sliding window few. In a ring of chunks one after another those before the window's end, in a
// zigzag as many on both sides.
std::vector<int> ring_steps(const ContextLayout& ring, int64_t chunk_len, int64_t window);
// Usage error, naming the flag and the nearest value that works, where sequence or heads are not divisible.
ContextLayout context_layout(const LlamaConfig& config, int64_t seq_len, int64_t cp,
                             const ContextParallelOptions& options);

// ---- what a rank computes and sends, by formula: the tests hold the programs to it ----

// Pairs (query, key) of one sequence that a rank computes for its heads' share: of all N ranks together T (T+1) / 2.
//   ring     c (c+1)/2 + r c^2,  c = T/N: the last rank of 8 has 15 times the work of the first
//   zigzag   c (c+1) + c^2 + 2 (N-1) c^2,  c = T/2N, on every rank; gather the same
//   ulysses  T (T+1) / 2 for 1/N of the heads
double attention_pairs(const ContextLayout& layout, int64_t rank, int64_t seq_len);  // times heads / U
// The same with documents (data.h), counted: no layout divides them evenly.
double attention_pairs(const ContextLayout& layout, int64_t rank, const std::vector<int32_t>& document_starts);
// Bytes that a rank sends for one block and micro-batch, forward and backward: in the ring, inside Ulysses' groups, and
// in collectives of keys and values.
//   ring      (S-1) 2 n forward, the same backward, and S 2 n of fp32: n = rows K D of what a group holds, of its
//             heads; S = G, or in a layer with a window its ring_steps()
//   ulysses   (U-1)/U of q, k, v and out, rows (2 H + 2 max(K, U)) D, once each way, and of out once more for the
//             gradient of o_proj's weights
//   gather    (N-1)/N of 2 N n forward, the same backward, and of as many elements of fp32
// recompute: selective and full run the forward part once more; of selective the last exchange is then a part.
// pointwise keeps what attention made, and sends no more than none.
struct ContextTraffic {
    int64_t ring = 0, ulysses = 0, gather = 0;
    bool operator==(const ContextTraffic&) const = default;
};
ContextTraffic context_traffic(const LlamaConfig& config, const ContextLayout& layout, int64_t batch, int64_t seq_len,
                               DType dtype, Recompute recompute, int64_t window = 0);

}  // namespace train70b
