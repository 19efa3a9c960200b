#pragma once
// A sequence without its computations: the calls in their order, numbered as the program numbers them, and the waits.
// Sends that nobody waits for before the end of the schedule are waited for there.
#include "08_3d_full/plan/sequence.h"

namespace train70b {

struct CallOrder {
    struct Call {
        int32_t call;    // an index into Sequence::calls
        int32_t number;  // of the rank's collectives in this group, or of its messages; from 1
        int32_t part;    // an index into Sequence::parts
        // Of a message: indices into lanes, and its number there, from 1; -1: it sends (receives) nothing.
        int32_t out = -1, out_number = 0, in = -1, in_number = 0;
    };
    // The messages to or from one rank, in order.
    struct Lane {
        int32_t family;
        bool channel, shift, out;
        int32_t peer;                // CommCall::to or from
        std::vector<int32_t> calls;  // indices into CallOrder::calls
        bool meets(const Lane& other) const {
            return family == other.family && channel == other.channel && shift == other.shift && out != other.out;
        }
    };
    std::vector<Call> calls;
    std::vector<int32_t> events;                    // i >= 0: calls[i]; else a wait for calls[~i]
    std::vector<std::vector<int32_t>> collectives;  // by family: indices into calls
    std::vector<Lane> lanes;
    std::string wrong;  // empty, or why this is no sequence: "rank 3 waits in F2 for a call that it has not made"

    CallOrder(const Sequence& sequence, size_t families);

  private:
    // Appends the call to its lane.
    void add(const CommCall& call, bool out, int32_t peer, int32_t& lane, int32_t& number);
};

// The world rank at the other end of a lane; -1: there is no such rank.
int64_t peer_of(const GroupTable& groups, const Sequence& sequence, const CallOrder::Lane& lane, int64_t rank);
// The lane of `order`, the sequence of the rank at the other end, that leads back to this rank; -1: none does.
int32_t lane_back(const GroupTable& groups, const CallOrder::Lane& lane, int64_t rank, const Sequence& peers_sequence,
                  const CallOrder& order, int64_t peer);

// "tp.all_reduce #17, 4096 fp32 in F3 (04_tensor_parallel/operators.cpp:60)"
std::string describe_call(const Recording& recording, const Sequence& sequence, const CallOrder::Call& call);

}  // namespace train70b
