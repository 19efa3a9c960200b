// The nccl backend: device tensors, one GPU per rank, on communication streams.
//
// Events order them against everything else, and the host never waits: before an operation its stream waits for the
// issuing stream; wait() makes the current stream wait for the operation. The issuing stream is the compute stream, or,
// in an all-reduce written by hand, the side stream on which its additions run. Comm::add_and_shift adds there, too.
//
// Every group has a stream (--comm-streams group), or that of the group that it is a part of (ctas.h): ZeRO's gather of
// the next unit may take a millisecond between nodes, and tensor parallelism's all-reduce, for which the computation
// waits, need not wait for it. Their kernels then run at the same time, and those that wait for each other must all
// find room on the GPU. Three things see to that:
//   - NCCL_LAUNCH_ORDER_IMPLICIT (environment.h): NCCL starts the kernels of all communicators in the order of their
//     calls, which is the same on all ranks. Without it, and before NCCL 2.26, the device may start them in any order.
//   - maxCTAs: a block of NCCL takes a multiprocessor of its own, and NCCL's own choice is up to 32 of them for each
//     communicator. Here a group gets a number by what it carries (ctas_of). A channel gets few: its next receive is
//     posted early and then waits on its multiprocessors for as long as the sender computes.
//   - their sum over the open communicators leaves kSmsOfOthers multiprocessors free, or the run ends with a message.
// With --comm-streams one the collectives of all groups run one after another.
//
// A group of one rank has no communicator. Others have one of their own, from ncclCommInitRankConfig: communicators
// that ncclCommSplit makes with splitShare would save memory, but NCCL then runs their kernels one after another, and a
// channel that waits for a message would hold up the collectives that the message's sender waits for.
//
// Messages (Comm::send and recv) do not go through NCCL but through host memory and MPI, as in the staged backend. NCCL
// matches the sends and receives of a communicator by their order alone, and each blocks its stream until the peer is
// there. Two ranks that send before they receive would deadlock; so would a rank that sends, all-reduces and waits,
// while its peer receives before the all-reduce. To run in any order, as MPI's do, every pair of ranks would need two
// communicators and two streams: that is what a p2p channel is, for one direction. Other messages are rare (a parameter
// on its way to a file), so host memory is fast enough for them.
#include <nccl.h>

#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "01_single_gpu/core/cuda.cuh"
#include "01_single_gpu/ops/elementwise.h"
#include "02_data_parallel/runtime/backend_over_mpi.h"
#include "02_data_parallel/runtime/ctas.h"

#define NCCL_CHECK(call)                                                                                         \
    do {                                                                                                         \
        const ncclResult_t nccl_status = (call);                                                                 \
        CHECK(nccl_status == ncclSuccess, "{}: {}", ncclGetErrorString(nccl_status), ncclGetLastError(nullptr)); \
    } while (0)

namespace train70b {

namespace {

class Event {
  public:
    explicit Event(cudaStream_t stream) {
        CUDA_CHECK(cudaEventCreate(&event_));
        CUDA_CHECK(cudaEventRecord(event_, stream));
    }
    ~Event() { cudaEventDestroy(event_); }
    Event(const Event&) = delete;

    // Work issued to `stream` from here on runs after this event.
    void block(cudaStream_t stream) const { CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0)); }
    // Also from the watchdog's thread, which a stream capture in cudaStreamCaptureModeGlobal would forbid: with CUDA
    // graphs, capture in thread-local mode.
    cudaError_t query() const { return cudaEventQuery(event_); }
    void synchronize() const { CUDA_CHECK(cudaEventSynchronize(event_)); }
    double seconds_since(const Event& earlier) const {
        float milliseconds = 0;
        CUDA_CHECK(cudaEventElapsedTime(&milliseconds, earlier.event_, event_));
        return 1e-3 * milliseconds;
    }

  private:
    cudaEvent_t event_ = nullptr;
};

