#pragma once
// Sizes that grow over the first steps of a run: --batch-ramp, the sequences of a step (GPT-3, Brown et al. 2020,
// appendix B), and --seq-ramp, their length (Li et al. 2022, The Stability-Efficiency Dilemma). Neither depends on the
// layout, so every layout trains on the same tokens.
#include <cstdint>
#include <string>
#include <vector>

namespace train70b {

// FROM:TO:STEPS. Step s has the size FROM + (TO - FROM) (s - 1) / STEPS, rounded down to a size that is allowed, and TO
// after STEPS steps.
struct Ramp {
    int64_t from = 0, to = 0, steps = 0;  // steps 0: no ramp
    explicit operator bool() const { return steps > 0; }
    int64_t linear(int64_t step) const;  // before rounding; step from 1
    std::string text() const;            // "4:16:100"
};
Ramp parse_ramp(const std::string& text);           // of a text without a problem
std::string ramp_problem(const std::string& text);  // for the flag's check: what is wrong, or ""
constexpr int64_t kMaxRampSteps = 1'000'000;

// The sizes of every step. A sample of the data is a window of --seq-len + 1 tokens. A batch ramp takes fewer samples;
// a sequence ramp cuts each sample into equal pieces, so a step keeps its tokens and has more, shorter sequences.
class StepSizes {
  public:
    StepSizes() = default;
    // The sizes after the ramps. A batch grows in multiples of gcd(FROM, TO) samples; lengths are those multiples of
    // FROM that divide TO.
    StepSizes(int64_t global_batch, int64_t seq_len, const Ramp& batch = {}, const Ramp& seq = {});

    int64_t samples(int64_t step) const;  // steps from 1
    int64_t seq_len(int64_t step) const;
    int64_t pieces(int64_t step) const { return seq_len_ / seq_len(step); }  // sequences of one sample
    int64_t sequences(int64_t step) const { return samples(step) * pieces(step); }
    int64_t tokens(int64_t step) const { return samples(step) * seq_len_; }
    int64_t first_sample(int64_t step) const;  // samples of all steps before this one
    int64_t tokens_until(int64_t step) const { return first_sample(step) * seq_len_; }
    bool vary() const { return batch_ || seq_; }

  private:
    int64_t global_batch_ = 0, seq_len_ = 0;
    Ramp batch_, seq_;
    std::vector<int64_t> first_;  // of steps 1 to batch_.steps + 1
};

}  // namespace train70b
