#pragma once
// A training step in time: a discrete-event simulation of recorded sequences on a cluster.
//
// With streams (a GPU) a rank has a computation stream, a communication stream for the collectives and shifts of each
// of its groups, in the order of the calls, or one for those of all groups (--comm-streams), and a stream per channel
// of messages. The host runs ahead of the device; it waits for numbers only. A call begins when its stream has reached
// it on every rank that takes part. Without streams (MPI) a rank does one thing at a time: collectives begin at its
// next wait, messages at the call, and ranks that share a node's cores slow each other down.
//
// A transfer takes its latency, then passes its bytes through its links at the rate that max-min fairness leaves it.
#include <functional>

#include "08_3d_full/plan/network.h"

namespace train70b {

struct SimulationOptions {
    std::map<int64_t, double> slow_ranks;  // rank: its ops take this many times longer
    std::map<int, double> slow_links;      // link of Network: its bandwidth is divided by this
    double jitter = 0;                     // relative standard deviation of every op's time
    uint64_t seed = 1;
    std::vector<int64_t> traced;   // ranks whose spans are kept
    bool stream_per_group = true;  // false: one for the collectives of all groups
    bool symmetry = true;          // false: simulates every rank, also those that do the same as another

    double times_slower(int64_t rank) const {
        const auto slow = slow_ranks.find(rank);
        return slow == slow_ranks.end() ? 1 : slow->second;
    }
};

struct SimulatedStep {
    double seconds = 0;  // of the step
    // Means over the ranks, in seconds; their sum is `seconds`: computing; the device waits for its host to launch the
    // next op; waiting for a group's communication, by its name ("tp"), without what follows; waiting for another rank
    // that has not arrived yet, by group ("pp": the bubble), and at the end for the last rank ("end").
    double compute = 0, host = 0;
    std::map<std::string, double> exposed, waiting;
    double bubble = 0;  // share of the step: of `waiting`, what is for the pipeline's messages and for the last rank
    struct Op {
        double calls = 0, seconds = 0;
    };
    std::map<std::string, Op> ops;  // of `compute`, by op; means over the ranks
    struct Span {
        int64_t rank;
        int stream;  // of stream_names
        std::string name;
        double begin, end;
    };
    std::vector<Span> spans;  // of the traced ranks
    // -1: the schedule's steps; 0: computation; then communication, by group; then messages.
    std::map<int, std::string> stream_names;
    struct MemorySample {
        int64_t rank;
        double seconds;
        MemoryBytes now;
    };
    std::vector<MemorySample> memory;  // of the traced ranks, where it changes
    int64_t simulated_ranks = 0;       // those that stand for all
    int64_t calls = 0, messages = 0;   // of all ranks; messages: those that are sent
};

constexpr int64_t kMaxJitterRanks = 512;  // with jitter no two ranks do the same, and every one is simulated

// Ranks of equal sequences that meet equal ranks are simulated once. Usage error if the cluster has too few devices,
// CommonError if calls that meet are not one (simulate_check.h).
SimulatedStep simulate_step(const Recording& recording, const ClusterModel& cluster,
                            const SimulationOptions& options = {});

// What the simulation asks of a cluster; or nothing of any: then it takes no time, and begins with the setup.
struct SimulationModel {
    std::function<double(const OpCall&)> op_seconds;  // empty: no times
    // members: world ranks; sender: in the group.
    std::function<Transfer(const CommCall&, const std::vector<int64_t>& members, int64_t sender)> transfer;
    std::vector<double> links;  // bytes/s of each
    bool timed() const { return bool(op_seconds); }
    double host_s = 0;  // least time from one launch to the next; without streams: of every op, besides its own
    bool streams = true;
    int64_t cores = 0, ranks_per_node = 8;  // cores that so many neighboring ranks share; 0: a device each
};
SimulatedStep simulate_step(const Recording& recording, const SimulationModel& model,
                            const SimulationOptions& options = {});

}  // namespace train70b
