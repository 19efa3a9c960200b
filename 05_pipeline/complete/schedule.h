#pragma once
// A pipeline schedule is data: for each rank a list of steps, in the order in which the rank executes them. The same
// list is checked without running anything, simulated and drawn (schedule_simulation.h), and executed (pipeline.h).
//
// p pipeline ranks, m micro-batches, v model chunks per rank. The p*v chunks are the stages of the model, numbered from
// the embedding to the head by their stage index. Which stage a chunk is, is part of the schedule (Placement):
//     loop   chunk c of rank r is stage c*p + r: with v > 1 Megatron's virtual stages; a micro-batch passes every rank
//            v times in turn
//     V      chunk 0 of rank r is stage r, chunk 1 is stage 2p-1-r: a micro-batch goes from the first rank to the last
//            and back, so that the first rank has the embedding and the head
//
// The letters are those of torch.distributed.pipelining: F forward, B backward, split into I (gradient of the input)
// and W (gradient of the weights), so B = I + W. The zero-bubble papers call I "B".
//
//   schedule       what a rank does                             bubble / step     in flight on rank r
//   naive          F0 B0 F1 B1 ...                              (p-1)/p           1
//   gpipe          all F, then all B                            (p-1)/(m+p-1)     m
//   1f1b           p-1-r F; then F, B in turn                   (p-1)/(m+p-1)     min(m, p-r)
//   interleaved    the same on chunks of 1/v of the layers      (p-1)/(v m+p-1)   2(p-1-r) + (v-1)p + 1 chunks
//   zero-bubble    1f1b, W delayed to where the rank would idle (p-1)/(3m+p-1)    min(m, p)
//   zb-v           the same in a V: no idle time of its own     (p-1)/(6m+p-1)    2p chunks
//   dualpipe-v     F of one chunk beside B of the other, in a V (p-1)/(6m+p-1)    2p + 1 chunks
//
// (Bubbles for equal stages and B = 2F = 2I = 2W, by the clock: from the first begin to the last end on any rank.)
// gpipe: Huang et al. 2019; as published it also recomputes the activations of each stage (here: --recompute full) and
// runs the backward passes in reverse order of the micro-batches (here: in the order of the forward passes, so that all
// schedules add gradients in the same order). 1f1b: PipeDream, 2019, with a flush. interleaved: Narayanan et al. 2021.
// zero-bubble: ZB-H1 of Qi et al. 2023, for m >= p. zb-v, dualpipe-v: below.
#include <cstdint>
#include <string>
#include <vector>

namespace train70b {

enum class Pass { forward, backward, backward_input, backward_weight };
inline char letter_of(Pass pass) { return "FBIW"[int(pass)]; }

struct Step {
    Pass pass;
    int64_t micro_batch, chunk = 0;
    bool operator==(const Step&) const = default;
};
std::string to_string(const Step& step);  // "F3", "F3.1" in chunk 1

struct PipelineSize {
    int64_t p, m, v = 1;  // pipeline ranks, micro-batches, model chunks per rank
};

// Which stage each chunk of each rank is, and the inverse. A rank's chunks are in the order of their stages.
struct Placement {
    std::vector<std::vector<int64_t>> stage;  // [rank][chunk] -> stage index
    std::vector<int64_t> rank;                // [stage index] -> rank
    bool operator==(const Placement&) const = default;
};
Placement placement_of(std::vector<std::vector<int64_t>> stage);  // CHECK fails if it is no permutation of the stages
Placement loop_placement(int64_t p, int64_t v);
Placement v_placement(int64_t p);

// One value of --pipeline. To add a schedule, write the function that makes a rank's steps and add it to the list in
// schedule.cpp: the flag, the checks, the tests and the tables iterate over that list.
struct ScheduleGenerator {
    std::string name;
    enum class Chunks { one, loop, v } chunks;  // per rank: one; as many as --virtual-stages says; two in a V
    std::vector<Step> (*steps)(PipelineSize size, int64_t rank);
    // Idle share of the step, for equal stages, B = 2F = 2I = 2W and no latency: by the clock, and of the rank with the
    // longest span from its own first step to its own last (null: the same). Timeline's bubble() and span_bubble().
    double (*bubble)(PipelineSize size);
    double (*span_bubble)(PipelineSize size) = nullptr;
    int64_t (*in_flight)(PipelineSize size, int64_t rank);  // most micro-batches (times chunks) at once on the rank
    // The least number of micro-batches it works with, and what their number must be a multiple of; null: 1.
    int64_t (*least)(int64_t p) = nullptr;
    int64_t (*multiple)(int64_t p) = nullptr;
    const char* on_request = nullptr;  // why a plan tries it only where a flag asks for it; null: it does not need to

