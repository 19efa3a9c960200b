#pragma once
// The tables of chapter 03: what a stage keeps and what it sends, measured and computed.
#include "02_data_parallel/runtime/program.h"
#include "03_zero/complete/zero.h"

namespace train70b {

// Bytes of one rank. N: shard ranks; elements: of the whole model; padded: with the padding; owned: of the elements, in
// this rank's shards (elements / N, but for the padding).
struct ZeroMemory {
    int64_t params = 0, grads = 0, optimizer = 0, host = 0, disk = 0;
};
ZeroMemory zero_memory(int64_t elements, int64_t padded, int64_t owned, const Llama::Options& types, int stage,
                       Offload offload, int64_t N);
// Bytes that a rank sends per step of m micro-batches, for P bytes of parameters and G of gradients (all units,
// padded):
//   stage 0: 2 G   1: G + P   2: m G + P   3: 2 m P + m G,   each times (N-1)/N
// padded: their elements; passed: those of the units that a micro-batch runs, which m multiplies: with tied embeddings
// it runs the embedding's unit twice.
int64_t zero_wire_bytes(int64_t padded, int64_t passed, const Llama::Options& types, int stage, int64_t m, int64_t N);

void say_layout(const Program& program, const Zero& store, const ZeroOptions& options);

// What a rank keeps and sends in the run's last step, measured and computed.
void print_tables(const Program& program, const Zero& store, const ZeroOptions& options);

}  // namespace train70b
