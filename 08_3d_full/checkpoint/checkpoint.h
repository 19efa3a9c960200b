#pragma once
// Checkpoints: a run that is killed at any moment goes on from its newest complete checkpoint, in any layout.
//
//   step         all ranks: forward, backward, update         rank 0's writer thread        the others' writer threads
//   12           vote: all idle; copy the states (snapshot)   step-12.tmp/rank-00000...     step-12.tmp/rank-0000r...
//   13           vote: some are busy                          ... fsync                       ... fsync
//   14           vote: all idle, none failed: commit          manifest.json, fsync,
//   15                                                        rename to step-12, fsync
//
// A step waits for the copy and for the vote, a sum of three numbers. If a rank fails to write, its vote says so, and
// the checkpoint is dropped: the one before it stays, and training goes on. If the disk is full, what --keep does not
// keep is removed, so that the next one has room. This is a two-phase commit, decided by the rename: a folder without
// .tmp is complete.
#include <nlohmann/json.hpp>

#include "01_single_gpu/complete/trainer.h"
#include "08_3d_full/checkpoint/after_checkpoint.h"
#include "08_3d_full/checkpoint/durable.h"
#include "08_3d_full/checkpoint/folder.h"
#include "08_3d_full/checkpoint/snapshot.h"

namespace train70b {

class Checkpoints : public RunControl {
  public:
    // flags: for the manifest. All must outlive this object.
    Checkpoints(const CheckpointFolder& folder, const ParallelConfig& config, const nlohmann::ordered_json& flags,
                Trainer& trainer, const Comm& world);

    int64_t first_step() override;
    int64_t last_step() const override {
        return options_.stop_after > 0 ? options_.stop_after : trainer_.options.steps;
    }
    bool after_step(const StepReport& report) override;
    void finish() override;
    int64_t host_bytes() const { return snapshot_ ? snapshot_->bytes() : 0; }

  private:
    struct Written {  // one checkpoint, from its snapshot to its commit
        int64_t step = 0;
        std::vector<std::string> folders;  // "step-12", "weights-12"
        double copy_s = 0, begin = 0;
    };
    double failure_vote();  // of this rank's writer, since the last call
    void take_snapshot(bool full, bool weights);
    void end_pending();
    void commit(const Written& checkpoint);
    void report_committed();
    void wait_for_pending();
    void note_failure(int64_t step, double failures);
    nlohmann::ordered_json manifest_of(int64_t step, const std::string& kind) const;

    const CheckpointOptions& options_;
    const ParallelConfig& config_;
    const nlohmann::ordered_json& flags_;
    const nlohmann::ordered_json data_;
    Trainer& trainer_;
    const Comm world_;
    const std::optional<Manifest>& start_;

    AfterCheckpoint after_;  // on rank 0
    std::optional<Snapshot> snapshot_;
    std::optional<Written> pending_;
    bool full_is_due_ = false, weights_are_due_ = false;
    double failures_ = 0;                 // of all ranks, since the pending checkpoint's snapshot: sum of their votes
    int64_t step_ = 0;                    // the last one that has ended
    int64_t newest_ = 0, last_full_ = 0;  // steps of full checkpoints: the last that all ranks wrote; or are writing
    int64_t committing_ = 0;              // step of the last commit that has begun
    std::mutex mutex_;
    std::vector<nlohmann::ordered_json> committed_;  // events, from rank 0's writer thread
    BackgroundWriter writer_;                        // last: its thread uses the above
};

}  // namespace train70b
