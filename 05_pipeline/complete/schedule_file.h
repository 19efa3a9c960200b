#pragma once
// A schedule as a text file: `schedule --file FILE`, `--pipeline file:FILE`.
//
//     # 1F1B on two ranks; a comment runs to the end of its line
//     F0 F1 B0 F2 B1 F3 B2 B3          one line per rank, from rank 0 on
//     F0 B0 F1 B1 F2 B2 F3 B3
//
// A step is F, B, I or W, the micro-batch, and .CHUNK if it is not chunk 0: F3, B0.1. Ranks are as many as lines,
// micro-batches and chunks as many as the steps name. A line before the ranks' says which stage each chunk is, where
// ranks have several:
//
//     placement: loop                  chunk c of rank r is stage c*p + r (this is the default)
//     placement: v                     two chunks, stages r and 2p-1-r
//     stages: 0 3 / 1 2                the stages of rank 0's chunks, of rank 1's, ...; ascending on each rank
#include "05_pipeline/complete/schedule.h"

namespace train70b {

// Usage error naming file, line and word for what is no step, and for a placement that is not one. Whether the schedule
// is complete and ends is for the checks to say. name: in errors, and of the schedule.
Schedule parse_schedule(const std::string& name, const std::string& text);
// Of a file's text; what: names the file in errors, as "--file my.txt". The schedule's name is file:PATH.
Schedule read_schedule(const std::string& what, const std::string& path);
std::string schedule_text(const Schedule& schedule);  // parse_schedule reads the same schedule from it

}  // namespace train70b
