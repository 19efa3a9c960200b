#pragma once
// The training loop of all eight chapters, with slots where a technique steps in.
//
//   for each step:  forward_backward (all micro-batches)  ->  reduce_gradients  ->  gradient_norm  ->  clip, update
#include "01_single_gpu/io/data.h"
#include "01_single_gpu/io/reference.h"

namespace train70b {

class Trainer {
  public:
    // Opens the output files: construct it last, when everything else is known to be possible.
    Trainer(const TrainOptions& options, Llama& model, const Dataset& data, const nlohmann::ordered_json& flags);
    Trainer(const TrainOptions& options, Llama& model, const Dataset& data);  // of a run that no command line asked for

    // ---- slots; each has its one-rank default ----
    int64_t data_rank = 0, data_ranks = 1;  // whose part of the global batch this rank computes
    // The tokens of each sequence that this rank computes; empty: all (chapter 06). Rows of a batch: stretch by
    // stretch, in each of them sequence by sequence.
    std::vector<Stretch> tokens;
    int64_t ranks = 1;                 // devices that work on a step: MFU is a mean over them
    std::function<void()> start_step;  // empty, or what comes before everything else
    std::function<void(const std::function<void()>&)>
        writing;                                           // calls the function, in which rank 0 writes large files
    std::function<void()> begin;                           // empty, or what follows the last change of the weights
    std::function<Tensor(int64_t step)> forward_backward;  // returns this rank's share of the loss, (1)
    std::function<Tensor(const Batch&)> forward_only;      // the same of a batch, without gradients: evaluation
    std::function<void()> reduce_gradients;                // empty: nothing to reduce
    std::function<void(int64_t step)> after_gradients;     // empty, or writes step 1's gradients (--save-reference)
    std::function<double()> gradient_norm;                 // of the whole model
    std::function<double()> parameter_norm;
    MakeOptimizer make_optimizer;                                              // AdamW
    std::function<void(double lr, double grad_scale)> update;                  // the optimizer on whole parameters
    std::function<double(double)> sum_over_ranks;                              // empty: this rank is all there is
    std::function<void(StepReport&)> finish_report;                            // adds communication bytes and seconds
    std::function<nlohmann::ordered_json(const MemoryPeak&)> memory_per_rank;  // the summary's list
    // Where this rank has a parameter's gradient once it has been reduced: a shard may hold a part of it, or none.
    std::function<std::vector<Tensor>(const Param&)> gradient_parts;
    Whole whole;  // a parameter's data or gradient, gathered on rank 0 to be saved

    void run();

    // The parts of the loop, for slots to build on.
    int64_t micro_batches() const { return options_.accumulation(data_ranks); }
    Batch micro_batch(int64_t step, int64_t index);  // of this rank; step from 1
    double evaluate();                               // mean loss over the validation part
    const MemoryPeak& peak() const { return run_peak_; }

  private:
    std::vector<std::vector<int32_t>> samples(int64_t step) const;  // of the global batch
    Batch make_batch(const std::vector<std::vector<int32_t>>& samples, double target_tokens) const;
    void write(const std::function<void()>& files);
    StepReport step(int64_t number);
    void check_finite(const StepReport& report);
    LlamaConfig saved_config() const;
    void finish(const StepReport& last, double train_seconds);

    const TrainOptions options_;
    Llama& model_;
    const Dataset& data_;
    std::unique_ptr<Optimizer> optimizer_;  // behind the default of update
    std::optional<OutputFile> timeline_file_, trace_file_;
    std::optional<HfSaver> hf_;
    std::optional<ReferenceWriter> reference_;
    Metrics metrics_;
    Progress progress_;
    MemoryPeak run_peak_;
    double data_seconds_ = 0;
};

// All that a run stands on, made in the order in which it can fail: usage errors before the output files are opened.
class TrainingRun {
  public:
    TrainingRun(const TrainOptions& options, const nlohmann::ordered_json& flags, const std::optional<Stage>& = {});
    // After this come the chapter's apply_...(model) and the trainer's slots; then materialise(), then trainer.run().
    void materialise();  // allocates the model, initial or loaded, and says what will be trained on what

  private:
    const TrainOptions options_;
    std::optional<HfWeights> weights_;  // --load-hf

  public:
    Dataset data;
    Llama model;
    Trainer trainer;
};

// Continues a prompt with `count` tokens, drawn from the model's distribution at temperature 0.8; a pure function of
// the weights and the seed. The context is the last seq_len tokens.
std::vector<int32_t> generate(Llama& model, std::vector<int32_t> prompt, int64_t count, int64_t seq_len, uint64_t seed);
std::string printable(const std::vector<int32_t>& tokens, bool bytes);  // text of byte tokens, else numbers

}  // namespace train70b
