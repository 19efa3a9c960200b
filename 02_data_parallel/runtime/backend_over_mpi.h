#pragma once
// The base of the backends whose ranks are MPI processes (mpi, staged, nccl): groups and host values come from MPI.
#include "02_data_parallel/runtime/backend.h"
#include "02_data_parallel/runtime/mpi_group.h"

namespace train70b {

class BackendOverMpi : public Backend {
  public:
    explicit BackendOverMpi(MPI_Comm comm) : group_(comm) {}  // takes ownership of the communicator
    int rank() const override { return group_.rank(); }
    int size() const override { return group_.size(); }
    std::unique_ptr<Backend> split(const std::vector<int>& colors, GroupLoad load) const override {
        const MPI_Comm comm = group_.split(colors);
        return comm == MPI_COMM_NULL ? nullptr : same_kind(comm, load);
    }
    std::vector<int> nodes() override;  // backend_mpi.cpp
    void barrier() override {
        synchronize();
        group_.barrier();
    }
    std::vector<double> gather(const std::vector<double>& local) override { return group_.gather(local); }
    std::vector<std::string> gather_text(const std::string& local) override { return group_.gather_text(local); }

  protected:
    virtual std::unique_ptr<Backend> same_kind(MPI_Comm comm, GroupLoad load) const = 0;  // over `comm`

    MpiGroup group_;

  private:
    std::vector<int> nodes_;
};

// Backend::exchange of device tensors through pinned host memory and MPI (backend_mpi.cpp).
RequestPtr staged_exchange(const MpiGroup& group, const Tensor& out, int to, const Tensor& in, int from, Tag tag);

}  // namespace train70b
