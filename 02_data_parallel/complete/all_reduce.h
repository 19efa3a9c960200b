#pragma once
// All-reduce written by hand, from sends and receives only: x on every rank becomes the sum of all ranks' x.
//
// N ranks, n bytes of x. A message of m bytes takes a + m b seconds: a is the latency, b the seconds per byte.
//                                                     time                          bytes that a rank sends
//   naive      all to rank 0, and back                2 (N-1) (a + n b)             rank 0: n (N-1), the others n
//   ring       reduce-scatter, then all-gather        2 (N-1) a + 2 n b (N-1)/N     2 n (N-1)/N, the minimum
//   pipelined  the ring in pieces: one piece is added while the next is in transfer; the same bytes
//   halving    recursive halving, then doubling       2 log2(N) a + 2 n b (N-1)/N   2 n (N-1)/N for N = 2^k
// Two more know the nodes: across_nodes.h.
//
// Every element is summed at one place and copied from there, so all ranks end with the same bits. The order of the sum
// depends on the algorithm, on N, on the position of the element and, of two, on the nodes, never on timing: runs are
// reproducible bit for bit, and two layouts differ in the last bits. In bf16 each hop adds in fp32 and rounds its
// result: N-1 roundings on a ring, log2(N) with halving.
//
// x is flat and reduced in place: any number of elements, even fewer than ranks; CPU and CUDA; fp64, fp32 and bf16.
#include "02_data_parallel/runtime/backend.h"

namespace train70b {

// One value of --all-reduce. To add an algorithm, write its function and add it to the list in all_reduce.cpp: the
// flag, Comm, the tests, the tables and the plots iterate over that list.
struct AllReduceAlgorithm {
    using Function = void (*)(Backend& peers, const Tensor& x);

    std::string name, description;
    Function all_reduce = nullptr;      // nullptr: MPI's or NCCL's own
    Function reduce_scatter = nullptr;  // the same; leaves the sum where ring_reduce_scatter does
    Function all_gather = nullptr;      // the same; part rank() of x is there
};
const std::vector<AllReduceAlgorithm>& all_reduce_algorithms();      // library first
const AllReduceAlgorithm& find_all_reduce(const std::string& name);  // usage error for an unknown name
std::vector<std::string> all_reduce_names();

// Some ranks of a group, numbered from 0 on; this rank is one of them.
class Peers {
  public:
    Peers(Backend& group);  // all of them
    Peers(Backend& group, std::vector<int> ranks);
    int rank() const { return rank_; }
    int size() const { return int(ranks_.size()); }
    RequestPtr exchange(const Tensor& out, int to, const Tensor& in, int from) const;
    Tensor scratch(int64_t count, DType dtype, Device device, size_t number) const;

  private:
    Backend& group_;
    std::vector<int> ranks_;
    int rank_;
};

// Segment i (mod N) of the N = `ranks` segments of x.
Tensor segment(const Tensor& x, int i, int ranks);
void receive(const Peers& peers, const Tensor& x, int from);  // returns when x is there
void add_to(Tensor x, const Tensor& other);

void naive_all_reduce(Backend& peers, const Tensor& x);
void ring_all_reduce(const Peers& peers, const Tensor& x);
// piece_bytes: minimum message size in bytes, where x is large enough.
void pipelined_ring_all_reduce(Backend& peers, const Tensor& x, int64_t piece_bytes);
void halving_doubling_all_reduce(Backend& peers, const Tensor& x);

// The two halves of the ring. Segment i of n elements is [n i / N, n (i+1) / N). After the first, segment rank() of x
// holds the sum and the rest holds partial sums; given that, after the second all of x holds the sum.
void ring_reduce_scatter(const Peers& peers, const Tensor& x);
void ring_all_gather(const Peers& peers, const Tensor& x);

// All-to-all by the same means: what stands in from[i] goes to rank i, and into to[i] what rank i sends. The sizes may
// differ and be 0. Any dtype; nothing is added.
void pairwise_all_to_all(Backend& peers, const std::vector<Tensor>& to, const std::vector<Tensor>& from);

}  // namespace train70b
