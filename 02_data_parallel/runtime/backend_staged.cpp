// The staged backend: device tensors, copied through pinned host memory and sent by MPI. Several ranks may share one
// GPU. Every operation waits for the device, so nothing overlaps.
#if TRAIN70B_CUDA
#include "01_single_gpu/ops/ops.h"
#include "02_data_parallel/runtime/backend_over_mpi.h"

namespace train70b {

namespace {

// Pinned memory is kept for reuse: allocating it takes milliseconds.
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
    void load(const Tensor& x) { cuda_copy(data(), x.raw(), x.bytes(), CopyKind::to_host); }
    void store(const Tensor& x) const { cuda_copy(x.raw(), data(), x.bytes(), CopyKind::to_device); }
};

class StagedExchange : public Request {
  public:
    StagedExchange(const MpiGroup& group, const Tensor& out, int to, Tensor in, int from, Tag tag)
        : in_(std::move(in)) {
        if (out) send_buffer_.emplace(out).load(out);
        if (in_) receive_buffer_.emplace(in_);
        mpi_ = group.exchange(out ? send_buffer_->data() : nullptr, out ? out.bytes() : 0, to,
                              in_ ? receive_buffer_->data() : nullptr, in_ ? in_.bytes() : 0, from, tag);
    }
    ~StagedExchange() override {
        if (std::uncaught_exceptions() == 0) wait();
    }
    void wait() override {
        if (!mpi_) return;
        mpi_->wait();
        mpi_.reset();
        if (in_) receive_buffer_->store(in_);
    }

    bool test() override {
        if (mpi_ && !mpi_->test()) return false;
        wait();
        return true;
    }

  private:
    Tensor in_;
    std::optional<Staging> send_buffer_, receive_buffer_;
    RequestPtr mpi_;
};

}  // namespace

RequestPtr staged_exchange(const MpiGroup& group, const Tensor& out, int to, const Tensor& in, int from, Tag tag) {
    return std::make_shared<StagedExchange>(group, out, to, in, from, tag);
}

namespace {

class StagedBackend : public BackendOverMpi {
  public:
    using BackendOverMpi::BackendOverMpi;
    const char* name() const override { return "staged"; }
    std::unique_ptr<Backend> same_kind(MPI_Comm comm, GroupLoad) const override {
        return std::make_unique<StagedBackend>(comm);
    }
    RequestPtr exchange(const Tensor& out, int to, const Tensor& in, int from, Tag tag) override {
        return staged_exchange(group_, out, to, in, from, tag);
    }
    RequestPtr all_reduce(const Tensor& x, Reduce reduce) override {
        Staging host(x);
        host.load(x);
        group_.all_reduce(host.data(), x.size(), x.dtype(), reduce);
        host.store(x);
        return nullptr;
    }
    RequestPtr reduce_scatter(const Tensor& part, const Tensor& whole) override {
        Staging host_part(part), host_whole(whole);
        host_whole.load(whole);
        group_.reduce_scatter(host_part.data(), host_whole.data(), part.size(), part.dtype());
        host_part.store(part);
        return nullptr;
    }
    RequestPtr all_gather(const Tensor& whole, const Tensor& part) override {
        Staging host_part(part), host_whole(whole);
        host_part.load(part);
        group_.all_gather(host_whole.data(), host_part.data(), part.bytes());
        host_whole.store(whole);
        return nullptr;
    }
    RequestPtr broadcast(const Tensor& x, int root) override {
        Staging host(x);
        if (rank() == root) host.load(x);
        group_.broadcast(host.data(), x.bytes(), root);
        if (rank() != root) host.store(x);
        return nullptr;
    }
    RequestPtr all_to_all(const Tensor& to, const Tensor& from) override {
        Staging host_to(to), host_from(from);
        host_from.load(from);
        group_.all_to_all(host_to.data(), host_from.data(), from.bytes() / size());
        host_to.store(to);
        return nullptr;
    }
    void synchronize() override { cuda_synchronize(); }
};

}  // namespace

std::unique_ptr<Backend> make_staged_backend() {
    return std::make_unique<StagedBackend>(MpiGroup::duplicate_of_world());
}

}  // namespace train70b
#endif
