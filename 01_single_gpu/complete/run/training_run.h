#pragma once
// Everything a run needs, constructed so that usage errors are found before output files are opened.
#include "01_single_gpu/complete/flags/options.h"
#include "01_single_gpu/complete/run/outputs.h"

namespace train70b {

// Empty, or what of these needs, in bytes, is above a limit: "23.0 GiB, but this machine has 16.0 GiB". The limits:
// RAM, the control group's, and what is left of the process's address space.
std::string memory_shortage(double machine_needs, double process_needs);
// The least limit of the control groups in `list` and of those above them, version 1 or 2; infinite if there is none.
double control_group_memory(const std::string& list = "/proc/self/cgroup", const std::string& root = "/sys/fs/cgroup");

// Usage error, before anything is allocated, for a model or a batch that cannot fit into this machine's memory under
// any parallel layout of `ranks` ranks on `nodes` machines.
void check_memory(const TrainOptions& options, const Flags& flags, double ranks = 1, double nodes = 1);

class TrainingRun {
  public:
    TrainingRun(const TrainOptions& options, const nlohmann::ordered_json& flags, const std::optional<Stage>& = {});
    // Next, a chapter modifies the model and sets the trainer's roles; then allocate(), then trainer.run().
    void allocate();  // initializes or loads the weights; prints the model, the data and the device

  private:
    const TrainOptions options_;
    std::optional<HfWeights> weights_;  // --load-hf

  public:
    Dataset data;
    Llama model;
    Trainer trainer;
    RunOutputs outputs;
};

}  // namespace train70b
