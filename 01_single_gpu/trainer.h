#pragma once
// The training loop of all eight chapters. A technique does not change it but implements one of the roles (roles.h).
//
//   step:  loop: forward and backward of all micro-batches -> store: reduce gradients -> norm, clip -> store: update
#include "01_single_gpu/data/batches.h"
#include "01_single_gpu/report/reference.h"
#include "01_single_gpu/roles.h"

namespace train70b {

// Callbacks for tests and tables.
class Observer {
  public:
    virtual ~Observer() = default;
    virtual void gradients_ready(int64_t /*step*/) {}  // summed over all ranks, before clipping
    virtual void step_done(const StepReport&) {}
};

class Trainer {
  public:
    // Opens the output files, so construct it last. The model and the data must outlive this object.
    Trainer(const TrainOptions& options, Llama& model, const Dataset& data, const nlohmann::ordered_json& flags);
    Trainer(const TrainOptions& options, Llama& model, const Dataset& data);  // without a command line
    Trainer(const Trainer&) = delete;

    // ---- the roles: initially those of one rank; a chapter replaces the ones it implements, before allocate() ----
    ParamStore* store;  // not owned, like the others; never null
    MicroBatchLoop* loop;
    Groups groups;
    Runtime* runtime;
    std::vector<StepState*> step_states;
    std::vector<RunControl*> controls;
    Observer* observer = nullptr;  // may be null
    Batches batches;               // the tokens of this rank

    void allocate() { store->allocate(options_.seed); }
    void run();  // trains up to step --steps from the allocated weights and writes the output files

    // The parts of run(), for tables and tests.
    int64_t micro_batches(int64_t step) const { return batches.count(*groups.dp, step); }  // on this rank
    Batch micro_batch(int64_t step, int64_t index);
    void start();                     // after the weights are final: creates the optimizer states
    StepReport step(int64_t number);  // consecutive numbers
    // Mean loss over the validation split of each source, in their order; empty where a source has none.
    std::vector<std::optional<double>> evaluate_sources();
    double evaluate();  // their mean by weight; if all of these weights are 0, by number of sequences
    // Continues the prompt (options) by `count` tokens, which are returned behind it. Collective; equal on all ranks.
    std::vector<int32_t> generate(int64_t count);
    double norm(Which which) const;  // of the full model
    Tensor full(const Param& param, Which which) const { return full_param(model_, *store, groups, param, which); }
    const MemoryPeak& peak() const { return run_peak_; }
    // Prints a line between progress lines and writes an event to the metrics file; null: no event.
    void note(const std::string& line, const nlohmann::ordered_json& event);

  private:
    double mean_of_sources(const std::vector<std::optional<double>>& losses) const;
    void write_evaluation(int64_t step);
    // Both sum `votes` in the same messages: sum_loss over dp_cp and pp, norm over tp.
    std::vector<double> sum_loss(const Tensor& mine, std::vector<double>& votes) const;  // as many as `mine` has
    double norm(Which which, std::vector<double>& votes) const;
    // All ranks meet after the step's time was taken: adds the slowest rank. If a loss or norm is not finite, writes an
    // alarm that names the first parameter and its rank, and throws CommonError on all ranks. my_loss: before the sum.
    // With documents, also sums the pairs that attention computes.
    void compare_ranks(StepReport& report, double my_loss);
    void record(const nlohmann::ordered_json& event);
    void print_sample(int64_t step);
    LlamaConfig saved_config() const;
    Tensor saved(const Param& param, const Tensor& full) const;  // what --save-hf writes of it
    std::string rank_title() const;                              // in a trace
    void collect_votes(int64_t step);
    void each_with_votes(const std::function<void(RunControl&, const std::vector<double>& sums)>& body) const;
    bool after_step(const StepReport& report);  // whether the run goes on
    void finish(const StepReport& last, int64_t first_step, int64_t last_step, double train_seconds);

    const TrainOptions options_;
    Llama& model_;
    const Dataset& data_;
    LocalStore local_store_;
    Accumulate accumulate_;
    Runtime one_rank_;
    std::optional<OutputFile> timeline_file_, trace_file_;
    std::optional<HfSaver> hf_;
    std::optional<ReferenceWriter> reference_;
    Metrics metrics_;
    Progress progress_;
    MemoryPeak run_peak_;
    std::map<int64_t, double> document_pairs_;  // of the step's micro-batches on this rank
    std::vector<double> votes_;  // of all controls, one behind another, summed over all ranks: of the last step
    std::vector<size_t> vote_counts_;
};

}  // namespace train70b
