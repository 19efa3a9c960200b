// The mpi backend: host tensors. Collectives make progress only inside MPI calls, so nothing overlaps on a CPU. The
// order of the operations and their bytes are those of a GPU run.
// The staged backend: device tensors, copied through pinned host memory and sent by MPI. Several ranks may share one
// GPU. Every operation waits for the device, so nothing overlaps.
#include <unistd.h>

#include <map>

#include "01_single_gpu/core/say.h"
#include "01_single_gpu/ops/ops.h"
#include "02_data_parallel/runtime/backend_over_mpi.h"

namespace train70b {

// A node is a machine, told by its name, or so many neighbours among all ranks; its number is its first rank here.
std::vector<int> BackendOverMpi::nodes() {
    if (nodes_.empty()) {
        char machine[256] = {};
        ::gethostname(machine, sizeof machine - 1);
        const std::vector<std::string> names =
            gather_text(ranks_per_node > 0 ? std::to_string(this_rank / ranks_per_node) : machine);
        for (const std::string& name : names)
            nodes_.push_back(int(std::find(names.begin(), names.end(), name) - names.begin()));
    }
    return nodes_;
}

namespace {

// Pinned memory, kept for reuse when the last reference is gone: allocating it takes milliseconds.
[[maybe_unused]] std::shared_ptr<void> pinned(int64_t bytes) {
    static auto& unused = *new std::multimap<int64_t, void*>();  // by size in bytes
    const auto best = unused.lower_bound(bytes);
    const auto [size, memory] =
        best == unused.end() ? std::pair(bytes, cuda_allocate_host(bytes)) : std::pair<int64_t, void*>(*best);
    if (best != unused.end()) unused.erase(best);
    return {memory, [size = size](void* data) { unused.emplace(size, data); }};
}

// A tensor's bytes where MPI reads and writes them: its own or, of a device tensor, a copy in pinned memory.
class OnHost {
  public:
    explicit OnHost(const Tensor& x) : x_(x) {
        if constexpr (TRAIN70B_CUDA)
            if (x.device() == Device::cuda) copy_ = pinned(x.bytes());
    }
    void* data() const { return copy_ ? copy_.get() : x_.raw(); }
    void load() const {
        if constexpr (TRAIN70B_CUDA)
            if (copy_) cuda_copy(data(), x_.raw(), x_.bytes(), CopyKind::to_host);
    }
    void store() const {
        if constexpr (TRAIN70B_CUDA)
            if (copy_) cuda_copy(x_.raw(), data(), x_.bytes(), CopyKind::to_device);
    }

  private:
    const Tensor x_;
    std::shared_ptr<void> copy_;
};

class StagedExchange : public Request {
  public:
    StagedExchange(const MpiGroup& group, const Tensor& out, int to, const Tensor& in, int from, Tag tag) {
        if (out) out_.emplace(out).load();
        if (in) in_.emplace(in);
        mpi_ = group.exchange(out ? out_->data() : nullptr, out ? out.bytes() : 0, to, in ? in_->data() : nullptr,
                              in ? in.bytes() : 0, from, tag);
    }
    ~StagedExchange() override {
        if (std::uncaught_exceptions() == 0) wait();
    }
    void wait() override {
        if (!mpi_) return;
        mpi_->wait();
        mpi_.reset();
        if (in_) in_->store();
    }
    bool test() override {
        if (mpi_ && !mpi_->test()) return false;
        wait();
        return true;
    }

  private:
    std::optional<OnHost> out_, in_;
    RequestPtr mpi_;
};

class MpiBackend : public BackendOverMpi {
  public:
    MpiBackend(MPI_Comm comm, bool staged) : BackendOverMpi(comm), staged_(staged) {}
    const char* name() const override { return staged_ ? "staged" : "mpi"; }
    std::unique_ptr<Backend> same_kind(MPI_Comm comm, GroupLoad) const override {
        return std::make_unique<MpiBackend>(comm, staged_);
    }
    RequestPtr exchange(const Tensor& out, int to, const Tensor& in, int from, Tag tag) override {
        if (staged_) return staged_exchange(group_, out, to, in, from, tag);
        return group_.exchange(out ? out.raw() : nullptr, out ? out.bytes() : 0, to, in ? in.raw() : nullptr,
                               in ? in.bytes() : 0, from, tag);
    }
    RequestPtr all_reduce(const Tensor& x, Reduce reduce) override {
        const OnHost host(x);
        host.load();
        group_.all_reduce(host.data(), x.size(), x.dtype(), reduce);
        host.store();
        return nullptr;
    }
    RequestPtr reduce_scatter(const Tensor& part, const Tensor& whole) override {
        const bool in_place = !staged_ && part.overlaps(whole);
        Tensor sum = in_place ? scratch(part.size(), part.dtype(), Device::cpu).element_slice(0, part.shape()) : part;
        const OnHost to(sum), from(whole);
        from.load();
        group_.reduce_scatter(to.data(), from.data(), part.size(), part.dtype());
        to.store();
        if (in_place) {
            Tensor result = part;
            copy(result, sum);
        }
        return nullptr;
    }
    RequestPtr all_gather(const Tensor& whole, const Tensor& part) override {
        const OnHost to(whole), from(part);
        from.load();
        group_.all_gather(to.data(), from.data(), part.bytes());
        to.store();
        return nullptr;
    }
    RequestPtr broadcast(const Tensor& x, int root) override {
        const OnHost host(x);
        if (rank() == root) host.load();
        group_.broadcast(host.data(), x.bytes(), root);
        if (rank() != root) host.store();
        return nullptr;
    }
    RequestPtr all_to_all(const Tensor& to, const Tensor& from) override {
        const OnHost host_to(to), host_from(from);
        host_from.load();
        group_.all_to_all(host_to.data(), host_from.data(), from.bytes() / size());
        host_to.store();
        return nullptr;
    }
    void synchronize() override {
        if constexpr (TRAIN70B_CUDA)
            if (staged_) cuda_synchronize();
    }

  private:
    const bool staged_;
};

}  // namespace

RequestPtr staged_exchange(const MpiGroup& group, const Tensor& out, int to, const Tensor& in, int from, Tag tag) {
    return std::make_shared<StagedExchange>(group, out, to, in, from, tag);
}

std::unique_ptr<Backend> make_mpi_backend() {
    return std::make_unique<MpiBackend>(MpiGroup::duplicate_of_world(), false);
}
std::unique_ptr<Backend> make_staged_backend() {
    return std::make_unique<MpiBackend>(MpiGroup::duplicate_of_world(), true);
}

}  // namespace train70b
