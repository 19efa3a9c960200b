// The nccl backend: device tensors, one GPU per rank, on a communication stream of its own.
//
// Events order it against everything else, and the host never waits: before an operation the communication stream waits
// for the issuing stream; wait() makes the current stream wait for the operation. The issuing stream is the compute
// stream, or, in an all-reduce written by hand, the side stream on which its additions run.
#include <nccl.h>

#include <atomic>

#include "01_single_gpu/core/cuda.cuh"
#include "02_data_parallel/runtime/backend_over_mpi.h"

#define NCCL_CHECK(call)                                                          \
    do {                                                                          \
        const ncclResult_t nccl_status = (call);                                  \
        CHECK(nccl_status == ncclSuccess, "{}", ncclGetErrorString(nccl_status)); \
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
    bool reached() const { return cudaEventQuery(event_) == cudaSuccess; }
    void synchronize() const { CUDA_CHECK(cudaEventSynchronize(event_)); }
    double seconds_since(const Event& earlier) const {
        float milliseconds = 0;
        CUDA_CHECK(cudaEventElapsedTime(&milliseconds, earlier.event_, event_));
        return 1e-3 * milliseconds;
    }

  private:
    cudaEvent_t event_ = nullptr;
};

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
    bool started() override { return on_device() && begin_->reached(); }
    bool finished() override { return on_device() && end_->reached(); }
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

ncclDataType_t nccl_type(DType dtype) {
    switch (dtype) {
        case DType::f64: return ncclFloat64;
        case DType::f32: return ncclFloat32;
        case DType::bf16: return ncclBfloat16;
        case DType::i32: return ncclInt32;
        default: return ncclUint8;
    }
}

cudaStream_t new_stream() {
    int least = 0, greatest = 0;
    cudaStream_t stream = nullptr;
    CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    CUDA_CHECK(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, greatest));
    return stream;
}
cudaStream_t communication_stream() {
    static const cudaStream_t stream = new_stream();
    return stream;
}
cudaStream_t message_stream() {
    static const cudaStream_t stream = new_stream();
    return stream;
}
cudaStream_t side_stream() {
    static const cudaStream_t stream = new_stream();
    return stream;
}

class NcclBackend : public BackendOverMpi {
  public:
    explicit NcclBackend(MPI_Comm comm) : BackendOverMpi(comm) {
        cuda::stream();  // creates the device's context
        ncclUniqueId id{};
        if (rank() == 0) NCCL_CHECK(ncclGetUniqueId(&id));
        group_.broadcast(&id, sizeof id, 0);
        NCCL_CHECK(ncclCommInitRank(&comm_, size(), id, rank()));
    }
    ~NcclBackend() override {
        if (std::uncaught_exceptions() > 0) return;
        cudaDeviceSynchronize();  // the scratch buffers are freed with this backend
        ncclCommDestroy(comm_);
        if (channel_stream_) cudaStreamDestroy(channel_stream_);
    }
    const char* name() const override { return "nccl"; }
    std::unique_ptr<Backend> same_kind(MPI_Comm comm) const override { return std::make_unique<NcclBackend>(comm); }

    bool on_stream() const override { return true; }
    RequestPtr on_side_stream(const std::function<void()>& body) override {
        return std::make_shared<OnStream>(side_stream(), [&] {
            const CudaStreamScope scope(side_stream());
            body();
        });
    }
    RequestPtr exchange(const Tensor& out, int to, const Tensor& in, int from, Tag tag) override {
        if (tag == Tag::user) {
            messages_.push_back(std::make_shared<Message>(*this, out, to, in, from));
            return messages_.back();
        }
        const auto operation = [&](cudaStream_t stream) {
            NCCL_CHECK(ncclGroupStart());
            post({out, to, in, from}, stream);
            NCCL_CHECK(ncclGroupEnd());
        };
        if (tag != Tag::p2p_channel) return issue(operation);
        // A stream of its own: a message that has not been received yet blocks only later messages of this channel.
        if (!channel_stream_) channel_stream_ = new_stream();
        return std::make_shared<OnStream>(channel_stream_, [&] { operation(channel_stream_); });
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
    RequestPtr all_to_all(const Tensor& to, const Tensor& from) override {
        return issue([&](cudaStream_t stream) {
            const int64_t part = from.bytes() / size();
            NCCL_CHECK(ncclGroupStart());
            for (int peer = 0; peer < size(); ++peer) {
                NCCL_CHECK(ncclSend(from.data<char>() + peer * part, part, ncclUint8, peer, comm_, stream));
                NCCL_CHECK(ncclRecv(to.data<char>() + peer * part, part, ncclUint8, peer, comm_, stream));
            }
            NCCL_CHECK(ncclGroupEnd());
        });
    }
    void synchronize() override { CUDA_CHECK(cudaDeviceSynchronize()); }

  private:
    struct Transfer {
        Tensor out;
        int to;
        Tensor in;
        int from;
    };
    void post(const Transfer& t, cudaStream_t stream) const {
        if (t.out && t.out.size() > 0) NCCL_CHECK(ncclSend(t.out.raw(), t.out.bytes(), ncclUint8, t.to, comm_, stream));
        if (t.in && t.in.size() > 0) NCCL_CHECK(ncclRecv(t.in.raw(), t.in.bytes(), ncclUint8, t.from, comm_, stream));
    }

    // A send blocks later work on its stream until the peer receives. Messages of the program are therefore held back
    // until this rank waits for one of them, then issued as one NCCL group on a stream of their own: two ranks that
    // send before they receive do not deadlock.
    class Message : public Request {
      public:
        Message(NcclBackend& backend, Tensor out, int to, Tensor in, int from)
            : backend_(backend), transfer_{std::move(out), to, std::move(in), from} {}
        void wait() override {
            backend_.post_messages();
            group_.load()->wait();
            transfer_ = {};
        }
        bool started() override { return group_.load() && group_.load()->started(); }
        bool finished() override { return group_.load() && group_.load()->finished(); }
        std::optional<Times> times() override { return group_.load()->times(); }

      private:
        friend class NcclBackend;
        NcclBackend& backend_;
        Transfer transfer_;
        std::shared_ptr<OnStream> owner_;
        std::atomic<OnStream*> group_ = nullptr;  // read by the watchdog's thread
    };
    void post_messages() {
        if (messages_.empty()) return;
        const auto group = std::make_shared<OnStream>(message_stream(), [&] {
            NCCL_CHECK(ncclGroupStart());
            for (const auto& message : messages_) post(message->transfer_, message_stream());
            NCCL_CHECK(ncclGroupEnd());
        });
        for (const auto& message : messages_) {
            message->owner_ = group;
            message->group_ = group.get();
        }
        messages_.clear();
    }

    RequestPtr issue(const std::function<void(cudaStream_t)>& operation) {
        const cudaStream_t stream = communication_stream();
        return std::make_shared<OnStream>(stream, [&] { operation(stream); });
    }

    ncclComm_t comm_ = nullptr;
    cudaStream_t channel_stream_ = nullptr;
    std::vector<std::shared_ptr<Message>> messages_;  // held back
};

}  // namespace

std::unique_ptr<Backend> make_nccl_backend() { return std::make_unique<NcclBackend>(MpiGroup::duplicate_of_world()); }

}  // namespace train70b
