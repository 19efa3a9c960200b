#pragma once
// The ranks along one axis of the parallel layout, as the trainer sees them. This class is a group of one rank; chapter
// 02 implements the role with a Comm.
#include <memory>
#include <vector>

#include "01_single_gpu/ops/ops.h"

namespace train70b {

class Group {
  public:
    virtual ~Group() = default;
    virtual int rank() const { return 0; }
    virtual int size() const { return 1; }

    // Collective over the group. Host numbers, gathered in rank order; every rank passes the same count.
    virtual std::vector<double> sum(const std::vector<double>& x) const { return x; }
    double sum(double x) const { return sum(std::vector<double>{x})[0]; }
    virtual std::vector<double> gather(const std::vector<double>& local) const { return local; }
    // Tensors: `sum_tensor` is in place; `full` receives the ranks' parts concatenated in rank order.
    virtual void sum_tensor(Tensor) const {}
    virtual void all_gather(Tensor full, const Tensor& part) const { copy(full, part); }
    // Between two different ranks of the group, so a group of one never calls them.
    virtual void send(const Tensor&, int to) const { CHECK(false, "rank {} of 1", to); }
    virtual void recv(Tensor, int from) const { CHECK(false, "rank {} of 1", from); }
};
using GroupPtr = std::shared_ptr<const Group>;
inline GroupPtr one_rank() { return std::make_shared<Group>(); }

// This rank's coordinate on an axis along which nothing is communicated.
class Coordinate : public Group {
  public:
    Coordinate(int64_t rank, int64_t size) : rank_(int(rank)), size_(int(size)) {}
    int rank() const override { return rank_; }
    int size() const override { return size_; }

  private:
    int rank_, size_;
};

}  // namespace train70b
