#pragma once
// Finds slow ranks and links before a long run: times a small matrix product on every rank and one message along every
// axis of the mesh, and names the ranks that are outliers, with their hosts, which restart.py leaves out. The metrics
// file has the host of every rank ({"event":"hosts"}) and the slow ranks ({"event":"probe"}).
#include "02_data_parallel/runtime/program.h"
#include "08_3d_full/complete/layout/mesh_comms.h"

namespace train70b {

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
struct ProbeSizes {
    int64_t side = 0, elements = 0;  // of the product, of a message; 0: what the device takes some milliseconds for
};
// Collective. ranks: those that train, so that no other communicator of NCCL is measured than theirs.
ProbeResult probe(const Comm& world, const MeshComms& ranks, Device device, DType dtype, ProbeSizes sizes = {});
// What a cluster file (08_3d_full/complete/layout/cluster.h) says of the ranks' links: latency from a message of one
// element, bandwidth from a large all-reduce, between the ranks of a node and between nodes. Collective; the text on
// rank 0. Usage error if nodes have different numbers of ranks.
std::string probe_links(const Comm& world, Device device);

// Prints and records the hosts of the ranks; then, if asked, probes, and prints and records the result. --probe strict:
// all ranks end with kProbeFailed if any is slow. links: the file for probe_links(). Collective.
void check_machines(Program& program, const MeshComms& ranks, const std::string& probing, OptionalOutput& links);

void add_probe_flag(CommandLine& flags, std::string& probing, OptionalOutput& links);  // --probe, --probe-file
// Usage error with simulated ranks. --probe-file implies --probe on.
void check_probe(std::string& probing, OptionalOutput& links, const CommOptions& comm);

}  // namespace train70b
