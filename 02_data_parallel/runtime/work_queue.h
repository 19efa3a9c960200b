#pragma once
// What stands behind a Work: one operation from the call to its completion, queued -> launched -> completed.
//
// On a stream (nccl) an operation is launched inside the call, and the stream of its group keeps the order. Without one
// (mpi, staged, fake) collectives wait in a queue, and are launched in the order of their calls when this rank waits
// for anything: the queue is to MPI what the streams are to a GPU. The order within a group is therefore the same on
// both, and a missing wait() shows on a laptop. Messages are always launched inside the call: two ranks that send
// before they receive must not deadlock.
#include <deque>

#include "02_data_parallel/comm.h"

namespace train70b {

struct AllReduceAlgorithm;

// What a rank is about to do.
struct Operation {
    const char* name = nullptr;   // "all_reduce"
    bool message = false;         // point to point: not called by all ranks of the group
    std::string details;          // must be equal on all ranks of a collective: number of elements, dtype, root
    int64_t wire_bytes = 0;       // the formula of comm.h before its division by N
    std::vector<Tensor> tensors;  // kept alive until the operation has completed
    size_t written = 0;           // that many of them are written, the others only read
    int64_t bytes = 0;            // without tensors: of this rank's numbers; with counts: of equal slices, as many sent
    std::vector<int64_t> sent, received;  // counts, if there are: elements by rank, which may differ between ranks
    int to = -1, from = -1;               // of a message: ranks in the group
    bool shift = false;                   // Comm::ring_shift
    std::function<RequestPtr(Backend&)> run;
    std::source_location where;
};

// A call as a Recorder (core/recorder.h) sees it.
struct RecordedCall {
    const Operation& operation;
    int family;    // of groups: what Recorder::split returned; 0: the world
    bool channel;  // of a group from Comm::p2p_channel
};

// The operations of one rank, in all its groups.
class WorkQueue {
  public:
    explicit WorkQueue(bool check) : check_(check) {}
    void push(std::shared_ptr<Work::State> work) { queue_.push_back(std::move(work)); }
    void launch_all();  // in the order of the calls

    bool check() const { return check_; }  // --comm-check
    // With --comm-check: no call may write what an earlier one that nobody has waited for uses, nor use what that one
    // writes, except collectives of one group and, on streams, its ring shifts. A queue keeps the order of all calls, a
    // GPU only that of a group's.
    void check_tensors(const std::shared_ptr<Work::State>& work);
    void add_wait(double seconds) { waited_ += seconds; }
    void read_clock_later(const Work::State& work, RequestPtr request);
    double take_waited();  // reads all device clocks

  private:
    void read_clocks(size_t leave);  // of all requests but the newest `leave`, blocking until they have completed

    const bool check_;
    std::vector<std::weak_ptr<Work::State>> pending_;  // with --comm-check: not waited for when last looked at
    std::deque<std::shared_ptr<Work::State>> queue_;
    struct OnDevice {
        std::weak_ptr<Comm::Group> group;
        const char* operation;
        RequestPtr request;
    };
    std::deque<OnDevice> on_device_;
    double waited_ = 0;
};

// What all groups of a rank share.
struct Comm::Shared {
    WorkQueue queue;
    const AllReduceAlgorithm* algorithm;
    std::vector<std::weak_ptr<Group>> groups;
};

// One group, as this rank sees it.
struct Comm::Group {
    std::shared_ptr<Shared> shared;
    std::unique_ptr<Backend> backend;
    std::string name;
    std::vector<int> ranks;                        // of its members in the world: what messages to people say
    Tag tag = Tag::user;                           // of send and recv
    int family = 0;                                // of a recording
    uint64_t collectives = 0, messages = 0;        // calls so far; only the first is equal on all ranks
    std::map<std::string, CommStats::Entry> sums;  // by operation; bytes: before the division by N
};

struct Work::State {
    std::shared_ptr<Comm::Group> group;
    Operation operation;
    std::string label;      // "dp.all_reduce #17, 4096 fp32"
    uint64_t log_id = 0;    // in the watchdog's log
    uint64_t recorded = 0;  // its number in a recording
    bool launched = false, waited = false;
    RequestPtr request;  // after the launch, until the operation has completed

    ~State();
    void launch();
    void wait();      // launches everything that was queued before, then completes
    void complete();  // waits for the request and releases the tensors

  private:
    void check_agreement() const;  // --comm-check
    std::string check_counts() const;
    void add_seconds(double seconds);
};

}  // namespace train70b
