#pragma once
// Muon where ranks hold parts of matrices: shards (ZeRO), rows or columns (tensor parallelism), or whole copies (data
// parallelism). Every matrix of a pipeline stage has one owner, so that no product is computed twice:
//
//     each rank:  u of its parts  --all-to-all-->  owner: the whole u, orthogonalized  --all-to-all-->  its parts again
//
// The first exchange takes each part from the lowest of the ranks that hold it, the second brings it to all of them.
// Owners are chosen by cost: the dearest matrix first, to the rank that has the least. Values travel in the dtype of
// the parameters. A rank sends about twice the bytes of its shard, and (ZeRO 0, 1) of its matrices to everyone.
#include <map>

#include "01_single_gpu/complete/muon.h"
#include "02_data_parallel/comm.h"

namespace train70b {

class MatrixOwners : public Orthogonalizer {
  public:
    // stage: all ranks of a pipeline stage. dtype, device: of the parameters.
    MatrixOwners(const Comm& stage, DType dtype, Device device) : ranks_(stage), dtype_(dtype), device_(device) {}

    // Consecutive elements of a matrix that is stored as slabs of `width` columns, one after another: those of one
    // tensor-parallel rank. A run of a parameter's local rectangle is one here, too.
    struct Part {
        uint64_t param = 0;  // its name's key
        int64_t matrix = 0;  // of those in the parameter
        int64_t rows = 0, cols = 0, width = 0;
        int64_t begin = 0, size = 0;
        auto operator<=>(const Part&) const = default;
        auto whole() const { return std::tuple(param, matrix, rows, cols, width); }
    };
    static std::vector<Part> parts_of(const Segment& segment);

    // Who takes part in what: the same on all ranks.
    struct Holders {
        Part part;
        std::vector<int> ranks;  // ascending
        int owner = 0;
    };
    // of_ranks: the parts of each rank. Whole matrices one after another, and each from its beginning to its end.
    static std::vector<Holders> plan(const std::vector<std::vector<Part>>& of_ranks);

  private:
    void orthogonalize() override;
    void agree();
    void exchange(const std::vector<Tensor>& at_owner, bool back);

    const Comm ranks_;
    const DType dtype_;
    const Device device_;
    std::vector<Holders> parts_;   // of all ranks; empty before the first step
    std::map<Part, Tensor> mine_;  // views of the gradients
};

}  // namespace train70b
