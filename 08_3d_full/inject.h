#pragma once
// Fault injection, for drills: does the run end, does it say why, does it resume? A rank fails at a given step as real
// machines do.
//
//   kill             SIGKILL: a crashed process, a lost node
//   hang             its main thread sleeps for ever: a driver that does not return
//   stop             SIGSTOP: all its threads, so that no heartbeat is left
//   slow             from that step on, each step takes twice as long: a throttled GPU
//   nan              one element of its gradient becomes NaN, before the norm
//   skip-collective  leaves out one collective, the sum of the loss: a branch that not all ranks take. --comm-check on
//                    finds it at once if this rank's next collective is in the same group; otherwise a message of
//                    another length does, or the timeout
//   bitflip          flips one bit of a weight after the update (the highest of the mantissa, so it stays finite): a
//                    memory error, which nothing shows but --replica-check
#include "01_single_gpu/trainer.h"
#include "02_data_parallel/flags.h"

namespace train70b {

struct Fault {
    std::string kind;
    int64_t rank = 0, step = 0;
};

class Inject : public RunControl {
  public:
    // Announces the faults, if any. Construct it when the trainer has its roles; the trainer outlives this.
    Inject(std::vector<Fault> faults, Trainer& trainer, Llama& model);

    void before_step(int64_t step) override;
    void gradients_ready(int64_t step) override;
    bool after_step(const StepReport& report, const std::vector<double>& sums) override;

  private:
    bool strikes(const char* kind, int64_t step) const;  // says so
    void put_nan(int64_t step);
    void flip_bit(int64_t step);

    std::vector<Fault> mine_;
    Trainer& trainer_;
    Llama& model_;
    std::shared_ptr<bool> skip_ = std::make_shared<bool>(false);  // the next sum over a group
    double begin_ = 0;                                            // of the step
    bool slow_ = false;
};

void add_inject_flag(Flags& flags, std::string& text);  // --inject KIND:RANK:STEP,...
// Usage error for an unknown kind, a rank or a step that the run does not have.
std::vector<Fault> parse_faults(const std::string& text, const CommOptions& comm, int64_t ranks, int64_t steps);

}  // namespace train70b
