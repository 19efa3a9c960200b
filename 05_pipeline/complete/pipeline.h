#pragma once
// Pipeline parallelism: each of p ranks holds some of the layers, and micro-batches follow one another through them.
//
// One executor for every schedule (schedule.h). It takes a rank's list step by step:
//     F   receive the activations x, run the chunk's layers on a tape of this micro-batch, send y
//     B   receive the gradient of y, run the tape backward, send the gradient of x
//     I   the same with the weight gradients deferred;  W  computes them
// Sends do not block and the next receive from each neighbour is posted ahead, so a rank idles only on true
// dependencies. y is released at the first step that begins after it has been received; x and what the tape keeps live
// until the end of the micro-batch's backward pass.
#include <map>
#include <set>

#include "01_single_gpu/complete/roles.h"
#include "02_data_parallel/comm.h"
#include "05_pipeline/complete/pipeline_options.h"
#include "05_pipeline/complete/schedule_simulation.h"

namespace train70b {

class Pipeline : public MicroBatchLoop {
  public:
    // model: this rank's stages; it outlives this. Tied embeddings get a partial_grad_group. row_parts: the number of
    // ranks over which sequence parallelism shards the rows of a micro-batch.
    Pipeline(Llama& model, const Comm& ranks, Schedule schedule, int64_t row_parts = 1);
    Pipeline(const Pipeline&) = delete;
    ~Pipeline() override;

    // If batches.count is not that of the schedule (--batch-ramp), the schedule of this name is made anew for it; one
    // from a file cannot be.
    // Returns the loss on the last rank, 0 on the others.
    Tensor forward_backward(const MicroBatches& batches) override;
    Tensor forward_only(const Batch& batch) override;

    // With measuring on, the host synchronizes with the device after each step (F, B, ...), so that the step can be
    // timed.
    void measure(bool on) { measures_ = on; }
    // All ranks' spans in the last measured training step, on a common clock. Collective; the same result on all ranks.
    Timeline measured() const;
    int64_t most_in_flight() const { return most_in_flight_; }  // micro-batches (times chunks) at once, in that step

  private:
    // What a stage sends: its activations (forward), or the gradient of its input (backward).
    struct Message {
        bool forward;
        int64_t micro_batch, stage;  // stage index of the sender
        auto operator<=>(const Message&) const = default;
    };
    // Point to point, of activations or of gradients, from one rank to another: to or from this rank.
    struct Channel {
        Comm comm;
        bool forward;                   // activations
        int64_t from, to;               // in the pipeline
        int peer;                       // in comm: the other of the two
        std::vector<Message> expected;  // receives, in the order in which the other rank sends
        size_t next = 0;                // in expected: the next receive to post
        std::map<Message, Tensor> arrived;
        std::optional<std::pair<Message, Tensor>> posted;  // a receive not yet waited for
        Work recv;                                         // of `posted`
    };
    struct InFlight {  // one micro-batch in one chunk, between F and the end of its backward pass
        Tape tape;
        std::shared_ptr<Tensor> input_grad, output_grad;
        Tape::Steps wgrads;  // deferred weight gradients, between I and W
    };

    void open_channels(const Placement& placement);
    Channel& channel(bool forward, int64_t from, int64_t to);
    void use(Schedule schedule);  // CHECKs it, and lists the messages to receive
    void tie_embeddings();
    bool has_below(int64_t stage) const { return stage > 0; }
    bool has_above(int64_t stage) const { return stage + 1 < schedule_.stage_count(); }
    void send(const Message& message, const Tensor& x);
    Tensor receive(const Message& message);
    void post_next(Channel& channel);
    void forward(const Step& step, const Batch& batch);
    void backward(const Step& step);
    void time(const Step& step, const std::function<void()>& work);
    Tensor no_loss() const;

    Llama& model_;
    const Comm ranks_;
    Schedule schedule_;
    const int64_t row_parts_;
    std::set<std::pair<int64_t, int64_t>> splits_;  // micro-batch, chunk: weight gradients in a step of their own
    bool measures_ = false;
    // Activations go up, from the stage below to the stage above; gradients go down. In the order in which all ranks
    // opened them.
    std::vector<Channel> channels_;
    std::map<Message, Tensor> kept_;  // between two stages of this rank, as at the turn of a V
    std::map<std::pair<int64_t, int64_t>, InFlight> in_flight_;  // micro-batch, chunk
    std::vector<Work> sends_;
    Shape activation_shape_;  // of what two stages exchange: (R, E)
    Tensor loss_;
    std::vector<Timeline::Span> spans_;
    int64_t most_in_flight_ = 0;
};

}  // namespace train70b
