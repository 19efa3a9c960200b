#pragma once
// What moves bytes between the ranks of one group. Four of them stand behind Comm (comm.h):
//   mpi     host tensors: plain MPI, called from one thread only
//   staged  device tensors, through pinned host memory and MPI: several ranks may share one GPU
//   nccl    device tensors, on a stream of their own
//   fake    one rank of a world that is not there: every peer is taken to hold a copy of this rank's data
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "01_single_gpu/core/tensor.h"

namespace train70b {

enum class Reduce { sum, max };

// An operation under way.
class Started {
  public:
    virtual ~Started() = default;
    virtual void wait() = 0;                    // whatever is issued from here on sees the result
    virtual bool test() { return finished(); }  // whether it has ended; on the rank's own thread, and may help it along
    virtual bool begun() { return true; }       // these two are asked on a thread of the watchdog's
    virtual bool finished() { return false; }

    struct Times {
        double busy = 0, stalled = 0;  // seconds: of the operation; that the compute stream stood still for it
    };
    // Once it has ended, and waiting for that. Empty: the host did the work, and the host's clock has counted it.
    virtual std::optional<Times> times() { return {}; }
};
using Handle = std::shared_ptr<Started>;  // nullptr: it has already happened

class Transport {
  public:
    virtual ~Transport() = default;
    virtual const char* name() const = 0;
    virtual int rank() const = 0;
    virtual int size() const = 0;
    // colours[r]: of rank r, the same list on every rank. Ranks of one colour form a group, in their order; a negative
    // colour is of no group, and nullptr comes back.
    virtual std::unique_ptr<Transport> split(const std::vector<int>& colours) const = 0;

    virtual bool has_peers() const { return true; }  // false: fake
    // True: operations are issued to a stream, in order, and the host goes on. False: a collective has happened when
    // its call returns, so Comm decides when to call it.
    virtual bool on_stream() const { return false; }
    // Runs `body` (local ops and exchanges) where it does not hold up the compute stream, if there is such a place.
    virtual Handle aside(const std::function<void()>& body) = 0;

    // Sends `out` to rank `to` while receiving `in` from rank `from`; either tensor may be empty. Needed with both by
    // every ring: two blocking sends that meet wait for each other for ever. Between two ranks, messages of one channel
    // arrive in the order of their sends.
    enum class Channel { algorithm, user, shift, link };
    virtual Handle exchange(const Tensor& out, int to, const Tensor& in, int from,
                            Channel channel = Channel::algorithm) = 0;

    // The library's own collectives. Reductions: fp32, bf16 (each hop's sum in fp32, then rounded), i32; all others:
    // any dtype. Sizes: whole = part x size().
    virtual Handle all_reduce(const Tensor& x, Reduce reduce) = 0;
    virtual Handle reduce_scatter(const Tensor& part,
                                  const Tensor& whole) = 0;                  // part may be its place in whole, whose
    virtual Handle all_gather(const Tensor& whole, const Tensor& part) = 0;  // rest is then undefined
    virtual Handle broadcast(const Tensor& x, int root) = 0;
    virtual Handle all_to_all(const Tensor& to, const Tensor& from) = 0;
    virtual void barrier() = 0;

    // Numbers of the host, at once and in rank order: losses, norms, tables.
    virtual std::vector<double> gather(const std::vector<double>& mine) = 0;  // equally many on every rank
    virtual std::vector<std::string> gather_text(const std::string& mine) = 0;

    // A buffer that lives as long as the transport, of at least `count` elements; `number` tells several apart.
    Tensor scratch(int64_t count, DType dtype, Device device, size_t number = 0);
    virtual void synchronize() {}  // until no operation uses a scratch buffer any more

  private:
    std::vector<Tensor> scratch_;
};

std::unique_ptr<Transport> make_mpi_transport();  // of all ranks
std::unique_ptr<Transport> make_fake_transport(int rank, int size);
// Of builds with CUDA only.
std::unique_ptr<Transport> make_staged_transport();
std::unique_ptr<Transport> make_nccl_transport();

}  // namespace train70b
