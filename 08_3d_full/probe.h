#pragma once
// Finds slow ranks and links before a long run: times a small matrix product on every rank and one message along every
// axis of the mesh, and names the ranks that are outliers. For restart.py, which leaves their hosts out, the metrics
// file has the host of every rank ({"event":"hosts"}) and the slow ranks ({"event":"probe"}).
#include "02_data_parallel/runtime/program.h"
#include "08_3d_full/config.h"

namespace train70b {

enum class Probing { off, on, strict };
constexpr int kProbeFailed = 3;  // the exit code of --probe strict that found a slow rank

struct SlowRank {
    int64_t rank;
    std::string what;  // it was measured at
    double of_median;
};
struct ProbeResult {
    Table table;                 // TFLOP/s of a product, GB/s along each axis: least, median, most, the slowest rank
    std::vector<SlowRank> slow;  // ranks below 80% of the median
};
ProbeResult probe(const Comm& world, const ParallelConfig& config, Device device, DType dtype);  // collective

// Prints and records the hosts of the ranks; then, if asked, probes, and prints and records the result. --probe strict:
// all ranks end with kProbeFailed if any is slow. Collective.
void check_machines(Program& program, const ParallelConfig& config, Probing probing);

void add_probe_flag(Flags& flags, Probing& probing);         // --probe
void check_probe(Probing probing, const CommOptions& comm);  // usage error with simulated ranks

}  // namespace train70b
