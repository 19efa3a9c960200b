#pragma once
// Everything a run needs, constructed so that usage errors are found before output files are opened.
#include "01_single_gpu/alarms.h"
#include "01_single_gpu/io/prometheus.h"
#include "01_single_gpu/noise_scale.h"

namespace train70b {

double machine_memory();  // bytes of RAM

// Usage error, before anything is allocated, for a model or a batch that cannot fit into this machine's memory under
// any parallel layout of `ranks` ranks on `nodes` machines. flags: as parsed, to name what is too large.
void check_memory(const TrainOptions& options, const nlohmann::ordered_json& flags, double ranks = 1, double nodes = 1);

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
    Prometheus prometheus;
    Trainer trainer;

  private:
    SpikeAlarm spike_alarm_;
    std::optional<NoiseScale> noise_scale_;
};

}  // namespace train70b
