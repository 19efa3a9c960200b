// The mpi transport: host tensors. Collectives progress inside MPI's calls only, so nothing overlaps on a CPU: what it
// shows is order and bytes.
#include "01_single_gpu/ops/ops.h"
#include "02_data_parallel/runtime/mpi_group.h"

namespace train70b {

namespace {

class MpiTransport : public Transport {
  public:
    explicit MpiTransport(MPI_Comm comm) : group_(comm) {}
    const char* name() const override { return "mpi"; }
    int rank() const override { return group_.rank(); }
    int size() const override { return group_.size(); }
    std::unique_ptr<Transport> split(const std::vector<int>& colours) const override {
        const MPI_Comm comm = group_.split(colours);
        return comm == MPI_COMM_NULL ? nullptr : std::make_unique<MpiTransport>(comm);
    }
    Handle aside(const std::function<void()>& body) override {
        body();
        return nullptr;
    }
    Handle exchange(const Tensor& out, int to, const Tensor& in, int from, Channel channel) override {
        return group_.exchange(out ? out.raw() : nullptr, out ? out.bytes() : 0, to, in ? in.raw() : nullptr,
                               in ? in.bytes() : 0, from, channel);
    }
    Handle all_reduce(const Tensor& x, Reduce reduce) override {
        group_.all_reduce(x.raw(), x.size(), x.dtype(), reduce);
        return nullptr;
    }
    Handle reduce_scatter(const Tensor& part, const Tensor& whole) override {
        if (!part.overlaps(whole)) {
            group_.reduce_scatter(part.raw(), whole.raw(), part.size(), part.dtype());
            return nullptr;
        }
        Tensor apart = scratch(part.size(), part.dtype(), Device::cpu).element_slice(0, part.shape());
        group_.reduce_scatter(apart.raw(), whole.raw(), part.size(), part.dtype());
        Tensor place = part;
        copy(place, apart);
        return nullptr;
    }
    Handle all_gather(const Tensor& whole, const Tensor& part) override {
        group_.all_gather(whole.raw(), part.raw(), part.bytes());
        return nullptr;
    }
    Handle broadcast(const Tensor& x, int root) override {
        group_.broadcast(x.raw(), x.bytes(), root);
        return nullptr;
    }
    Handle all_to_all(const Tensor& to, const Tensor& from) override {
        group_.all_to_all(to.raw(), from.raw(), from.bytes() / size());
        return nullptr;
    }
    void barrier() override { group_.barrier(); }
    std::vector<double> gather(const std::vector<double>& mine) override { return group_.gather(mine); }
    std::vector<std::string> gather_text(const std::string& mine) override { return group_.gather_text(mine); }

  private:
    MpiGroup group_;
};

}  // namespace

std::unique_ptr<Transport> make_mpi_transport() {
    return std::make_unique<MpiTransport>(MpiGroup::duplicate_of_world());
}

}  // namespace train70b