// The open communicators of this rank. Where NCCL finds an error only after a call has returned (a peer that died, a
// broken network), its kernel never ends; the watchdog's thread asks here.
class OpenCommunicators {
  public:
    void add(ncclComm_t comm) {
        const std::lock_guard lock(mutex_);
        comms_.insert(comm);
    }
    void remove(ncclComm_t comm) {
        const std::lock_guard lock(mutex_);
        comms_.erase(comm);
    }
    std::string failure() {
        const std::lock_guard lock(mutex_);
        for (const ncclComm_t comm : comms_) {
            ncclResult_t error = ncclSuccess;
            const ncclResult_t status = ncclCommGetAsyncError(comm, &error);
            if (status != ncclSuccess) error = status;
            if (error != ncclSuccess && error != ncclInProgress)
                return describe("NCCL: {}: {}", ncclGetErrorString(error), ncclGetLastError(comm));
        }
        return {};
    }

  private:
    std::mutex mutex_;
    std::set<ncclComm_t> comms_;
};
OpenCommunicators& open_communicators() {
    static auto* instance = new OpenCommunicators();  // never destroyed: the watchdog may still ask
    return *instance;
}

// What `issue` issues to `stream`, after everything issued so far to the stream that is current at construction. At
// wait() the stream that is then current waits for it.
class OnStream : public Request {
  public:
    OnStream(cudaStream_t stream, const std::function<void()>& issue) : ready_(cuda::stream()) {
        CUDA_CHECK(cudaGetDevice(&device_));
        ready_.block(stream);
        begin_.emplace(stream);
        issue();
        end_.emplace(stream);
    }
    void wait() override {
        if (before_wait_) return;
        before_wait_.emplace(cuda::stream());
        end_->block(cuda::stream());
        after_wait_.emplace(cuda::stream());
    }
    bool on_stream() const override { return true; }
    bool started() override { return on_device() && begin_->query() == cudaSuccess; }
    bool finished() override { return on_device() && end_->query() == cudaSuccess; }
    std::string failure() override {
        if (!on_device()) return {};
        const cudaError_t status = end_->query();
        if (status != cudaSuccess && status != cudaErrorNotReady)
            return describe("CUDA: {}", cudaGetErrorString(status));
        return open_communicators().failure();
    }
    std::optional<Times> times() override {
        if (!after_wait_) return {};
        after_wait_->synchronize();
        return Times{end_->seconds_since(*begin_), after_wait_->seconds_since(*before_wait_)};
    }

  private:
    bool on_device() const {  // the watchdog's thread has not selected a device yet
        static thread_local const cudaError_t chosen = cudaSetDevice(device_);
        return chosen == cudaSuccess;
    }

    int device_ = 0;
    Event ready_;
    std::optional<Event> begin_, end_, before_wait_, after_wait_;
};

// For reductions; what only moves bytes goes as ncclUint8.
ncclDataType_t nccl_type(DType dtype) {
    switch (dtype) {
        case DType::f64: return ncclFloat64;
        case DType::f32: return ncclFloat32;
        case DType::bf16: return ncclBfloat16;
        case DType::i32: return ncclInt32;
        default: CHECK(false, "no reduction of {}", name_of(dtype)); return ncclFloat32;
    }
}

cudaStream_t new_stream() {
    int least = 0, greatest = 0;
    cudaStream_t stream = nullptr;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
    return stream;
}
struct Lane {  // groups whose collectives run one after another
    const cudaStream_t stream = new_stream();
    ~Lane() { cudaStreamDestroy(stream); }
};
std::shared_ptr<Lane> lane_of_all_groups() {
    static auto* lane = new std::shared_ptr<Lane>(std::make_shared<Lane>());
    return *lane;
}
cudaStream_t side_stream_of_all_groups() {
    static const cudaStream_t stream = new_stream();
    return stream;
}

constexpr int kSmsOfOthers = 8;  // multiprocessors on which at least computation goes on

