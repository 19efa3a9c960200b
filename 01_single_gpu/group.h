#pragma once
// The ranks of one axis of a layout, as the trainer sees them. Here: one rank. From chapter 02 on a Comm stands behind it
// (02_data_parallel/runtime/comm_roles.h).
#include <memory>
#include <vector>

#include "01_single_gpu/ops/ops.h"

namespace train70b {

class Group {
  public:
    virtual ~Group() = default;
    virtual int rank() const { return 0; }
    virtual int size() const { return 1; }

    // Collective over the group's ranks. Numbers of the host, in rank order; equally many on every rank.
    virtual double sum(double x) const { return x; }
    virtual std::vector<double> gather(const std::vector<double>& mine) const { return mine; }
    // Tensors: sums in place; `full` holds the ranks' parts one behind another, in rank order.
    virtual void sum(Tensor) const {}
    virtual void all_gather(Tensor full, const Tensor& part) const { copy(full, part); }
    // Between two different ranks of the group, so never called on one.
    virtual void send(const Tensor&, int to) const { CHECK(false, "rank {} of 1", to); }
    virtual void recv(Tensor, int from) const { CHECK(false, "rank {} of 1", from); }
};
using GroupPtr = std::shared_ptr<const Group>;
inline GroupPtr one_rank() { return std::make_shared<Group>(); }

// Only where this rank stands on an axis along which nothing is communicated.
class Coordinate : public Group {
  public:
    Coordinate(int64_t rank, int64_t size) : rank_(int(rank)), size_(int(size)) {}
    int rank() const override { return rank_; }
    int size() const override { return size_; }

  private:
    int rank_, size_;
};

}  // namespace train70b
