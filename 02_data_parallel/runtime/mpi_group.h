#pragma once
// MPI on host memory: what the mpi and the staged transport share. Counts beyond MPI's int go in pieces.
#include <mpi.h>

#include "02_data_parallel/runtime/transport.h"

namespace train70b {

class MpiGroup {
  public:
    explicit MpiGroup(MPI_Comm comm);  // takes a communicator to free
    ~MpiGroup();
    MpiGroup(const MpiGroup&) = delete;
    static MPI_Comm duplicate_of_world();

    int rank() const { return rank_; }
    int size() const { return size_; }
    MPI_Comm split(const std::vector<int>& colours) const;

    Handle exchange(const void* out, int64_t out_bytes, int to, void* in, int64_t in_bytes, int from,
                    Transport::Channel channel) const;
    void all_reduce(void* x, int64_t count, DType dtype, Reduce reduce) const;
    void reduce_scatter(void* part, const void* whole, int64_t part_count, DType dtype) const;  // disjoint
    void all_gather(void* whole, const void* part, int64_t part_bytes) const;  // part: anywhere, or its place in whole
    void broadcast(void* x, int64_t bytes, int root) const;
    void all_to_all(void* to, const void* from, int64_t part_bytes) const;  // disjoint
    void barrier() const;
    std::vector<double> gather(const std::vector<double>& mine) const;
    std::vector<std::string> gather_text(const std::string& mine) const;

    static inline int64_t largest_count = int64_t(1) << 30;  // of one MPI call; lowered by a test

  private:
    MPI_Comm comm_;
    int rank_ = 0, size_ = 1;
};

}  // namespace train70b
