#pragma once
// The tcp backend: ranks of several programs, each under an mpirun of its own, since MPI ends all ranks when one dies.
//
// A peer that dies, or is silent for the timeout, does not end this rank. The failure is kept, all connections are
// closed, so that the others learn of it, and until connect() is called again nothing is sent or received: what was
// computed meanwhile is no sum. Ask failure() before it is used.
#include <stdexcept>
#include <utility>

#include "02_data_parallel/runtime/backend.h"

namespace train70b {

using Socket = std::shared_ptr<const int>;  // a file descriptor, which the last copy closes
// To "HOST:PORT". Throws std::runtime_error, in one line, if nobody answers for so many seconds; recv() then waits for
// as long as that machine is on.
Socket connect_to(const std::string& address, double seconds);

class TcpBackend : public Backend {
  public:
    // Listens, on the interface that leads to this HOST:PORT.
    TcpBackend(const std::string& towards, double timeout);

    const std::string& address() const { return address_; }  // HOST:PORT, where the others find this rank
    // Leaves all peers and meets these, of whom this rank is number `rank`. generation: the same for all of them, and
    // higher than in the call before.
    void connect(const std::vector<std::string>& addresses, int rank, int64_t generation);
    const std::string& failure() const { return failure_; }           // empty: none
    int64_t take_sent() { return std::exchange(sent_, int64_t(0)); }  // bytes, since the last call

    const char* name() const override { return "tcp"; }
    int rank() const override { return rank_; }
    int size() const override { return int(peers_.size()); }
    // Blocks, as all calls do.
    RequestPtr exchange(const Tensor& out, int to, const Tensor& in, int from, Tag tag = Tag::algorithm) override;
    RequestPtr all_reduce(const Tensor& x, Reduce reduce) override;  // a ring; sums only
    // Nobody needs them.
    std::unique_ptr<Backend> split(const std::vector<int>&, GroupLoad) const override { none(); }
    RequestPtr reduce_scatter(const Tensor&, const Tensor&) override { none(); }
    RequestPtr all_gather(const Tensor&, const Tensor&) override { none(); }
    RequestPtr broadcast(const Tensor&, int) override { none(); }
    void barrier() override { none(); }
    std::vector<double> gather(const std::vector<double>&) override { none(); }
    std::vector<std::string> gather_text(const std::string&) override { none(); }

  private:
    [[noreturn]] static void none() { throw std::logic_error("not over TCP"); }
    void fail(const std::string& why);

    const double timeout_;
    Socket listener_;
    std::string address_, failure_;
    int rank_ = 0;
    std::vector<Socket> peers_ = std::vector<Socket>(1);
    int64_t sent_ = 0;
};

}  // namespace train70b
