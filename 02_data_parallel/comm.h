#pragma once
// Comm: the ranks of one group and everything they do together. All that is distributed in this course stands on it.
//
// N ranks, n bytes of the whole tensor. A call books the bytes that a rank sends where they are moved with as few as
// possible (Patarasuk & Yuan 2009), whatever algorithm ran:
//   all_reduce 2 n (N-1)/N      all_gather, reduce_scatter, all_to_all, broadcast n (N-1)/N      send, send_recv n
// under "group.operation", as in "dp.all_reduce"; numbers of the host under "group.scalar". (N-1)/N is applied to the
// sum of all calls and rounded down, so what divides as a whole is exact even when its pieces do not.
//
// Every operation returns a Work; until its wait() returns, the tensors belong to the operation. To block, wait at once:
// world.all_reduce(x).wait(). All ranks of a group must call its collectives in the same order: calls are matched by
// order alone.
#include <map>
#include <source_location>

#include "02_data_parallel/runtime/transport.h"

namespace train70b {

enum class AllReduce { naive, ring, pipelined, halving, library };  // see all_reduce.h; library: MPI's or NCCL's own
AllReduce all_reduce_of(const std::string& name);
const char* name_of(AllReduce algorithm);

struct CommStats {
    struct Entry {
        int64_t calls = 0, bytes = 0;
        double seconds = 0;
    };
    std::map<std::string, Entry> operations;  // "group.operation"
    double waited = 0;                        // seconds in which this rank's own work stood still
};

class Work {
  public:
    Work() = default;  // nothing to wait for
    void wait();       // a second call does nothing
    bool done();       // without waiting: whether it has ended; then the tensors are let go, as after wait()
    bool pending() const { return state_ != nullptr; }

    struct State;

  private:
    explicit Work(std::shared_ptr<State> state) : state_(std::move(state)) {}
    std::shared_ptr<State> state_;
    friend class Comm;
};

// A handle: copies are the same group.
class Comm {
  public:
    using Where = std::source_location;  // of the call, for reports

    Comm() = default;  // one rank, alone
    int rank() const;
    int size() const;
    const std::string& name() const;
    const char* transport() const;
    bool has_peers() const;  // false: one rank of a world that is not there (fake)

    // The ranks whose colour is this rank's, in their order, as a group of that name (a negative colour: of none, and
    // this rank is alone). Collective; colour_of is the same function on every rank (a layout is a function of the
    // rank, so that also a world that is not there can be split).
    Comm split(const std::function<int(int rank)>& colour_of, const std::string& name,
               Where where = Where::current()) const;

    // A dedicated point-to-point channel from one rank to another, as a group of the two: sends are asynchronous and
    // never block other traffic. Collective.
    Comm p2p_channel(int from, int to, Where where = Where::current()) const;

    [[nodiscard]] Work all_reduce(Tensor x, Reduce reduce = Reduce::sum, Where where = Where::current()) const;
    // The sum; part: the rank-th of whole.
    [[nodiscard]] Work reduce_scatter(Tensor part, Tensor whole, Where where = Where::current()) const;
    [[nodiscard]] Work all_gather(Tensor whole, Tensor part, Where where = Where::current()) const;
    [[nodiscard]] Work broadcast(Tensor x, int root, Where where = Where::current()) const;
    // The i-th part of from goes to rank i.
    [[nodiscard]] Work all_to_all(Tensor to, Tensor from, Where where = Where::current()) const;
    [[nodiscard]] Work send(Tensor x, int to, Where where = Where::current()) const;
    [[nodiscard]] Work recv(Tensor x, int from, Where where = Where::current()) const;
    [[nodiscard]] Work send_recv(Tensor out, int to, Tensor in, int from, Where where = Where::current()) const;
    // All ranks together: out goes to rank + by, in comes from rank - by. The transfer is in progress when the call
    // returns, which send_recv does not promise on a stream: computation until wait() overlaps it. Booked as send_recv.
    [[nodiscard]] Work ring_shift(Tensor out, Tensor in, int by = 1, Where where = Where::current()) const;
    [[nodiscard]] Work barrier(Where where = Where::current()) const;

    // Numbers of the host.
    double sum(double x, Where where = Where::current()) const;
    double max(double x, Where where = Where::current()) const;
    std::vector<double> gather(const std::vector<double>& mine, Where where = Where::current()) const;  // rank order

    // What all groups of this rank have booked since the last call. Waits for what has been waited for on a
    // device to end there.
    CommStats take_stats() const;
    AllReduce use(AllReduce algorithm) const;  // for all groups of this rank, from the next call on; returns the last
    void finish() const;  // runs what nobody waited for; with --comm-check: no rank has more to say

    struct Call;
    struct Engine;
    struct Group;
    explicit Comm(std::shared_ptr<Group> group) : group_(std::move(group)) {}

  private:
    Work start(Call call) const;
    std::vector<double> numbers(const std::vector<double>& mine, int64_t wire_bytes, Where where) const;

    std::shared_ptr<Group> group_;
};

struct CommSettings {
    AllReduce all_reduce = AllReduce::library;
    bool check = false;  // before every collective the ranks compare what they are about to do
};
Comm make_comm(std::unique_ptr<Transport> transport, const CommSettings& settings);  // group "world"

}  // namespace train70b
