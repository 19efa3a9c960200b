#pragma once
// All that a run stands on, made in the order in which it can fail: usage errors before the output files are opened.
#include "01_single_gpu/trainer.h"

namespace train70b {

class TrainingRun {
  public:
    TrainingRun(const TrainOptions& options, const nlohmann::ordered_json& flags, const std::optional<Stage>& = {});
    // After this a chapter changes the model and gives the trainer its roles; then allocate(), then trainer.run().
    void allocate();  // weights, initial or loaded; prints what is trained on what

  private:
    const TrainOptions options_;
    std::optional<HfWeights> weights_;  // --load-hf

  public:
    Dataset data;
    Llama model;
    Trainer trainer;
};

}  // namespace train70b
