#pragma once
// Silent data corruption: a bit that flips in one rank's memory raises no error, but makes replicas differ that are
// equal bit for bit in a correct run. Every N steps, before the update, all ranks compare checksums (CRC-32) of
//
//   weights            over dp x cp, in ZeRO 0, 1 and 2
//   optimizer states   over dp x cp in ZeRO 0; with their weights over the replicas of a hybrid shard
//   replicas over tp   norm weights, and key/value heads on more ranks than heads, with their optimizer states
//   ... over stages    tied embeddings in a pipeline: the first and the last stage's matrix, with its optimizer states
//
// Sharded states have one copy: nothing can be compared. In ZeRO 1 and 2, and in bf16, each update overwrites the
// weights, from shards or master weights, so a flipped bit of a weight is found only by a check before the next update;
// what it did to the gradients is then in all ranks alike.
#include "01_single_gpu/complete/trainer.h"
#include "02_data_parallel/complete/flags.h"
#include "08_3d_full/complete/layout/config.h"

namespace train70b {

class ReplicaCheck : public RunControl {
  public:
    // Prints what is compared; every 0: nothing is. The trainer outlives this.
    ReplicaCheck(int64_t every, Trainer& trainer, const Comm& world, const ParallelConfig& config);

    void before_step(int64_t step) override;
    void gradients_ready(int64_t step) override {
        if (every_ > 0 && step % every_ == 0) check(step);
    }
    void finish() override {
        if (every_ > 0) check(last_ + 1);
    }

    // The first difference, as text, on the ranks that hold the tensor; elsewhere empty. Collective.
    std::string difference();

  private:
    void check(int64_t step);  // the state after step - 1

    const int64_t every_;
    Trainer& trainer_;
    const Comm world_;
    int64_t good_ = -1;  // the last step after which all replicas were equal
    int64_t last_ = 0;   // step
};

void add_replica_check_flag(Flags& flags, int64_t& every);  // --replica-check N
// Usage error if there is nothing to compare.
void check_replica_check(int64_t every, const LlamaConfig& model, const ParallelConfig& config,
                         const CommOptions& comm);

}  // namespace train70b
