#pragma once
// MPI on host memory: every MPI call that moves data. Counts beyond MPI's int are sent in pieces.
#include <mpi.h>

#include <string>
#include <vector>

#include "01_single_gpu/core/tensor.h"
#include "02_data_parallel/runtime/request.h"

namespace train70b {

std::vector<std::string> gather_text(MPI_Comm comm, const std::string& local);  // of its ranks, in their order

class MpiGroup {
  public:
    explicit MpiGroup(MPI_Comm comm);  // takes ownership of the communicator
    ~MpiGroup();
    MpiGroup(const MpiGroup&) = delete;
    static MPI_Comm duplicate_of_world();

    int rank() const { return rank_; }
    int size() const { return size_; }
    MPI_Comm split(const std::vector<int>& colors) const;  // as Backend::split; MPI_COMM_NULL: no group

    RequestPtr exchange(const void* out, int64_t out_bytes, int to, void* in, int64_t in_bytes, int from,
                        Tag tag) const;
    void all_reduce(void* x, int64_t count, DType dtype, Reduce reduce) const;
    // part and whole must not overlap.
    void reduce_scatter(void* part, const void* whole, int64_t part_count, DType dtype) const;
    void all_gather(void* whole, const void* part, int64_t part_bytes) const;  // part may be this rank's slice of whole
    void broadcast(void* x, int64_t bytes, int root) const;
    void all_to_all(void* to, const void* from, int64_t part_bytes) const;  // must not overlap
    void barrier() const;
    std::vector<double> gather(const std::vector<double>& local) const;
    std::vector<std::string> gather_text(const std::string& local) const { return train70b::gather_text(comm_, local); }

    static inline int64_t largest_count = int64_t(1) << 30;  // elements or bytes of one MPI call; a test lowers it

  private:
    MPI_Comm comm_;
    int rank_ = 0, size_ = 1;
};

// Over all ranks, while there is no Comm yet. Before MPI is started this process is the only one.
bool mpi_is_started();
int world_size();
int over_all_ranks(int value, MPI_Op op);

}  // namespace train70b
