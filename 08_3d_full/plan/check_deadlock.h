#pragma once
// Executes the calls and waits of all ranks and says who waits for whom in a deadlock.
//
// Ranks are executed in classes. Two ranks are in one class if they have the same sequence, if for each family the
// groups of the two contain the same classes, and if each message of one has a peer of the same class as the other's,
// for which it is the same message. Then they take every step together: in an execution by rounds, in which every rank
// does all it can given the state before the round, two ranks of a class that are in the same state meet classes in the
// same states, so they are in the same state after the round. The partition is found by refinement: start from the
// sequences, split the classes that differ in what they meet, until none does (as in colour refinement of graphs).
#include "08_3d_full/plan/call_order.h"
#include "08_3d_full/plan/sequence.h"

namespace train70b {

// When a collective begins (check_calls.h).
enum class Launch { at_waits, on_streams };

// The class of each rank, from 0 without gaps. by_rank: every rank is a class of its own.
std::vector<int32_t> equal_ranks(const Recording& recording, const GroupTable& groups,
                                 const std::vector<CallOrder>& orders, bool by_rank);

// Empty if all ranks reach the end; else who waits for whom. Collectives and messages must match (check_calls.h, 1 and
// 2). orders: of the recording's sequences.
std::string deadlock(const Recording& recording, const GroupTable& groups, const std::vector<CallOrder>& orders,
                     const std::vector<int32_t>& class_of, Launch launch);

}  // namespace train70b