class NcclBackend : public BackendOverMpi {
  public:
    NcclBackend(MPI_Comm comm, CommStreams streams, GroupLoad load, const NcclBackend* parent)
        : BackendOverMpi(comm), streams_(streams), is_world_(!parent) {
        cuda::stream();           // creates the device's context
        if (size() == 1) return;  // Comm copies; host numbers go through MPI
        if (streams == CommStreams::one && load != GroupLoad::channel)
            lane_ = lane_of_all_groups();
        else
            lane_ = has_own_lane(!parent || parent->is_world_, load) ? std::make_shared<Lane>() : parent->lane_;
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.maxCTAs = ctas_of(load);
        share_.emplace(config.maxCTAs, lane_.get());
        const int all = CtaShare::sum(), sms = cuda_info().multiprocessors;
        CHECK(all <= sms - kSmsOfOthers,
              "NCCL's kernels could take {} of the GPU's {} multiprocessors, {} too many (try --comm-streams one, or a "
              "lower NCCL_MAX_CTAS in every rank's environment)",
              all, sms, all - (sms - kSmsOfOthers));
        ncclUniqueId id{};
        if (rank() == 0) NCCL_CHECK(ncclGetUniqueId(&id));
        group_.broadcast(&id, sizeof id, 0);
        NCCL_CHECK(ncclCommInitRankConfig(&comm_, size(), id, rank(), &config));
        open_communicators().add(comm_);
    }
    ~NcclBackend() override {
        if (!comm_) return;
        open_communicators().remove(comm_);
        if (std::uncaught_exceptions() > 0) return;
        synchronize();  // the scratch buffers are freed with this backend
        ncclCommDestroy(comm_);
        if (own_side_stream_) cudaStreamDestroy(own_side_stream_);
    }
    const char* name() const override { return "nccl"; }
    std::unique_ptr<Backend> same_kind(MPI_Comm comm, GroupLoad load) const override {
        return std::make_unique<NcclBackend>(comm, streams_, load, this);
    }

