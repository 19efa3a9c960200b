#pragma once
// The tables of chapter 03: what each stage keeps and what it sends, measured and computed.
#include "02_data_parallel/runtime/program.h"
#include "03_zero/complete/zero.h"

namespace train70b {

// Bytes of one rank. N: shard ranks; elements: of the whole model; padded: with the padding; owned: of the elements, in
// this rank's shards (elements / N, but for the padding).
struct ZeroMemory {
    int64_t params = 0, grads = 0, optimizer = 0, host = 0;
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

struct ZeroRun {
    std::string name;
    ZeroOptions options;
    int64_t micro_batches = 1;
    MemoryPeak peak;  // of a step, this rank
    ZeroMemory formula;
    int64_t wire_bytes = 0, wire_formula = 0, most_unsharded = 0;
    double step_s = 0, waiting_s = 0;
};
// Trains a fresh model for `steps` steps and reports the last one. Collective.
ZeroRun run_zero(const TrainOptions& options, const Dataset& data, const Comm& ranks, const ZeroOptions& zero,
                 int64_t micro_batches, const std::string& name, int steps = 2);

Table memory_table(const std::vector<ZeroRun>& runs, int64_t N);
Table wire_table(const std::vector<ZeroRun>& runs, int64_t N);
Table prefetch_table(const std::vector<ZeroRun>& runs);
Table projection_table();  // 7b on 4 ranks, 70b on 16 and 64: bf16, fp32 gradients; computed
// On several ranks, with --tables on: releases the run, runs all stages and prints the tables, with the prefetching and
// overlap that were chosen.
void print_tables(Program& program, const Comm& ranks, const ZeroOptions& chosen);

}  // namespace train70b
