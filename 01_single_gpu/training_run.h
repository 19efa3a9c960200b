#pragma once
// Everything a run needs, constructed so that usage errors are found before output files are opened.
#include "01_single_gpu/alarms.h"
#include "01_single_gpu/io/prometheus.h"

namespace train70b {

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
};

}  // namespace train70b
