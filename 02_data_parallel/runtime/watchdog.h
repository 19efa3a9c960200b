#pragma once
// The log of this rank's collectives, and the thread that reads it when something is wrong.
//
// A collective waits for every rank of its group, so one rank that has died, stands still or has taken another branch
// shows as silence on all the others. Here silence has an end: after --comm-timeout seconds the rank that waits names
// itself, the operation, its number and its group, prints its last 64 collectives, and ends all ranks. The others,
// ended by SIGTERM, print theirs: side by side they show who is missing where.
#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <source_location>
#include <string>
#include <thread>
#include <vector>

#include "02_data_parallel/runtime/transport.h"

namespace train70b {

class CollectiveLog {
  public:
    static constexpr size_t kKept = 64;
    enum class State { queued, running, posted, done };  // posted: under way, but this rank does not wait for it yet

    struct Record {
        uint64_t id = 0;
        std::string what;  // "dp.all_reduce #17, 4096 fp32"
        std::source_location where;
        State state = State::queued;
        double begin = 0, end = 0;  // now_seconds()
        double waited = 0;          // as the watchdog has counted it
        Handle handle;              // of an operation on a device
        bool begun = true;          // on a device: false while what was issued before it is not done
    };

    uint64_t add(std::string what, const std::source_location& where);
    void set(uint64_t id, State state, const Handle& handle = nullptr);

    // Adds `seconds` to the wait of everything that is running; the first that has waited for longer than the limit, if
    // any. limit 0: none.
    std::optional<Record> tick(double seconds, double limit);
    void look_at_device();  // closes what has ended there; calls the device
    std::string text();     // the last 64, oldest first, and all that has not ended

  private:
    std::map<uint64_t, Record>::iterator close(std::map<uint64_t, Record>::iterator entry);

    std::mutex mutex_;
    uint64_t next_ = 1;
    std::map<uint64_t, Record> open_;
    std::deque<Record> ended_;
};

CollectiveLog& collective_log();  // this rank's

// Its threads. From construction on one handles SIGTERM, which must be blocked in every other thread (print the log,
// end) and counts the seconds; it never calls the device, which may not answer. The other one does.
class Watchdog {
  public:
    Watchdog();
    ~Watchdog();
    void set_timeout(double seconds) { timeout_ = seconds; }  // 0, as at first: nothing times out

    // Beats: counters in memory that the ranks of this node share. Each rank's watchdog counts its own up for as long
    // as the process runs at all, whatever its other threads are waiting for.
    struct Beat {
        int rank;
        std::atomic<uint64_t>* count;
        uint64_t seen = 0;
        double still = 0;  // seconds since it last changed
    };
    void watch(std::vector<Beat> beats);  // this rank's and the others'
    void unwatch();                       // before that memory goes

    // While one exists no seconds are counted: some rank reads or writes files, and the others rightly wait for it,
    // however long it takes. Instead the beats are watched, so that a process that stands still is found after the
    // timeout; and kLongestPause bounds what they do not show, a disk that never answers or a rank on another node.
    static constexpr double kLongestPause = 3600;  // seconds
    class Pause {
      public:
        explicit Pause(Watchdog& watchdog) : watchdog_(watchdog) { ++watchdog_.pauses_; }
        ~Pause() { --watchdog_.pauses_; }
        Pause(const Pause&) = delete;

      private:
        Watchdog& watchdog_;
    };

  private:
    void run();
    std::string missed_beat(double seconds);  // of a rank, or of the whole pause: what is wrong; empty: nothing
    std::mutex mutex_;
    std::vector<Beat> beats_;
    double paused_ = 0;
    std::atomic<int> pauses_{0};
    std::atomic<double> timeout_{0};
    std::atomic<bool> stop_{false};
    std::thread thread_, device_thread_;
};

extern std::unique_ptr<Watchdog> watchdog;  // this rank's, from the start of run_ranks (launch.h) to its end

void block_sigterm();  // in this thread and all that it creates

}  // namespace train70b