    bool on_stream() const override { return true; }
    // Behind the group's earlier operations, and its later ones behind it.
    RequestPtr on_side_stream(const std::function<void()>& body) override {
        const cudaStream_t side = side_stream();
        return std::make_shared<OnStream>(side, [&] {
            Event(stream()).block(side);
            const CudaStreamScope scope(side);
            body();
            Event(side).block(stream());
        });
    }
    RequestPtr exchange(const Tensor& out, int to, const Tensor& in, int from, Tag tag) override {
        if (tag == Tag::user) return staged_exchange(group_, out, to, in, from, tag);
        const auto operation = [&](cudaStream_t stream) {
            NCCL_CHECK(ncclGroupStart());
            if (out && out.size() > 0) NCCL_CHECK(ncclSend(out.raw(), out.bytes(), ncclUint8, to, comm_, stream));
            if (in && in.size() > 0) NCCL_CHECK(ncclRecv(in.raw(), in.bytes(), ncclUint8, from, comm_, stream));
            NCCL_CHECK(ncclGroupEnd());
        };
        return issue(operation);
    }
    // NCCL connects two ranks at their first message, and the first to call blocks its host until the other does.
    // Collectives are connected from the start (NCCL_RUNTIME_CONNECT), and ring_shift needs nothing of the kind here:
    // all ranks of its group make the same calls, and all ranks of the program call their groups in one order.
    void open_channel(int from, int to) override {
        Tensor message({1}, DType::u8, Device::cuda, Memory::comm);
        fill(message, 0);
        exchange(rank() == from ? message : Tensor(), to, rank() == to ? message : Tensor(), from, Tag::p2p_channel)
            ->wait();
    }
    RequestPtr all_reduce(const Tensor& x, Reduce reduce) override {
        return issue([&](cudaStream_t stream) {
            NCCL_CHECK(ncclAllReduce(x.raw(), x.raw(), x.size(), nccl_type(x.dtype()),
                                     reduce == Reduce::sum ? ncclSum : ncclMax, comm_, stream));
        });
    }
    RequestPtr reduce_scatter(const Tensor& part, const Tensor& whole) override {
        return issue([&](cudaStream_t stream) {
            NCCL_CHECK(ncclReduceScatter(whole.raw(), part.raw(), part.size(), nccl_type(part.dtype()), ncclSum, comm_,
                                         stream));
        });
    }
    RequestPtr all_gather(const Tensor& whole, const Tensor& part) override {
        return issue([&](cudaStream_t stream) {
            NCCL_CHECK(ncclAllGather(part.raw(), whole.raw(), part.bytes(), ncclUint8, comm_, stream));
        });
    }
    RequestPtr broadcast(const Tensor& x, int root) override {
        return issue([&](cudaStream_t stream) {
            NCCL_CHECK(ncclBroadcast(x.raw(), x.raw(), x.bytes(), ncclUint8, root, comm_, stream));
        });
    }
    RequestPtr all_to_all_v(const std::vector<Tensor>& to, const std::vector<Tensor>& from) override {
        return issue([&](cudaStream_t stream) {
            NCCL_CHECK(ncclGroupStart());
            for (int peer = 0; peer < size(); ++peer) {
                const Tensor &in = to[size_t(peer)], &out = from[size_t(peer)];
                if (out.size() > 0) NCCL_CHECK(ncclSend(out.raw(), out.bytes(), ncclUint8, peer, comm_, stream));
                if (in.size() > 0) NCCL_CHECK(ncclRecv(in.raw(), in.bytes(), ncclUint8, peer, comm_, stream));
            }
            NCCL_CHECK(ncclGroupEnd());
        });
    }
    // Not the whole device: on a channel a receive may be waiting for what its sender sends after this.
    void synchronize() override {
        for (const cudaStream_t stream : {cuda::stream(), side_stream(), stream()})
            CUDA_CHECK(cudaStreamSynchronize(stream));
    }

  private:
    cudaStream_t side_stream() {
        if (streams_ == CommStreams::one) return side_stream_of_all_groups();
        if (!own_side_stream_) own_side_stream_ = new_stream();
        return own_side_stream_;
    }
    cudaStream_t stream() { return lane_ ? lane_->stream : cuda::stream(); }
    RequestPtr issue(const std::function<void(cudaStream_t)>& operation) {
        return std::make_shared<OnStream>(stream(), [&] { operation(stream()); });
    }

    const CommStreams streams_;
    const bool is_world_;
    std::shared_ptr<Lane> lane_;  // a channel's is its own: a message not yet received blocks its later ones only
    std::optional<CtaShare> share_;
    ncclComm_t comm_ = nullptr;
    cudaStream_t own_side_stream_ = nullptr;
};

}  // namespace

std::string nccl_text(CommStreams& streams) {
    int version = 0;
    NCCL_CHECK(ncclGetVersion(&version));
    const bool too_old = streams == CommStreams::group && version < 22600;
    if (too_old) streams = CommStreams::one;
    return describe(
        "comm: NCCL {}.{}.{}; its kernels take up to {} of {} multiprocessors for a group, {} for one with little to "
        "send, {} for a channel\n{}",
        version / 10000, version / 100 % 100, version % 100, ctas_of(GroupLoad::heavy), cuda_info().multiprocessors,
        ctas_of(GroupLoad::light), ctas_of(GroupLoad::channel),
        too_old ? "comm: --comm-streams one, because NCCL orders the kernels of several streams from 2.26 on only\n"
                : "");
}

std::unique_ptr<Backend> make_nccl_backend(CommStreams streams) {
    return std::make_unique<NcclBackend>(MpiGroup::duplicate_of_world(), streams, GroupLoad::light, nullptr);
}

}  // namespace train70b
