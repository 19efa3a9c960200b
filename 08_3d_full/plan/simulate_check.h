#pragma once
// Do the calls of all ranks fit together? A mistake that a real run shows as a hang, or as one rank's numbers in
// another's tensor, is here a sentence that names two ranks, their two calls and the two lines of the program. It needs
// no rank: a recording (sequence.h) is simulated without times, from the setup to the end, once with calls that begin
//   at waits   (mpi, staged) a collective begins at the next wait of its rank, in the order of the calls, and holds up
//              the rank until all members have begun it; a message begins at the call
//   on streams (nccl) a collective or ring shift begins when the computation before its call and all earlier ones of
//              this rank have completed, whatever their group (--comm-streams one: NCCL connects the ranks of a group
//              at its first call); channels are streams of their own; a wait holds up the computation behind it, host
//              numbers also the calls
// Both ends must have begun before either completes: nothing is buffered. The pipeline polls its sends; what nobody has
// waited for is waited for behind its last step.
//
// Proved, for the recorded step of this layout, model and batch:
//   1. In every group all members call the same collectives, splits, barriers and host numbers in the same order, with
//      equal element counts, dtypes, reductions, roots (CommCall::details) and bytes.
//   2. From each rank of a group to each other the k-th send meets the k-th receive, with equal bytes, element counts
//      and dtypes; channels, ring shifts and all others are matched separately, as the backends do. None is left over.
//   3. All ranks reach the end. Which call meets which follows from the orders alone, not from time: if one execution
//      ends, every one does, at any speed, and an execution in which less has to wait ends too.
// One rank stands only for ranks that make the same calls and meet ranks that do (equal_ranks.h).
//
// Not proved: that the recording is what the program does on real ranks. A branch on values that ranks do not share
// (losses, norms, clocks, files, environment) has been taken in one way; other steps, evaluation, checkpoints and the
// end of the program are not in it; in large worlds ranks and micro-batches are inferred from those that were run
// (record.h). Nor the contents: that a tensor is waited for before it is used, that the right one of two equal ones is
// sent, that a sum is over the right group. Nor what happens below: an all-reduce written by hand, links, time-outs.
#include "08_3d_full/plan/sequence.h"

namespace train70b {

// "all 16 ranks' 12345 calls match: every collective on all its ranks, ..."; CommonError (one line, exit code 1) with
// the first thing that is wrong. symmetry: SimulationOptions.
std::string check_calls(const Recording& recording, bool symmetry = true);

}  // namespace train70b
