#pragma once
// Reference runs: everything another implementation needs to train on the same tokens from the same weights, and to
// find its first deviation. docs/reference-format.md describes the files.
#include "01_single_gpu/complete/data/data.h"
#include "01_single_gpu/complete/flags/options.h"
#include "01_single_gpu/complete/hf/hf.h"
#include "01_single_gpu/complete/report/report.h"

namespace train70b {

inline constexpr const char* kReferenceFormat = "train70b reference run";

// Writes a reference folder during training. Construction (before training) opens every file; finish() renames them.
// Rank 0 writes; the other ranks take part in get_full().
class ReferenceWriter {
  public:
    ReferenceWriter(const TrainOptions& options, const LlamaConfig& config, const nlohmann::ordered_json& flags);
    void initial_weights(const GetFullParam& get_full);  // before step 1
    void gradients(const GetFullParam& get_full);        // at step 1, reduced over all ranks, before clipping
    // with_targets: some are ignored.
    void step(const StepReport& report, const std::vector<Sample>& samples, bool with_targets);
    void after_step_1(const GetFullParam& get_full);  // the weights after step 1
    void finish();

  private:
    void write(std::optional<SafetensorsWriter>& file, const GetFullParam& get_full, Which which);

    const LlamaConfig model_;
    DType dtype_ = DType::f32;
    std::optional<OutputFolder> folder_;  // on rank 0 only, like the files
    std::optional<SafetensorsWriter> initial_, gradients_, after_step_1_;
    std::optional<OutputFile> config_file_, json_file_;
    int64_t steps_ = 0;
};

}  // namespace train70b
