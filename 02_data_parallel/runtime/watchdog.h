#pragma once
// The log of this rank's collectives, and the watchdog thread that reports from it when something hangs.
//
// A collective waits for every rank of its group. If one rank dies, hangs or takes another branch, all others just
// wait. The watchdog ends this: after --comm-timeout seconds the waiting rank prints its own number, the operation, its
// number in its group, which rank of this node no longer runs, and the last 64 collectives, and ends all ranks. The
// others, terminated by SIGTERM, print 8: side by side the logs show which rank is missing where.
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

#include "02_data_parallel/runtime/request.h"

namespace train70b {

class CollectiveLog {
  public:
    static constexpr size_t kKept = 64;
    enum class State { queued, running, posted, done };  // posted: in progress; not waited for yet

    struct Record {
        uint64_t id = 0;
        std::string what;  // "dp.all_reduce #17, 4096 fp32"
        std::source_location where;
        State state = State::queued;
        double begin = 0, end = 0;  // now_seconds()
        double waited = 0;          // seconds, as counted by the watchdog
        RequestPtr request;         // of an operation on a stream
        bool begun = true;          // on a stream: false while earlier work has not completed
    };

    uint64_t add(std::string what, const std::source_location& where);
    void set(uint64_t id, State state, const RequestPtr& request = nullptr);

    // Adds `seconds` to the wait of every running operation. Returns the first that has waited for longer than `limit`,
    // if any (0: no limit).
    std::optional<Record> tick(double seconds, double limit);
    // Closes operations that have completed on the device. Returns which of the others has failed there and why, if one
    // has. Calls the device.
    std::string poll_device();
    // The last operations, oldest first, and all that have not completed.
    std::string text(size_t most = kKept);

  private:
    std::map<uint64_t, Record>::iterator close(std::map<uint64_t, Record>::iterator entry);

    std::mutex mutex_;
    uint64_t next_ = 1;
    std::map<uint64_t, Record> open_;
    std::deque<Record> ended_;
};

CollectiveLog& collective_log();  // this rank's

// Two threads. From construction on the first handles SIGTERM (print the log, end) and SIGUSR1, which must be blocked
// in every other thread, and counts the seconds. It never calls the device, which may not answer; the second thread
// does.
class Watchdog {
  public:
    Watchdog();
    ~Watchdog();
    void set_timeout(double seconds) { timeout_ = seconds; }  // 0, the default: nothing times out

    // Heartbeats: counters in memory that the ranks of this node share. Each rank's watchdog increments its own for as
    // long as the process runs, whatever its other threads wait for.
    struct Beat {
        int rank;
        std::atomic<uint64_t>* count;
        uint64_t seen = 0;
        double unchanged = 0;             // seconds since the counter last changed
        double silence = 0, beating = 0;  // seconds: the last such time, kept for a while; since its end
    };
    void watch(std::vector<Beat> beats);  // this rank's and the others'; {} before that memory is freed

    // This rank ends with an error that has been printed. When another rank of the run ends first, mpirun terminates
    // this one; its report would only add lines to that error.
    void error_is_printed() { error_is_printed_ = true; }

    // From now on SIGUSR1 asks for the end of the run, and so does SIGTERM unless mpirun started this rank: srun sends
    // it to all ranks, mpirun to those that are left when one has died.
    void stop_on_signals() { stops_on_signals_ = true; }
    bool stop_requested() const { return stop_requested_; }

    // While the result exists no seconds are counted: some rank reads or writes files, or starts its GPU, and others
    // rightly wait for it, however long it takes. Then a heartbeat that stops is enough to end the run, after the
    // timeout. kLongestPause bounds what heartbeats do not show: a disk that never answers, or a rank on another node.
    static constexpr double kLongestPause = 3600;  // seconds
    [[nodiscard]] std::shared_ptr<void> pause() {
        ++pauses_;
        return {this, [](Watchdog* watchdog) { --watchdog->pauses_; }};
    }

  private:
    void run();
    void count_beats(double seconds);
    std::string missing();           // the ranks of this node whose hearts do not beat, in words; or empty
    std::string too_long_a_pause();  // the report on a rank that hangs or a pause that is too long; or empty
    std::mutex mutex_;
    std::vector<Beat> beats_;
    double paused_ = 0;  // seconds
    std::atomic<int> pauses_{0};
    std::atomic<double> timeout_{0};
    std::atomic<bool> stop_{false}, stops_on_signals_{false}, stop_requested_{false}, error_is_printed_{false};
    std::thread thread_, device_thread_;
};

extern std::unique_ptr<Watchdog> watchdog;  // this rank's, from the start of run_ranks (connect.h) to its end

// To stderr, in pieces of whole lines that another rank's cannot tear.
void print_report(const std::string& text);

void block_signals();  // SIGTERM and SIGUSR1, in this thread and in all threads it creates

}  // namespace train70b
