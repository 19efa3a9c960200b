#pragma once
// A backend moves bytes between the ranks of one group. Comm (comm.h) uses one of four:
//   mpi     host tensors: plain MPI, called from one thread only
//   staged  device tensors, copied through pinned host memory and sent by MPI: several ranks may share one GPU
//   nccl    device tensors, one GPU per rank, on communication streams; messages as staged does
//   fake    a simulated process group: one rank of N, with every peer assumed to hold a copy of this rank's data
#include <functional>
#include <string>
#include <vector>

#include "01_single_gpu/core/tensor.h"
#include "02_data_parallel/runtime/request.h"

namespace train70b {

// What a group carries, and so how many multiprocessors NCCL's kernels get: tensors of every layer or of all gradients;
// little or rarely; only while no other group is in use; the messages of one p2p channel.
enum class GroupLoad { heavy, light, alone, channel };

class Backend {
  public:
    virtual ~Backend() = default;
    virtual const char* name() const = 0;
    virtual int rank() const = 0;
    virtual int size() const = 0;
    virtual bool has_peers() const { return true; }                                   // false: fake
    int64_t ranks_per_node = 0;                                                       // --ranks-per-node
    virtual std::vector<int> nodes() { return std::vector<int>(size_t(size()), 0); }  // of the ranks. Collective
    // colors[r] is the color of rank r, the same list on every rank. Ranks of one color form a group, in rank order.
    // A negative color joins no group: the result is nullptr.
    virtual std::unique_ptr<Backend> split(const std::vector<int>& colors, GroupLoad load) const = 0;

    // True: collectives are issued to a stream, in order, and the host does not wait. False: a collective has completed
    // when its call returns, so WorkQueue (work_queue.h) decides when to call it.
    virtual bool on_stream() const { return false; }
    // Runs `body` (local ops and exchanges) on a stream other than the compute stream, if there are streams.
    virtual RequestPtr on_side_stream(const std::function<void()>& body) {
        body();
        return nullptr;
    }

    // Sends `out` to rank `to` while receiving `in` from rank `from`; either tensor may be empty. A ring needs both in
    // one call: two ranks that both block in a send wait for each other forever.
    virtual RequestPtr exchange(const Tensor& out, int to, const Tensor& in, int from, Tag tag = Tag::algorithm) = 0;

    // Collective over the two ranks of a new point-to-point channel (Comm::p2p_channel): after it, no send waits for
    // the receiver's call.
    virtual void open_channel([[maybe_unused]] int from, [[maybe_unused]] int to) {}

    // The library's own collectives; whole.size() = part.size() * size(). Reductions take fp64, fp32, bf16 (summed in
    // fp32, then rounded) and i32, the others any dtype.
    virtual RequestPtr all_reduce(const Tensor& x, Reduce reduce) = 0;
    // `part` may be its slice of `whole`; the rest of `whole` is then undefined.
    virtual RequestPtr reduce_scatter(const Tensor& part, const Tensor& whole) = 0;
    virtual RequestPtr all_gather(const Tensor& whole, const Tensor& part) = 0;
    virtual RequestPtr broadcast(const Tensor& x, int root) = 0;
    virtual RequestPtr all_to_all(const Tensor& to, const Tensor& from);  // here: all_to_all_v of equal slices
    // to[i] is received from rank i, from[i] sent to it; any may have no elements. Here: all messages at once. No
    // MPI_Alltoallv: its counts are ints, and whether those of all ranks fit only another collective could tell.
    virtual RequestPtr all_to_all_v(const std::vector<Tensor>& to, const std::vector<Tensor>& from);
    virtual void barrier() = 0;

    // Host values (losses, norms, tables), in rank order; these block. Every rank passes equally many numbers.
    virtual std::vector<double> gather(const std::vector<double>& local) = 0;
    virtual std::vector<std::string> gather_text(const std::string& local) = 0;

    // A buffer of at least `count` elements; `number` tells several apart. The backend keeps it for later calls, which
    // may replace it by a larger one: all uses of this one must then have completed or precede, on a stream, what is
    // issued to it. So growth never waits for the device, where a kernel may wait for a later message.
    Tensor scratch(int64_t count, DType dtype, Device device, size_t number = 0);
    virtual void synchronize() {}  // returns when all issued through this backend is done, but messages of channels

  private:
    std::vector<Tensor> scratch_;
};

std::unique_ptr<Backend> make_mpi_backend();  // all ranks
std::unique_ptr<Backend> make_fake_backend(int rank, int size);
// In builds with CUDA only.
std::unique_ptr<Backend> make_staged_backend();
enum class CommStreams { group, one };  // --comm-streams: a stream for each group, or one for all
std::unique_ptr<Backend> make_nccl_backend(CommStreams streams);
std::string nccl_text(CommStreams& streams);  // NCCL's version and limits, in lines; with an old one: one stream

}  // namespace train70b
