#pragma once
// Reference runs: everything that another implementation needs to train on the same tokens from the same weights, and
// to see where it first departs. docs/reference-format.md describes the files.
#include "01_single_gpu/io/hf.h"
#include "01_single_gpu/io/options.h"
#include "01_single_gpu/io/report.h"

namespace train70b {

std::vector<std::string> reference_files();  // the names of a reference folder's files

// Writes a reference folder, alongside training. Construction (before training) opens every file; none of them has its
// name before finish(). Rank 0 writes; the others take part in `whole`.
class ReferenceWriter {
  public:
    ReferenceWriter(const TrainOptions& options, const LlamaConfig& config, const nlohmann::ordered_json& flags);
    void initial_weights(const Whole& whole);  // before step 1
    void gradients(const Whole& whole);        // at step 1: reduced over all ranks, before clipping
    void step(const StepReport& report, const std::vector<std::vector<int32_t>>& samples);
    void after_step_1(const Whole& whole);  // the weights that step 1 leaves
    void finish();

  private:
    std::vector<Param> params_;
    DType dtype_ = DType::f32;
    std::optional<OutputFolder> folder_;  // of rank 0, like the files
    std::optional<SafetensorsWriter> initial_, gradients_, after_step_1_;
    std::optional<OutputFile> config_file_, json_file_;
    int64_t steps_ = 0;
};

// How far run a is from run b, both reference folders. A NaN is farther than everything.
struct Deviation {
    std::string name;     // of a parameter, or "step 3"
    double relative = 0;  // ||a - b|| / ||b||
    double size = 0;      // ||b||
};
struct Comparison {
    DType dtype = DType::f32;    // the wider of the two: the less exact one, which sets the tolerance
    bool same_dtype = true;      // then the initial weights must be equal, whatever the tolerance
    bool judge_updates = false;  // both runs have the weights after step 1, and AdamW made them
    bool same_tokens = true;
    int64_t samples = 0, steps = 0;
    std::vector<std::string> problems;  // what cannot be compared: names, shapes, numbers of steps
    // The worst first. updates: of the weights after step 1, what neither the gradients' own deviations nor the
    // rounding of the stored weights explain, against the size of the update. losses and norms: of the steps that are
    // judged; later_losses, later_norms: of those beyond.
    std::vector<Deviation> weights, gradients, updates, losses, norms, later_losses, later_norms;

    double default_tolerance() const;
    bool within(double tolerance) const;
    std::vector<std::string> beyond(double tolerance) const;  // a line for each kind that is not within it
};
// Usage error for a folder that is not a reference run.
Comparison compare_references(const std::string& a, const std::string& b);
std::string comparison_table(const Comparison& comparison, double tolerance);  // ends with the verdict

}  // namespace train70b