    int64_t default_chunks() const { return chunks == Chunks::one ? 1 : 2; }
    // What is wrong with m micro-batches on p ranks, and what would work; empty if they are fine.
    std::string problem(int64_t p, int64_t m, const std::string& stages_flag = "--pp") const;
};
const std::vector<ScheduleGenerator>& schedule_generators();
const ScheduleGenerator& find_schedule(const std::string& name);  // usage error for an unknown name

struct Schedule {
    std::string name;
    int64_t stages, micro_batches, chunks = 1;  // p, m, v
    std::vector<std::vector<Step>> ranks;
    Placement placement;

    int64_t stage_index(int64_t rank, int64_t chunk) const { return placement.stage[size_t(rank)][size_t(chunk)]; }
    int64_t stage_count() const { return stages * chunks; }  // p*v
    int64_t rank_of(int64_t stage_index) const { return placement.rank[size_t(stage_index)]; }
};

// chunks: 0 for the schedule's own number, 2 where --virtual-stages can choose it. Usage error for an unknown name, and
// for a number of micro-batches that the schedule does not work with.
Schedule make_schedule(const std::string& name, int64_t stages, int64_t micro_batches, int64_t chunks = 0);
Placement make_placement(const std::string& name, int64_t stages, int64_t chunks);  // of that schedule

// ---- checks (schedule_validation.cpp); each returns what is wrong, or an empty string ------------------------------
// Every micro-batch goes exactly once through every chunk, forward and backward; F before B or I, I before W, on each
// rank.
std::string incomplete(const Schedule& schedule);
// Whether all ranks of a complete schedule reach the end of their lists. A step needs what another rank sends: F the
// activations of the stage below, B and I the gradient from the stage above. Where both stages are on one rank, nothing
// is sent: the step needs an earlier one in the same list.
//   posted     receives are posted ahead and sends do not block, that is, messages are buffered (pipeline.h): only data
//              dependencies can form a cycle
//   blocking   synchronous: a send returns when the peer has reached the matching receive; a rank receives where its
//              step begins
// Names the ranks that wait for one another in a cycle, and for what.
enum class Sends { posted, blocking };
std::string deadlock(const Schedule& schedule, Sends sends);

// ---- what follows from the order alone ------------------------------------------------------------------------------
// The most micro-batches (times chunks) whose activations a rank holds at once: from F to the end of the backward pass.
int64_t in_flight(const Schedule& schedule, int64_t rank);
// Of the schedule's generator; a schedule from a file has none.
int64_t in_flight_formula(const Schedule& schedule, int64_t rank);
double bubble_formula(const Schedule& schedule);
double span_bubble_formula(const Schedule& schedule);

// Schedules in a V: two chunks per rank, stage r and stage 2p-1-r. A micro-batch goes down through chunk 0 of all ranks
// and back up through chunk 1, and its backward pass retraces the way. So the first rank has both ends of the model,
// every rank can begin its first backward pass soon after the turn, and all hold equally many micro-batches.
//
//   zb-v         Qi et al. 2023 (section 6) and 2024, the schedule without a memory limit: I and W as steps of their
//                own. With F = I = W and m >= 2p - 1 no rank idles between its own first and last step, in the memory
//                of 1F1B: 2p chunks of 1/(2p) of the layers on every rank.
//   dualpipe-v   DeepSeek-AI 2024/25 (DualPipe, cut in half): in the steady state F of one chunk is paired with B of
//                the other. On a GPU the two run as one, F&B, each hiding the other's communication; the formula counts
//                them so: (p-1)(F&B + B - 3W) idle, with F, B, W of one chunk. The executor here runs F, then B, and F
//                sends its output before B begins: with I = W = F that leaves (p-1) F, where the formula with
//                F&B = F + B gives 2 (p-1) F.
//
// Phase by phase they are the lists of PyTorch's ScheduleZBVZeroBubble and ScheduleDualPipeV.
std::vector<Step> zb_v(int64_t p, int64_t m, int64_t rank);
// What the first rank waits between its own first and last step, in F of a chunk, with F = I = W: with m < 2p - 1
// there are too few micro-batches to fill the time until the first gradient returns.
int64_t zb_v_wait(PipelineSize size);

std::vector<Step> dualpipe_v(int64_t p, int64_t m, int64_t rank);  // m >= 2p

}  // namespace train70b
