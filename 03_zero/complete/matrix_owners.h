#pragma once
// Muon where ranks hold parts of matrices: shards (ZeRO), rows or columns (tensor parallelism). The ranks that hold all
// of a pipeline stage between them divide its matrices: each has one owner.
//
//     each rank:  u of its parts  --all-to-all-->  owner: the whole u, orthogonalized  --all-to-all-->  its parts again
//
// Owners are chosen by cost: the dearest matrix first, to the rank that has the least. A part that several ranks hold
// (key heads under tp) goes to the owner from one of them, its own if it has one, and comes back to all. Values travel
// in the dtype of the parameters: a rank sends its shard twice. Replicas (ZeRO-0, hybrid shard) do this each by itself.
#include <map>

#include "01_single_gpu/complete/llama.h"
#include "01_single_gpu/complete/muon.h"
#include "02_data_parallel/comm.h"

namespace train70b {

class MatrixOwners : public Orthogonalizer {
  public:
    // ranks: those that hold the matrices of the model's blocks between them. The model outlives this.
    MatrixOwners(const Comm& ranks, Llama& model) : ranks_(ranks), model_(model) {}

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
        std::vector<int> ranks;   // ascending
        int owner = 0, from = 0;  // from: whose copy goes to the owner, its own if it has one
    };
    // of_ranks: the parts of each rank. Whole matrices one after another, and each from its beginning to its end.
    static std::vector<Holders> plan(const std::vector<std::vector<Part>>& of_ranks);

  private:
    void orthogonalize() override;
    void agree();
    std::vector<Part> parts_of_others() const;
    void exchange(const std::vector<Tensor>& at_owner, bool back);

    const Comm ranks_;
    Llama& model_;
    std::vector<Holders> parts_;   // of all ranks; empty before the first step
    std::map<Part, Tensor> mine_;  // views of the gradients
};

}  // namespace train70b
