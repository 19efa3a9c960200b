#pragma once
// Comm: a group of ranks and its collective operations. All distributed code of this course stands on it.
//
// N ranks, n bytes of the whole tensor. A call books the minimum number of bytes that a rank has to send (Patarasuk &
// Yuan 2009), whatever algorithm ran:
//   all_reduce 2 n (N-1)/N      all_gather, reduce_scatter, all_to_all, broadcast n (N-1)/N      send, send_recv n
//   all_to_all with counts: what this rank sends to others
// under "group.operation", as in "dp.all_reduce"; host numbers under "group.scalar". (N-1)/N is applied to the sum of
// all calls and rounded down: if N divides the sum, the result is exact even where N does not divide the single calls.
//
// Every operation returns a Work; until its wait() returns, the tensors belong to the operation. To block, wait at
// once: world.all_reduce(x).wait(). All ranks of a group must call its collectives in the same order: calls are matched
// by order alone. A group's collectives run in the order of the calls; between groups only wait() orders
// (--comm-streams). How a call becomes messages: runtime/comm.cpp.
#include <map>
#include <source_location>

#include "02_data_parallel/runtime/backend.h"

namespace train70b {

struct Operation;

struct CommStats {
    struct Entry {
        int64_t calls = 0, bytes = 0;
        double seconds = 0;
    };
    std::map<std::string, Entry> operations;  // "group.operation"
    double waited = 0;                        // seconds for which this rank's own work waited for communication
};

class Work {
  public:
    Work() = default;  // nothing to wait for
    void wait();       // a second call does nothing
    // Whether it has completed, without waiting; if so, releases the tensors as wait() does. Messages complete while
    // one polls; without streams a collective begins only at this rank's next wait().
    bool done();
    bool pending() const { return state_ != nullptr; }

    struct State;

  private:
    explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}
    std::shared_ptr<State> state_;
    friend class Comm;
};

// A handle: copies refer to the same group.
class Comm {
  public:
    using Where = std::source_location;  // of the call, for reports

    Comm() = default;  // a group of one rank
    int rank() const;
    int size() const;
    const std::string& name() const;
    const char* backend() const;
    bool has_peers() const;  // false: one rank of a simulated process group (--comm fake)

    // Splits the group by color. Ranks of the same color form a group of this name, in rank order; a negative color
    // joins no group and returns a one-rank Comm. Collective. color_of must be the same function on every rank: a fake
    // process group evaluates it for its simulated ranks. load: light for a group that carries little. open: called
    // with the new group's backend.
    Comm split(const std::function<int(int rank)>& color_of, const std::string& name, GroupLoad load = GroupLoad::heavy,
               Where where = Where::current(), const std::function<void(Backend&)>& open = {}) const;

    // A dedicated point-to-point channel from one rank to another, as a group of the two: sends are asynchronous and
    // never block other traffic. Collective. The way for device tensors that are sent in every step.
    Comm p2p_channel(int from, int to, Where where = Where::current()) const;

    [[nodiscard]] Work all_reduce(Tensor x, Reduce reduce = Reduce::sum, Where where = Where::current()) const;
    // `part` becomes slice rank() of the sum of all ranks' `whole`.
    [[nodiscard]] Work reduce_scatter(Tensor part, Tensor whole, Where where = Where::current()) const;
    [[nodiscard]] Work all_gather(Tensor whole, Tensor part, Where where = Where::current()) const;
    [[nodiscard]] Work broadcast(Tensor x, int root, Where where = Where::current()) const;
    // Slice i of `from` goes to rank i.
    [[nodiscard]] Work all_to_all(Tensor to, Tensor from, Where where = Where::current()) const;
    // Slices of unequal size, one for each rank, in rank order and in elements: slice i of `from` has sent[i], slice i
    // of `to` has received[i], which is what rank i sends to this one. Any of them may be 0, and a tensor may have no
    // elements at all. With --all-reduce by hand, pairwise_all_to_all (all_reduce.h).
    [[nodiscard]] Work all_to_all(Tensor to, std::vector<int64_t> received, Tensor from, std::vector<int64_t> sent,
                                  Where where = Where::current()) const;
    // Messages, matched as MPI does: those from one rank to another arrive in the order of their sends, whatever either
    // does in between. With nccl they are therefore copied through host memory and sent by MPI (backend_nccl.cu).
    [[nodiscard]] Work send(Tensor x, int to, Where where = Where::current()) const;
    [[nodiscard]] Work recv(Tensor x, int from, Where where = Where::current()) const;
    [[nodiscard]] Work send_recv(Tensor out, int to, Tensor in, int from, Where where = Where::current()) const;
    // Sends `out` to rank() + by and receives `in` from rank() - by. Collective. The transfer is in progress when the
    // call returns, so computation until wait() overlaps it. Booked as send_recv.
    [[nodiscard]] Work ring_shift(Tensor out, Tensor in, int by = 1, Where where = Where::current()) const;
    // True (nccl): the device runs the ring shifts of this group in the order of the calls. A shift may then send what
    // an earlier one receives, or receive into what an earlier one sends, without a wait() between the two calls.
    bool shifts_in_order() const;
    // sum += received, then ring_shift(sum, received). If shifts_in_order(), `received` may be what the shift before
    // receives: the addition runs on a side stream behind that shift, and the compute stream waits for neither.
    [[nodiscard]] Work add_and_shift(Tensor sum, Tensor received, Where where = Where::current()) const;
    [[nodiscard]] Work barrier(Where where = Where::current()) const;

    // Host numbers; these block.
    std::vector<double> sum(const std::vector<double>& x, Where where = Where::current()) const;  // of each
    double sum(double x, Where where = Where::current()) const;
    double max(double x, Where where = Where::current()) const;
    std::vector<double> gather(const std::vector<double>& local, Where where = Where::current()) const;  // rank order

    // What all groups of this rank have booked since the last call. Blocks until operations that have been waited for
    // have completed on the device.
    CommStats take_stats() const;
    // Selects an algorithm of all_reduce.h for all groups of this rank from the next call on; returns the previous one.
    // Usage error for an unknown name.
    std::string use(const std::string& all_reduce) const;
    // Launches what nobody waited for; with --comm-check, verifies that no rank has further calls to make.
    void finish() const;

    struct Shared;
    struct Group;
    explicit Comm(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  private:
    Work start(Operation operation) const;
    Operation shift_operation(const Tensor& out, const Tensor& in, int by, Where where) const;
    std::vector<double> numbers(const std::vector<double>& local, int64_t wire_bytes, Where where) const;

    std::shared_ptr<Group> group_;
};

struct CommSettings {
    std::string all_reduce = "library";  // a name of all_reduce.h
    bool check = false;                  // before each collective the ranks compare what they are about to do
    int64_t ranks_per_node = 0;
};
Comm make_comm(std::unique_ptr<Backend> backend, const CommSettings& settings);  // group "world"

}  // namespace train70b
