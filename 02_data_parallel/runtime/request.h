#pragma once
// What Comm, its backends and MpiGroup (mpi_group.h) have in common: an operation in progress, and what to do.
#include <memory>
#include <optional>
#include <string>

namespace train70b {

enum class Reduce { sum, max };

// Keeps point-to-point messages apart: between two ranks, messages of one tag arrive in the order of their sends.
enum class Tag { algorithm, user, ring_shift, p2p_channel };

// An operation in progress.
class Request {
  public:
    virtual ~Request() = default;
    virtual void wait() = 0;  // work issued after this call sees the result; on a stream the host goes on
    virtual bool test() { return finished(); }  // whether it has completed; on the rank's own thread, may make progress
    virtual bool on_stream() const { return false; }  // false: wait() blocks the host

    // These three are called by a thread of the watchdog.
    virtual bool started() { return true; }
    virtual bool finished() { return false; }
    virtual std::string failure() { return {}; }  // why it will never complete, if that is known

    struct Times {
        double busy = 0, stalled = 0;  // seconds: duration of the operation; time for which the compute stream waited
    };
    // Blocks until the operation has completed. Empty where the host performed it: the host's clock has counted it.
    virtual std::optional<Times> times() { return {}; }
};
using RequestPtr = std::shared_ptr<Request>;  // nullptr: the operation has already completed

}  // namespace train70b
