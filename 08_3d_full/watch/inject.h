#pragma once
// Fault injection, for drills: does the run end, does it say why, does it resume? A rank fails at a given step as real
// machines do.
//
//   kill             SIGKILL: a crashed process, a lost node
//   hang             its main thread sleeps for ever: a driver that does not return
//   stop             SIGSTOP: all its threads, so that no heartbeat is left
//   slow             from that step on, each step takes twice as long: a throttled GPU
//   nan              one element of its gradient becomes NaN, before the norm
//   wrong-sum        from that step on, its gradient of one parameter is missing in the sum over the ranks: a bucket
//                    that is sent too early. The loss decreases nevertheless, and the replicas stay equal
//   wrong-group      from that step on, its gradients of parameters over ep are divided by ep after their sum: an
//                    average over ranks that hold others. For all ranks of an edp group, or their replicas differ
//   skip-collective  leaves out one collective, the sum of the loss: a branch that not all ranks take. --comm-check on
//                    finds it at once if this rank's next collective is in the same group; otherwise a message of
//                    another length does, or the timeout
//   deadlock         it calls the sum over tp (the norm's) before that over dp (the loss's), and so does every rank of
//                    its stage whose dp + tp has the same parity: each rank waits for one that waits in the other group
//   bitflip          flips one bit of a weight after the update (the highest of the mantissa, so it stays finite): a
//                    memory error, which nothing shows but --replica-check
//
// nan, wrong-sum and bitflip take a parameter behind the step; without one they choose. wrong-group takes one, too;
// without one it takes all of those over ep.
#include "01_single_gpu/complete/trainer.h"
#include "02_data_parallel/complete/flags.h"
#include "08_3d_full/complete/layout/mesh.h"

namespace train70b {

struct Fault {
    std::string kind;
    int64_t rank = 0, step = 0;
    std::string param;  // empty: any
};

class Inject : public RunControl {
  public:
    // Announces the faults, if any. Construct it when the trainer has its roles and the model its wrappers, before
    // allocate(). The trainer outlives this, and this outlives the run.
    Inject(std::vector<Fault> faults, Trainer& trainer);

    void before_step(int64_t step) override;
    void gradients_ready(int64_t step) override;
    bool after_step(const StepReport& report) override;

  private:
    const Fault* strikes(const char* kind, int64_t step) const;  // says so; null: it does not
    void put_nan(const Fault& fault);
    void flip_bit(const Fault& fault);
    void leave_out(const Fault& fault);  // prepares wrong-sum

    std::vector<Fault> mine_;
    Trainer& trainer_;
    std::shared_ptr<bool> skip_ = std::make_shared<bool>(false);  // the next sum over a group
    double begin_ = 0;                                            // of the step
    bool slow_ = false, left_out_ = false;
};

void add_inject_flag(Flags& flags, std::string& text);  // --inject KIND:RANK:STEP[:PARAMETER],...
// Usage error for an unknown kind, a rank, step or parameter that the run does not have. A deadlock becomes one fault
// for each of its ranks.
std::vector<Fault> parse_faults(const std::string& text, const CommOptions& comm, const TrainOptions& options,
                                const Mesh& mesh);

}  // namespace train70b
