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

// A file is head, the titles and texts of all ranks, tail. A text is a part of a rank's events.
std::string trace_head();
std::string trace_title(int rank, const std::string& title);  // of the rank's process
std::string trace_text(const std::vector<Profile::Event>& events, int rank, const ClockDifference& clock);
inline constexpr const char* kTraceTail = "\n]}\n";
inline constexpr size_t kMostEvents = 4096;  // about 1 MB of text

// The events of a rank that is not 0, in a file without a name: only after the run is known by how much its clock was
// wrong.
class EventFile {
  public:
    EventFile() = default;
    ~EventFile();
    EventFile(const EventFile&) = delete;
    void write(const std::vector<Profile::Event>& events);
    std::vector<Profile::Event> read();  // from the first on, kMostEvents at most; empty: there are no more

  private:
    FILE* file_ = nullptr;
    bool reads_ = false;
};

}  // namespace train70b
