// The mpi backend: host tensors. Collectives make progress only inside MPI calls, so nothing overlaps on a CPU. The
// order of the operations and their bytes are those of a GPU run.
#include "01_single_gpu/ops/ops.h"
#include "02_data_parallel/runtime/backend_over_mpi.h"

namespace train70b {

namespace {

class MpiBackend : public BackendOverMpi {
  public:
    using BackendOverMpi::BackendOverMpi;
    const char* name() const override { return "mpi"; }
    std::unique_ptr<Backend> same_kind(MPI_Comm comm, GroupLoad) const override {
        return std::make_unique<MpiBackend>(comm);
    }
    RequestPtr exchange(const Tensor& out, int to, const Tensor& in, int from, Tag tag) override {
        return group_.exchange(out ? out.raw() : nullptr, out ? out.bytes() : 0, to, in ? in.raw() : nullptr,
                               in ? in.bytes() : 0, from, tag);
    }
    RequestPtr all_reduce(const Tensor& x, Reduce reduce) override {
        group_.all_reduce(x.raw(), x.size(), x.dtype(), reduce);
        return nullptr;
    }
    RequestPtr reduce_scatter(const Tensor& part, const Tensor& whole) override {
        const bool in_place = part.overlaps(whole);
        Tensor sum = in_place ? scratch(part.size(), part.dtype(), Device::cpu).element_slice(0, part.shape()) : part;
        group_.reduce_scatter(sum.raw(), whole.raw(), part.size(), part.dtype());
        if (in_place) {
            Tensor result = part;
            copy(result, sum);
        }
        return nullptr;
    }
    RequestPtr all_gather(const Tensor& whole, const Tensor& part) override {
        group_.all_gather(whole.raw(), part.raw(), part.bytes());
        return nullptr;
    }
    RequestPtr broadcast(const Tensor& x, int root) override {
        group_.broadcast(x.raw(), x.bytes(), root);
        return nullptr;
    }
    RequestPtr all_to_all(const Tensor& to, const Tensor& from) override {
        group_.all_to_all(to.raw(), from.raw(), from.bytes() / size());
        return nullptr;
    }
};

}  // namespace

std::unique_ptr<Backend> make_mpi_backend() { return std::make_unique<MpiBackend>(MpiGroup::duplicate_of_world()); }

}  // namespace train70b
