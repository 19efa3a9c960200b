#pragma once
// A pipeline schedule is data: for each rank a list of steps, in the order in which it takes them. The same list is
// checked here without running anything, simulated and drawn (simulate.h), and executed (pipeline.h).
//
// p stages, m micro-batches, v chunks of layers per rank. Chunk c of rank r is the model's part number c*p + r: with v
// > 1 a micro-batch passes every rank v times. F forward, B backward = I (gradient of the input) + W (gradient of the
// weights).
//
//   schedule       what a rank does                            bubble / step (B = 2F = 2I = 2W)   in flight on rank r
//   naive          F0 B0 F1 B1 ...                              (p-1)/p                            1
//   gpipe          all F, then all B                            (p-1)/(m+p-1)                      m
//   1f1b           p-1-r F; then F, B in turn                   (p-1)/(m+p-1)                      min(m, p-r)
//   interleaved    the same on chunks of 1/v of the layers      (p-1)/(v m+p-1)                    2(p-1-r) + (v-1)p + 1 chunks
//   zero-bubble    1f1b, W put off to where the rank would idle (p-1)/(3m+p-1)                     min(m, p)
//
// gpipe: Huang et al. 2019; as published it also recomputes the activations of each stage (here: --recompute full) and
// takes the backward passes in reverse order of the micro-batches (here: in the order of the forward passes, so that
// all schedules add gradients in one order). 1f1b, interleaved: Narayanan et al. 2021. zero-bubble: ZB-H1 of Qi et al.
// 2023, for m >= p.
#include <cstdint>
#include <string>
#include <vector>

namespace train70b {

enum class Pass { forward, backward, backward_input, backward_weight };
char letter_of(Pass pass);  // F B I W

struct Step {
    Pass pass;
    int64_t micro_batch, chunk = 0;
    bool operator==(const Step&) const = default;
};
std::string to_string(const Step& step);  // "F3", "F3.1" in chunk 1

struct Schedule {
    std::string name;
    int64_t stages, micro_batches, chunks = 1;
    std::vector<std::vector<Step>> ranks;

    int64_t part(int64_t rank, int64_t chunk) const { return chunk * stages + rank; }
    int64_t parts() const { return stages * chunks; }
    int64_t rank_of(int64_t part) const { return part % stages; }
    int64_t chunk_of(int64_t part) const { return part / stages; }
};

// name: as in the table. Usage error where it cannot be: interleaved wants m to be a multiple of p.
Schedule make_schedule(const std::string& name, int64_t stages, int64_t micro_batches, int64_t chunks = 1);

// ---- checks; each returns what is wrong, or nothing ----------------------------------------------------------------
// Every micro-batch exactly once through every chunk, forward and backward; F before B or I, I before W, on each rank.
std::string incomplete(const Schedule& schedule);
// Whether all ranks get to their ends. A step needs what another rank sends: F the activations of the part below, B and
// I the gradient of the part above.
//   posted     receives are posted ahead, and a rank goes on after a send (pipeline.h): only needs can form a cycle
//   blocking   a send returns when the other rank has come to its receive, and a rank receives where its step begins
// Names the ranks that wait for one another in a circle, and for what.
enum class Sends { posted, blocking };
std::string deadlock(const Schedule& schedule, Sends sends);

// ---- what follows from the order alone ------------------------------------------------------------------------------
// The most micro-batches (times chunks) whose activations a rank holds: from F to the end of its backward pass.
int64_t in_flight(const Schedule& schedule, int64_t rank);
int64_t in_flight_formula(const Schedule& schedule, int64_t rank);  // the table's, at most all there are
double bubble_formula(const Schedule& schedule);                    // the table's

}  // namespace train70b
