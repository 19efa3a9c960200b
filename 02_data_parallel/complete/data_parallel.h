#pragma once
// Data parallelism: N copies of the model, each with 1/N of the batch; gradient = sum over ranks of the ranks'
// gradients.
//
// All gradients lie in one flat buffer, in the order in which the backward pass completes them: head, last block, ...,
// first block, embedding. So the buffer fills from the left, and a bucket (--bucket-mb of it) can be reduced as soon as
// all of it is complete:
//
//   |=== head ===|=== block 3 ===|=== block 2 ===|... block 1 ...|... block 0 ...|... embedding ...|
//   [ bucket 0 |  bucket 1 |  bucket 2 |  bucket 3 |  ...
//     reduced     reduced     in flight             ^ complete up to here: backward is in block 1 now
//
//   naive       --bucket-mb 0 --overlap off   one all-reduce per parameter, after the backward pass
//   bucketed    --overlap off                 one per bucket, after the backward pass (fewer and larger messages)
//   overlapped  --overlap on                  one per bucket, as early as it can be, behind the backward pass
//                                             (Li et al. 2020, section 3.2)
// The loss is scaled by the tokens of the global batch, so the sum needs no division. There is one reduction per step,
// whatever the number of micro-batches.
#include "01_single_gpu/complete/flags/flags.h"
#include "01_single_gpu/complete/trainer.h"
#include "02_data_parallel/comm.h"

namespace train70b {

struct DataParallelOptions {
    double bucket_mb = 25;  // MiB; 0: each parameter by itself
    bool overlap = true;
};

// --dp (0: whatever the ranks leave), --bucket-mb, --overlap
void add_data_parallel_flags(Flags& flags, int64_t& dp, DataParallelOptions& options);

class DataParallel : public LocalStore {
  public:
    // Wraps the model's units: construct it after whatever narrows the parameters, and before allocate(). The model
    // must outlive it.
    DataParallel(Llama& model, const Comm& ranks, const DataParallelOptions& options, MakeOptimizer make_optimizer);
    DataParallel(const DataParallel&) = delete;

    void allocate(uint64_t seed) override;  // gradients: one flat buffer for the model
    void begin_step(int64_t micro_batches) override;
    void finish_gradients() override;  // reduces what is left, and waits
    double matrix_squares() const override;
    GroupPtr state_replicas(const Param&) const override;

    int64_t gradient_bytes() const { return flat_.bytes(); }
    int64_t buckets() const { return int64_t(buckets_.size()); }

  private:
    void divide_into_buckets();
    void unit_ready(size_t number);
    void reduce_ready_buckets();

    struct Bucket {
        int64_t begin, end;  // elements of the flat buffer
    };
    const Comm ranks_;
    const DataParallelOptions options_;
    Tensor flat_;                           // all gradients
    std::vector<Unit*> units_;              // in the order of the backward pass
    std::vector<int64_t> unit_end_;         // where each one's gradients end
    std::vector<int64_t> runs_;             // of each per micro-batch: 2 for the embedding if the head is tied to it
    std::vector<int64_t> passes_;           // backward passes of each in this step
    int64_t micro_batches_ = 1;             // of this step
    std::vector<Bucket> buckets_;           // in the order of the buffer
    size_t ready_units_ = 0, reduced_ = 0;  // units whose gradients are complete; buckets whose reduction has begun
    std::vector<Work> in_flight_;
};

}  // namespace train70b
