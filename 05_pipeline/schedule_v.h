#pragma once
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
#include "05_pipeline/schedule.h"

namespace train70b {

std::vector<Step> zb_v(int64_t p, int64_t m, int64_t rank);
// What the first rank waits between its own first and last step, in F of a chunk, with F = I = W: with m < 2p - 1
// there are too few micro-batches to fill the time until the first gradient returns.
int64_t zb_v_wait(PipelineSize size);

std::vector<Step> dualpipe_v(int64_t p, int64_t m, int64_t rank);  // m >= 2p

}  // namespace train70b
