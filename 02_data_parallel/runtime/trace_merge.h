#pragma once
// The traces of all ranks in one file, on one clock.
//
// Clocks of different machines differ by seconds and drift apart by microseconds per second. Rank 0 sends each rank a
// message that is answered with that rank's time: the answer was given about halfway between sending and receiving, so
//   difference = answer - (sent + received) / 2, wrong by at most (received - sent) / 2
// and the fastest of several round trips is the best (Cristian 1989). It is measured when the object is made and again
// by merge(); between the two the difference is taken to be linear.
#include "01_single_gpu/core/trace.h"
#include "02_data_parallel/runtime/mpi_group.h"

namespace train70b {

class TraceMerge {
  public:
    TraceMerge();  // collective over all ranks

    // file: rank 0's, with its own events, null on the others; title: of this rank. Ranks are asked for their events in
    // turn, which rank 0 writes as they arrive, a piece at a time. Collective.
    void merge(GrowingFile* file, EventFile& events, const std::string& title);

  private:
    struct Measurement {
        double time = 0, difference = 0;  // on the other rank's clock; that clock - rank 0's
    };
    std::vector<Measurement> measure() const;  // of all ranks, on rank 0; empty on the others
    void send(const void* bytes, int64_t count, int to) const;
    void receive(void* bytes, int64_t count, int from) const;

    const MpiGroup ranks_;
    const std::vector<Measurement> begin_;
};

}  // namespace train70b
