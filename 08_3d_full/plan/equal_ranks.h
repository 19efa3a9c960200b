#pragma once
// Symmetry: ranks that make the same calls and meet ranks that do the same are at the same point at any time. One of
// them is simulated for all.
//
// What takes part is a graph: ranks, links, and sites, where ranks meet: a group of ranks (its collectives), or a pair
// in one direction (its messages). A site has ranks, and links with the bytes that each of its calls passes through
// them. Color refinement (Weisfeiler & Leman) divides all three into the coarsest classes in which every member meets
// equal numbers of members of the other classes. The members of such a class cannot be told apart in the simulation, so
// that its results are those of all ranks. A link then carries what all equal sites load on it.
//
// With more ranks than cores, equal ranks in lock step compute together and then wait together. That is an exact but
// unstable solution: any difference between them grows, as rounding does from 1e-15 to 1e-2 within a few micro-batches,
// until some compute while others wait, and the step becomes some percent shorter. Jitter shows it.
#include "08_3d_full/plan/flows.h"
#include "08_3d_full/plan/simulate.h"

namespace train70b {

struct SharedTransfer {
    double latency_s = 0, bytes = 0;  // bytes: of one site, on its busiest link; 0: nothing passes a link
    std::vector<FlowLoad> loads;      // link classes
};

struct EqualRanks {
    std::vector<int32_t> class_of;        // by rank
    std::vector<int64_t> representative;  // by class: its lowest rank
    std::vector<int64_t> count;

    struct Participant {
        int32_t rank_class;
        bool receives;  // of a message
        auto operator<=>(const Participant&) const = default;
    };
    std::vector<std::vector<Participant>> sites;  // one of each class
    std::vector<double> links;                    // bytes/s, one of each class; with shared cores also those
    std::vector<SharedTransfer> transfers;

    // What one end of a call is: the site (-1: no group, no such peer), which of its participants, what is transferred
    // (-1: the sender knows), and what all ends must have in common: the operation, its tensor, bytes and root.
    struct Meeting {
        int32_t site = -1, participant = -1, transfer = -1;
        uint64_t content = 0;
    };
    using Use = std::array<Meeting, 2>;  // of a collective or a send; of a receive
    std::vector<std::vector<Use>> uses;  // by class and call of its sequence; what a step does not use: empty
    std::vector<int32_t> cores;          // by class: the transfer that stands for its computation; -1: none
};

// Whether a part of a sequence is simulated: in time all but the setup before the step and the end after it.
bool simulated(const Sequence::Part& part, const SimulationModel& model);

EqualRanks find_equal_ranks(const Recording& recording, const SimulationModel& model, const SimulationOptions& options);

}  // namespace train70b
