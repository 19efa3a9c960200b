#pragma once
// --batch-ramp and --seq-ramp: sizes that grow over the first steps of a run: the sequences of a step (GPT-3, Brown et
// al. 2020, appendix B), and their length (Li et al. 2022, The Stability-Efficiency Dilemma). Neither depends on the
// layout, so every layout trains on the same tokens. The micro-batch keeps its tokens: a smaller batch has fewer
// micro-batches, for which the pipeline's schedule is made anew.
#include "08_3d_full/complete/layout/config.h"

namespace train70b {

// FROM:TO:STEPS. Step s has the size FROM + (TO - FROM) (s - 1) / STEPS, rounded down to a size that is allowed, and TO
// after STEPS steps. linear(): before rounding; step from 1.
struct Ramp {
    int64_t from = 0, to = 0, steps = 0;  // steps 0: no ramp
    explicit operator bool() const { return steps > 0; }
    int64_t linear(int64_t step) const { return step > steps ? to : from + (to - from) * (step - 1) / steps; }
    std::string text() const { return fmt::format("{}:{}:{}", from, to, steps); }
};
Ramp parse_ramp(const std::string& text);           // of a text without a problem
std::string ramp_problem(const std::string& text);  // for the flag's check: what is wrong, or ""
constexpr int64_t kMaxRampSteps = 1'000'000;

struct Ramps {
    Ramp batch, seq;
};
void add_ramp_flags(Flags& flags, Ramps& ramps);
// Sequences of a micro-batch where the flag is not given: the most that divides every size of the batch ramp over the
// data-parallel ranks; 0 without a ramp.
int64_t ramp_micro_batch(const Ramps& ramps, int64_t dp);
// Usage error where a ramp does not end at --global-batch or --seq-len, or where one of its sizes cannot be divided.
// Call it with the config's mesh, after check_batches().
void check_ramps(const Ramps& ramps, const TrainOptions& options, const ParallelConfig& config);
void say_ramps(const Ramps& ramps);

// global_batch and seq_len are the sizes after the ramps. A batch ramp takes fewer samples, in multiples of gcd(FROM,
// TO). A sequence ramp cuts each sample into equal pieces, multiples of FROM that divide TO, so a step keeps its tokens
// and has more, shorter sequences.
class RampedSizes : public StepSizes {
  public:
    RampedSizes(int64_t global_batch, int64_t seq_len, const Ramps& ramps);
    int64_t samples(int64_t step) const override;
    int64_t seq_len(int64_t step) const override;
    int64_t first_sample(int64_t step) const override;
    bool vary() const override { return ramps_.batch || ramps_.seq; }

  private:
    const Ramps ramps_;
    std::vector<int64_t> first_;  // of steps 1 to ramps_.batch.steps + 1
};

}  // namespace train70b
