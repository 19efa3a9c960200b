#pragma once
// The tables of chapter 06: memory against sequence length, who does how much, what is sent, and what rounding does.
#include "02_data_parallel/runtime/program.h"
#include "06_context_parallel/context_parallel.h"
#include "06_context_parallel/gather_attention.h"

namespace train70b {

// Pairs (query, key) of one sequence that a rank computes for its heads' share: of all N ranks together T (T+1) / 2.
//   ring     c (c+1)/2 + r c^2,  c = T/N: the last rank of 8 has 15 times the work of the first
//   zigzag   c (c+1) + c^2 + 2 (N-1) c^2,  c = T/2N, on every rank; gather the same
//   ulysses  T (T+1) / 2 for 1/N of the heads
double attention_pairs(const ContextLayout& layout, int64_t rank, int64_t seq_len);  // times heads / U
// Bytes that a rank sends for one block and micro-batch, forward and backward: in the ring, inside Ulysses' groups, and
// in collectives of keys and values.
//   ring      (G-1) 2 n forward, the same backward, and G 2 n of fp32: n = rows K D of all that a group holds, of its heads
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
                               DType dtype, Recompute recompute);

struct ContextRun {
    std::string algorithm;
    ContextLayout layout;
    int64_t seq_len = 0;
    MemoryPeak peak;                   // of a step, this rank
    int64_t activations_formula = 0;   // chapter 01's for seq_len, divided by N
    GatherMemory gather_formula;       // of gather: comm and workspace
    std::vector<double> flops, cpu_s;  // of attention, forward and backward, by rank: counted; seconds of CPU time
    ContextTraffic sent, formula;      // of a block
    double step_s = 0, waiting_s = 0;
};
// Trains a fresh model for two steps of one micro-batch of options.micro_batch sequences, and reports the second.
// Collective over the context-parallel ranks.
ContextRun run_context(const TrainOptions& options, const Dataset& data, const Comm& ranks,
                       const ContextParallelOptions& context_options);

// Relative error of attention's output and of the gradients of q, k, v (the worst of the four), against one device in
// fp32 on the same inputs, which are rounded to dtype. Collective.
double attention_error(const Comm& ranks, const ContextParallelOptions& options, DType dtype, uint64_t seed);

std::string work_table(const std::vector<ContextRun>& runs);
std::string traffic_table(const std::vector<ContextRun>& runs);
std::string memory_table(const std::vector<ContextRun>& runs);
std::string error_table(const Comm& world);
// One rank's peak of a forward and backward pass, booked by a dry run: meta tensors in a fake world.
std::string long_context_table();

// Runs all algorithms and prints the tables. chosen: its group sizes are the run's.
void print_tables(Program& program, const Comm& ranks, const ContextParallelOptions& chosen);

}  // namespace train70b
