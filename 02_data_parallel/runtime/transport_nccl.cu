// The nccl transport: tensors of GPUs, one GPU per rank, on a communication stream of its own.
//
// One idiom orders it against everything else: before an operation, an event from the issuing stream
// to the communication stream; at its wait(), an event back. The host never waits. The issuing stream is the compute
// stream, or, for an all-reduce by hand, the side stream where its additions run.
#include <nccl.h>

#include <atomic>

#include "01_single_gpu/core/cuda.cuh"
#include "02_data_parallel/runtime/mpi_group.h"

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

    void holds_up(cudaStream_t stream) const { CUDA_CHECK(cudaStreamWaitEvent(stream, event_, 0)); }
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

// Work issued to `stream` between the two calls, and waited for by the stream that is current at wait().
class OnStream : public Started {
  public:
    OnStream(cudaStream_t stream, const std::function<void()>& issue) : ready_(cuda::stream()) {
        CUDA_CHECK(cudaGetDevice(&device_));
        ready_.holds_up(stream);
        begin_.emplace(stream);
        issue();
        end_.emplace(stream);
    }
    void wait() override {
        if (before_wait_) return;
        before_wait_.emplace(cuda::stream());
        end_->holds_up(cuda::stream());
        after_wait_.emplace(cuda::stream());
    }
    bool begun() override { return on_device() && begin_->reached(); }
    bool finished() override { return on_device() && end_->reached(); }
    std::optional<Times> times() override {
        if (!after_wait_) return {};
        after_wait_->synchronize();
        return Times{end_->seconds_since(*begin_), after_wait_->seconds_since(*before_wait_)};
    }

