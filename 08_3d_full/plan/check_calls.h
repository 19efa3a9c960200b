#pragma once
// Do the calls of all ranks fit together? A mistake that a real run shows as a hang, or as one rank's numbers in
// another's tensor, is here a sentence that names two ranks, their two calls and the two lines of the program. It needs
// no rank: the sequences of a dry run suffice (sequence.h).
//
// Proved, for the recorded step of this layout, model and batch:
//   1. Collectives. In every group all members call the same operations in the same order, with equal element counts,
//      dtypes, roots (CommCall::details) and bytes; splits, barriers and host numbers count as collectives.
//   2. Messages. From each rank of a group to each other the k-th send meets the k-th receive, with equal bytes,
//      element counts and dtypes; messages of channels, ring shifts and all others are matched separately, as the
//      backends do. None is left over.
//   3. No deadlock. All ranks reach the end of their sequences, under both rules by which calls begin:
//        at waits   (mpi, staged) a collective begins at the next wait of its rank, in the order of the calls, and
//                   holds up the rank until all members have begun it; a message is posted at the call
//        on streams (nccl) a collective or ring shift begins when the computation before its call and all earlier
//                   ones of this rank have completed, whatever their group; channels are streams of their own; a wait
//                   holds up the computation behind it, and host numbers also the calls. That is --comm-streams one;
//                   with a stream for each group a call waits for fewer others, once every group has been used: NCCL
//                   connects its ranks at the first call
//      A collective completes when all members have begun it, a message when both ends are posted: nothing is buffered.
//      The pipeline polls its sends; what nobody has waited for is waited for behind its last step.
//   Which call meets which follows from the orders alone, not from time. So if one execution ends, every one does, at
//   any speed of ranks and links; and an execution in which less has to wait ends too.
//
// Not proved: that the recording is what the program does on real ranks. A branch on values that ranks do not share
// (losses, norms, clocks, files, environment) has been taken in one way; other steps than the recorded one, evaluation,
// checkpoints and the end of the program are not in it; in large worlds the recording infers ranks and micro-batches
// from those that were run (record.h). Nor the contents: that a tensor is waited for before it is used, that the right
// one of two equal ones is sent, that a sum is over the right group. Nor what happens below: the messages of an
// all-reduce written by hand, links, libraries, memory, time-outs.
//
// How it is fast: ranks of one class (sequence.h) have one list of calls, and lists are compared once. Progress is
// executed for one rank of each class of a finer partition, in which the ranks of a class also meet ranks of the same
// classes in the same roles: they then take every step together (check_deadlock.h). Worlds of up to 64 ranks are
// executed rank by rank.
#include <optional>
#include <string>

#include "08_3d_full/plan/sequence.h"

namespace train70b {

struct Mismatch {
    std::string text;  // one line: ranks, calls "tp.all_reduce #17, 4096 fp32", the parts and source lines they are in
};

struct MatchOptions {
    int64_t rank_by_rank = 64;  // worlds of up to so many ranks are executed without classes
};

// Empty if the step cannot hang or mix up its messages, in the sense above; else the first thing that is wrong.
std::optional<Mismatch> mismatch(const Recording& recording, const MatchOptions& options = {});

// For a recording without mismatch: "all 16 ranks' 12345 calls match: every collective on all its ranks, ...".
std::string match_text(const Recording& recording);
// The same; CommonError (one line, exit code 1) if there is a mismatch.
std::string matched(const Recording& recording);

}  // namespace train70b
