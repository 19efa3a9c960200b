#pragma once
// --trace: the spans of a run as Chrome trace events (chrome://tracing, ui.perfetto.dev), one process per rank.
#include <algorithm>

#include "01_single_gpu/core/profile.h"

namespace train70b {

// From a rank's clock to rank 0's: the difference was measured at two times; between them it changes linearly.
struct ClockDifference {
    double begin = 0, end = 1;                // on this rank's clock, seconds
    double at_begin = 0, at_end = 0;          // this rank's clock - rank 0's
    double to_rank_0(double seconds) const {  // before and after: as at that end
        const double part = std::clamp((seconds - begin) / (end - begin), 0.0, 1.0);
        return seconds - (at_begin + part * (at_end - at_begin));
    }
};

// A file is head, the texts of all ranks, tail.
std::string trace_head();
inline constexpr const char* kTraceTail = "\n]}\n";

// The text of one rank's events in pieces, so that it never exists as a whole.
class TraceText {
  public:
    // title: of the rank's process. Refers to the events.
    TraceText(const std::vector<Profile::Event>& events, int rank, std::string title, const ClockDifference& clock)
        : events_(events), rank_(rank), title_(std::move(title)), clock_(clock) {}
    std::string next();  // about kPiece bytes; empty at the end
    static constexpr size_t kPiece = 1 << 20;

  private:
    const std::vector<Profile::Event>& events_;
    const int rank_;
    const std::string title_;
    const ClockDifference clock_;
    size_t written_ = 0;
    bool has_title_ = false;
};

}  // namespace train70b
