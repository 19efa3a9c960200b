#pragma once
// The folder of a run's checkpoints: the flags, and everything that can be refused before a run begins.
#include "01_single_gpu/complete/data/data.h"
#include "01_single_gpu/complete/flags/options.h"
#include "01_single_gpu/complete/hf/hf.h"
#include "02_data_parallel/comm.h"
#include "08_3d_full/checkpoint/format.h"
#include "08_3d_full/complete/layout/config.h"

namespace train70b {

constexpr int64_t kCheckpointsKept = 2;

struct CheckpointOptions {
    std::string dir;                       // empty: none
    int64_t every = 0, weights_every = 0;  // steps; 0: only when the run ends, and never
    std::optional<int64_t> keep;
    std::string after;  // a command; empty: none
    bool resume = false;
    std::string resume_from;
    int64_t stop_after = 0;  // step; 0: --steps

    bool resumes() const { return resume || !resume_from.empty(); }
    int64_t kept() const { return keep.value_or(kCheckpointsKept); }
};
void add_checkpoint_flags(CommandLine& flags, CheckpointOptions& options);
// Usage error for flags that need others, or cannot be combined.
void check_checkpoint_flags(const CheckpointOptions& options, const TrainOptions& training, const Comm& world);

// What identifies the training data: number of tokens, and the CRC-32 of the first 64 Ki of them, and of their masks;
// of several sources, the same of each, and its weight.
nlohmann::ordered_json fingerprint(const Dataset& data);

// The steps of a run that was resumed with another --global-batch. Samples are counted over all steps: none is skipped
// or repeated. The schedule of the learning rate goes by samples, in units of the first batch: a step of half of it
// advances by half a step, the warm-up takes --warmup-steps x the first batch, and the decay ends with step --steps.
class ChangedSizes : public StepSizes {
  public:
    ChangedSizes(const std::vector<BatchFrom>& batches, int64_t seq_len)
        : StepSizes(batches.back().batch, seq_len), batches_(batches) {}
    int64_t samples(int64_t step) const override { return first_sample(step + 1) - first_sample(step); }
    int64_t first_sample(int64_t step) const override;
    bool vary() const override { return batches_.size() > 1; }
    double position(int64_t step) const override { return double(first_sample(step + 1)) / double(batches_[0].batch); }

  private:
    const std::vector<BatchFrom> batches_;
};

// The file .lock of --checkpoint-dir, locked as long as this lives. Usage error if another run has it and keeps it.
class FolderLock {
  public:
    explicit FolderLock(const std::string& dir);
    ~FolderLock();  // removes the file if it was made here, unless keep() was called
    FolderLock(const FolderLock&) = delete;
    void keep() { made_ = false; }

  private:
    const std::string path_;
    int file_ = -1;
    bool made_ = false;
};

// Holds --checkpoint-dir for this run and, if it resumes, the verified checkpoint.
class CheckpointFolder {
  public:
    // Usage error for everything else that can be refused: a checkpoint of another model, run or data, corrupt or
    // missing files (and which checkpoint to try instead), a folder that has another run's checkpoints, cannot be
    // written, or is not shared by all ranks. Creates the folder if need be and locks it, then reads what is there, and
    // removes what a crash has left. Sets TrainOptions::append_metrics and step_sizes. flags: of this run. Collective.
    CheckpointFolder(const CheckpointOptions& options, TrainOptions& training, const ParallelConfig& config,
                     const nlohmann::ordered_json& flags, const Comm& world);
    CheckpointFolder(const CheckpointFolder&) = delete;

    const CheckpointOptions& options;
    std::optional<Manifest> start;  // where the run goes on; batches: this run's, too

  private:
    void make_folder();
    void open_start(std::string folder, TrainOptions& training, const nlohmann::ordered_json& flags, const Comm& world);
    void go_on_counting(TrainOptions& training, const std::string& advice);

    std::optional<OutputFolder> made_;  // on rank 0, like the lock, which goes first
    std::optional<FolderLock> lock_;
};

nlohmann::ordered_json layout_json(const Mesh& mesh);
bool same_layout(const Manifest& manifest, const Mesh& mesh);
// The full checkpoints up to step `newest` but the last `keep` of them. What is called newer is not this run's.
std::vector<int64_t> old_checkpoints(const std::string& dir, int64_t keep, int64_t newest);
void remove_checkpoints(const std::string& dir, const std::vector<int64_t>& steps);  // throws as durable.h does

}  // namespace train70b
