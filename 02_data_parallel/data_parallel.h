#pragma once
// Data parallelism: N copies of the model, each with 1/N of the batch; gradient = sum over ranks of the ranks'
// gradients.
//
// All gradients lie in one flat buffer, in the order in which the backward pass completes them: head, last block, ...,
// first block, embedding. So the buffer fills from the left, and a bucket, a stretch of --bucket-mb of it, may leave as
// soon as the mark of what is complete has passed its end:
//
//   |=== head ===|=== block 3 ===|=== block 2 ===|... block 1 ...|... block 0 ...|... embedding ...|
//   [ bucket 0 |  bucket 1 |  bucket 2 |  bucket 3 |  ...
//     gone        gone        on its way            ^ the mark: backward is in block 1 now
//
//   naive       --bucket-mb 0 --overlap off   one all-reduce per parameter, after the backward pass
//   bucketed    --overlap off                 one per bucket, after the backward pass (fewer and larger messages)
//   overlapped  --overlap on                  one per bucket, as early as it can be, behind the backward pass
//                                             (Li et al. 2020, section 3.2)
// The loss is scaled by the tokens of the global batch, so the sum needs no division. It is taken once per step,
// whatever the number of micro-batches.
#include "01_single_gpu/trainer.h"
#include "02_data_parallel/comm.h"

namespace train70b {

struct DataParallelOptions {
    double bucket_mb = 25;  // MiB; 0: each parameter by itself
    bool overlap = true;
    int64_t micro_batches = 1;  // of a step: a bucket leaves in the last one's backward pass
};

// --dp (0: whatever the ranks leave), --bucket-mb, --overlap
void add_data_parallel_flags(Flags& flags, int64_t& dp, DataParallelOptions& options);

class DataParallel {
  public:
    // Before the model is materialised (the gradients are allocated here), and after whatever narrows its parameters.
    // The model and the communicator outlive this.
    DataParallel(Llama& model, const Comm& ranks, const DataParallelOptions& options);
    DataParallel(const DataParallel&) = delete;

    void attach(Trainer& trainer);  // fills the slots of data parallelism
    void finish();                  // after the last backward pass of a step: all gradients are sums over the ranks

    int64_t gradient_bytes() const { return flat_.bytes(); }
    int64_t buckets() const { return int64_t(buckets_.size()); }

    // For comparisons on one model: the same gradients, divided and sent otherwise.
    void use(const DataParallelOptions& options);

  private:
    void allocate();
    void unit_is_ready(size_t number);
    void send_ready_buckets();

    struct Stretch {
        int64_t begin, end;  // elements of the flat buffer
    };
    Llama& model_;
    const Comm ranks_;
    DataParallelOptions options_;
    Tensor flat_;                        // all gradients
    std::vector<Unit*> units_;           // in the order of the backward pass
    std::vector<int64_t> unit_end_;      // where each one's gradients end
    std::vector<int64_t> passes_;        // backward passes of each in this step
    std::vector<Stretch> buckets_;       // in the order of the buffer
    size_t ready_units_ = 0, sent_ = 0;  // units whose gradients are complete; buckets that have left
    std::vector<Work> under_way_;
};

}  // namespace train70b