  private:
    bool on_device() const {  // the watchdog's thread has chosen none yet
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

class NcclTransport : public Transport {
  public:
    explicit NcclTransport(MPI_Comm comm) : group_(comm) {
        cuda::stream();  // the device's context
        ncclUniqueId id{};
        if (rank() == 0) NCCL_CHECK(ncclGetUniqueId(&id));
        group_.broadcast(&id, sizeof id, 0);
        NCCL_CHECK(ncclCommInitRank(&comm_, size(), id, rank()));
    }
    ~NcclTransport() override {
        if (std::uncaught_exceptions() > 0) return;
        cudaDeviceSynchronize();  // scratch buffers go with this
        ncclCommDestroy(comm_);
        if (link_stream_) cudaStreamDestroy(link_stream_);
    }
    const char* name() const override { return "nccl"; }
    int rank() const override { return group_.rank(); }
    int size() const override { return group_.size(); }
    std::unique_ptr<Transport> split(const std::vector<int>& colours) const override {
        const MPI_Comm comm = group_.split(colours);
        return comm == MPI_COMM_NULL ? nullptr : std::make_unique<NcclTransport>(comm);
    }

    bool on_stream() const override { return true; }
    Handle aside(const std::function<void()>& body) override {
        return std::make_shared<OnStream>(side_stream(), [&] {
            const CudaStreamScope scope(side_stream());
            body();
        });
    }
    Handle exchange(const Tensor& out, int to, const Tensor& in, int from, Channel channel) override {
        if (channel == Channel::user) {
            messages_.push_back(std::make_shared<Message>(*this, out, to, in, from));
            return messages_.back();
        }
        const auto operation = [&](cudaStream_t stream) {
            NCCL_CHECK(ncclGroupStart());
            post({out, to, in, from}, stream);
            NCCL_CHECK(ncclGroupEnd());
        };
        if (channel != Channel::link) return issue(operation);
        // A stream of its own: a message that nobody has received yet keeps none but those behind it on this link.
        if (!link_stream_) link_stream_ = new_stream();
        return std::make_shared<OnStream>(link_stream_, [&] { operation(link_stream_); });
    }
    Handle all_reduce(const Tensor& x, Reduce reduce) override {
        return issue([&](cudaStream_t stream) {
            NCCL_CHECK(ncclAllReduce(x.raw(), x.raw(), x.size(), nccl_type(x.dtype()),
                                     reduce == Reduce::sum ? ncclSum : ncclMax, comm_, stream));
        });
    }
    Handle reduce_scatter(const Tensor& part, const Tensor& whole) override {
        return issue([&](cudaStream_t stream) {
            NCCL_CHECK(ncclReduceScatter(whole.raw(), part.raw(), part.size(), nccl_type(part.dtype()), ncclSum, comm_,
                                         stream));
        });
    }
    Handle all_gather(const Tensor& whole, const Tensor& part) override {
        return issue([&](cudaStream_t stream) {
            NCCL_CHECK(ncclAllGather(part.raw(), whole.raw(), part.bytes(), ncclUint8, comm_, stream));
        });
    }
    Handle broadcast(const Tensor& x, int root) override {
        return issue([&](cudaStream_t stream) {
            NCCL_CHECK(ncclBroadcast(x.raw(), x.raw(), x.bytes(), ncclUint8, root, comm_, stream));
        });
    }
    Handle all_to_all(const Tensor& to, const Tensor& from) override {
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
    void barrier() override {
        synchronize();
        group_.barrier();
    }
    std::vector<double> gather(const std::vector<double>& mine) override { return group_.gather(mine); }
    std::vector<std::string> gather_text(const std::string& mine) override { return group_.gather_text(mine); }
    void synchronize() override { CUDA_CHECK(cudaDeviceSynchronize()); }

  private:
    struct Envelope {
        Tensor out;
        int to;
        Tensor in;
        int from;
    };
    void post(const Envelope& e, cudaStream_t stream) const {
        if (e.out && e.out.size() > 0) NCCL_CHECK(ncclSend(e.out.raw(), e.out.bytes(), ncclUint8, e.to, comm_, stream));
        if (e.in && e.in.size() > 0) NCCL_CHECK(ncclRecv(e.in.raw(), e.in.bytes(), ncclUint8, e.from, comm_, stream));
    }

    // On a stream a send stands before everything behind it until it is received. So messages of the program are held
    // back until this rank waits for one of them, and then go as one group, on a stream of their own: two ranks that
    // send before they receive meet inside their groups.
    class Message : public Started {
      public:
        Message(NcclTransport& transport, Tensor out, int to, Tensor in, int from)
            : transport_(transport), envelope_{std::move(out), to, std::move(in), from} {}
        void wait() override {
            transport_.post_messages();
            group_.load()->wait();
            envelope_ = {};
        }
        bool begun() override { return group_.load() && group_.load()->begun(); }
        bool finished() override { return group_.load() && group_.load()->finished(); }
        std::optional<Times> times() override { return group_.load()->times(); }

      private:
        friend class NcclTransport;
        NcclTransport& transport_;
        Envelope envelope_;
        std::shared_ptr<OnStream> owner_;
        std::atomic<OnStream*> group_ = nullptr;  // the watchdog asks on its own thread
    };
    void post_messages() {
        if (messages_.empty()) return;
        const auto group = std::make_shared<OnStream>(message_stream(), [&] {
            NCCL_CHECK(ncclGroupStart());
            for (const auto& message : messages_) post(message->envelope_, message_stream());
            NCCL_CHECK(ncclGroupEnd());
        });
        for (const auto& message : messages_) {
            message->owner_ = group;
            message->group_ = group.get();
        }
        messages_.clear();
    }

    Handle issue(const std::function<void(cudaStream_t)>& operation) {
        const cudaStream_t stream = communication_stream();
        return std::make_shared<OnStream>(stream, [&] { operation(stream); });
    }

    MpiGroup group_;
    ncclComm_t comm_ = nullptr;
    cudaStream_t link_stream_ = nullptr;
    std::vector<std::shared_ptr<Message>> messages_;  // held back
};

}  // namespace

std::unique_ptr<Transport> make_nccl_transport() {
    return std::make_unique<NcclTransport>(MpiGroup::duplicate_of_world());
}

}  // namespace train70b
