// The staged transport: tensors of a GPU, copied through pinned host memory and moved by MPI. It makes no demands, so
// several ranks may share one GPU; every operation waits for the device, so nothing overlaps.
#if TRAIN70B_CUDA
#include "01_single_gpu/ops/ops.h"
#include "02_data_parallel/runtime/mpi_group.h"

namespace train70b {

namespace {

// Pinned memory, kept for the next taker: allocating it takes milliseconds.
class PinnedPool {
  public:
    class Buffer {
      public:
        Buffer(PinnedPool& pool, int64_t bytes) : pool_(pool), block_(pool.take(bytes)) {}
        ~Buffer() { pool_.free_.push_back(block_); }
        Buffer(const Buffer&) = delete;
        void* data() const { return block_.data; }

      private:
        friend class PinnedPool;
        PinnedPool& pool_;
        struct Block {
            void* data;
            int64_t bytes;
        } block_;
    };

  private:
    Buffer::Block take(int64_t bytes) {
        auto best = free_.end();
        for (auto i = free_.begin(); i != free_.end(); ++i)
            if (i->bytes >= bytes && (best == free_.end() || i->bytes < best->bytes)) best = i;
        if (best == free_.end()) return {cuda_allocate_host(bytes), bytes};
        const Buffer::Block block = *best;
        free_.erase(best);
        return block;
    }
    std::vector<Buffer::Block> free_;
};

PinnedPool& pool() {
    static auto* instance = new PinnedPool();
    return *instance;
}

struct Staging : PinnedPool::Buffer {
    explicit Staging(const Tensor& x) : Buffer(pool(), x.bytes()) {}
    void fetch(const Tensor& x) { cuda_copy(data(), x.raw(), x.bytes(), CopyKind::to_host); }
    void put(const Tensor& x) const { cuda_copy(x.raw(), data(), x.bytes(), CopyKind::to_device); }
};

class StagedExchange : public Started {
  public:
    StagedExchange(const MpiGroup& group, const Tensor& out, int to, Tensor in, int from, Transport::Channel channel)
        : in_(std::move(in)) {
        if (out) from_device_.emplace(out).fetch(out);
        if (in_) to_device_.emplace(in_);
        mpi_ = group.exchange(out ? from_device_->data() : nullptr, out ? out.bytes() : 0, to,
                              in_ ? to_device_->data() : nullptr, in_ ? in_.bytes() : 0, from, channel);
    }
    ~StagedExchange() override {
        if (std::uncaught_exceptions() == 0) wait();
    }
    void wait() override {
        if (!mpi_) return;
        mpi_->wait();
        mpi_.reset();
        if (in_) to_device_->put(in_);
    }

    bool test() override {
        if (mpi_ && !mpi_->test()) return false;
        wait();
        return true;
    }

  private:
    Tensor in_;
    std::optional<Staging> from_device_, to_device_;
    Handle mpi_;
};

class StagedTransport : public Transport {
  public:
    explicit StagedTransport(MPI_Comm comm) : group_(comm) {}
    const char* name() const override { return "staged"; }
    int rank() const override { return group_.rank(); }
    int size() const override { return group_.size(); }
    std::unique_ptr<Transport> split(const std::vector<int>& colours) const override {
        const MPI_Comm comm = group_.split(colours);
        return comm == MPI_COMM_NULL ? nullptr : std::make_unique<StagedTransport>(comm);
    }
    Handle aside(const std::function<void()>& body) override {
        body();
        return nullptr;
    }
    Handle exchange(const Tensor& out, int to, const Tensor& in, int from, Channel channel) override {
        return std::make_shared<StagedExchange>(group_, out, to, in, from, channel);
    }
    Handle all_reduce(const Tensor& x, Reduce reduce) override {
        Staging host(x);
        host.fetch(x);
        group_.all_reduce(host.data(), x.size(), x.dtype(), reduce);
        host.put(x);
        return nullptr;
    }
    Handle reduce_scatter(const Tensor& part, const Tensor& whole) override {
        Staging host_part(part), host_whole(whole);
        host_whole.fetch(whole);
        group_.reduce_scatter(host_part.data(), host_whole.data(), part.size(), part.dtype());
        host_part.put(part);
        return nullptr;
    }
    Handle all_gather(const Tensor& whole, const Tensor& part) override {
        Staging host_part(part), host_whole(whole);
        host_part.fetch(part);
        group_.all_gather(host_whole.data(), host_part.data(), part.bytes());
        host_whole.put(whole);
        return nullptr;
    }
    Handle broadcast(const Tensor& x, int root) override {
        Staging host(x);
        if (rank() == root) host.fetch(x);
        group_.broadcast(host.data(), x.bytes(), root);
        if (rank() != root) host.put(x);
        return nullptr;
    }
    Handle all_to_all(const Tensor& to, const Tensor& from) override {
        Staging host_to(to), host_from(from);
        host_from.fetch(from);
        group_.all_to_all(host_to.data(), host_from.data(), from.bytes() / size());
        host_to.put(to);
        return nullptr;
    }
    void barrier() override {
        cuda_synchronize();
        group_.barrier();
    }
    std::vector<double> gather(const std::vector<double>& mine) override { return group_.gather(mine); }
    std::vector<std::string> gather_text(const std::string& mine) override { return group_.gather_text(mine); }
    void synchronize() override { cuda_synchronize(); }

  private:
    MpiGroup group_;
};

}  // namespace

std::unique_ptr<Transport> make_staged_transport() {
    return std::make_unique<StagedTransport>(MpiGroup::duplicate_of_world());
}

}  // namespace train70b
#endif
