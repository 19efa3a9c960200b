#pragma once
// The tables of chapter 06, of a run's last step: who computes how much, what is sent, what is kept.
#include "02_data_parallel/runtime/program.h"
#include "06_context_parallel/complete/context_parallel.h"
#include "06_context_parallel/complete/gather_attention.h"

namespace train70b {

// A step of micro-batches of options.micro_batch sequences: bytes that this rank sent for one block and micro-batch,
// counted and by the formula; what the gather keeps beside one rank's activations divided by N.
struct ContextStep {
    ContextTraffic sent, formula;
    int64_t activations_formula = 0;
    GatherMemory gather_formula;
};
ContextStep context_step(const TrainOptions& options, const Llama::Options& types, const ContextLayout& layout,
                         const Comm& ranks, const StepReport& step, int64_t micro_batches);

// Attention's operations in a run's last step, forward and backward, by rank: counted, and seconds of CPU time.
// Collective over the context-parallel ranks.
class AttentionWork : public RunControl {
  public:
    AttentionWork(Trainer& trainer, const Comm& ranks) : trainer_(trainer), ranks_(ranks) {
        trainer.controls.push_back(this);
    }
    void before_step(int64_t step) override;
    bool after_step(const StepReport& step) override;

    std::vector<double> flops, cpu_s;

  private:
    Trainer& trainer_;
    const Comm ranks_;
};

void say_layout(const Program& program, const std::string& algorithm, const ContextLayout& layout);
void print_tables(const Program& program, const Comm& ranks, const std::string& algorithm, const ContextLayout& layout,
                  const AttentionWork& work);

}  // namespace train70b
