#pragma once
// Pipeline parallelism: each of p ranks holds some of the layers, and micro-batches follow one another through them.
//
// One executor for every schedule (schedule.h). It takes a rank's list step by step:
//     F   receive the activations x, run the chunk's layers on a tape of this micro-batch, send y
//     B   receive the gradient of y, run the tape backward, send the gradient of x
//     I   the same, with the weight halves put aside;  W  runs them
// Sends do not block and the next receive from each neighbour is posted ahead, so a rank idles only on true dependencies.
// y is released at the beginning of a step once it has been received; x, and what the tape keeps, live until the end of
// the micro-batch's backward pass.
#include <map>

#include "01_single_gpu/roles.h"
#include "02_data_parallel/comm.h"
#include "05_pipeline/simulate.h"

namespace train70b {

struct PipelineOptions {
    std::string schedule = "1f1b";
    int64_t virtual_stages = 0;         // chunks per rank; 0: 2 if interleaved, else 1
    std::vector<int64_t> stage_layers;  // of each part in the model's order; empty: equally many
    int64_t chunks() const { return virtual_stages > 0 ? virtual_stages : schedule == "interleaved" ? 2 : 1; }
};
class Pipeline : public MicroBatchLoop {
  public:
    // model: this rank's stage; the model outlives this. row_parts: sequence parallelism leaves one part of so many of a
    // micro-batch's rows on each rank.
    Pipeline(Llama& model, const Comm& ranks, Schedule schedule, int64_t row_parts = 1);
    Pipeline(const Pipeline&) = delete;
    ~Pipeline() override;

    // As many micro-batches as the schedule has. The loss is the last rank's; 0 on the others.
    Tensor forward_backward(const MicroBatches& batches) override;
    Tensor forward_only(const Batch& batch) override;

    // With measuring on, the device is waited for after each step (F, B, ...), so that its time means something.
    void measure(bool on) { measures_ = on; }
    // What every rank did in the last measured step, on all ranks, by a clock they share; between the spans a rank
    // waits.
    Timeline measured() const;
    int64_t most_in_flight() const {
        return most_in_flight_;
    }  // micro-batches (times chunks) held at once, in that step

  private:
    // The output of a part of the model: activations of a forward pass, or the gradient of its input.
    struct Message {
        bool forward;
        int64_t micro_batch, part;
        auto operator<=>(const Message&) const = default;
    };
    struct Channel {  // to or from one neighbour, in one direction
        Comm comm;
        int peer = 0;                   // in comm
        std::vector<Message> expected;  // in the order in which the neighbour sends them
        size_t taken = 0;
        std::map<Message, Tensor> arrived;
        std::optional<std::pair<Message, Tensor>> ahead;  // posted, not yet waited for
        Work work;
    };
    struct InFlight {  // one micro-batch in one chunk, between F and the end of its backward pass
        Tape tape;
        std::shared_ptr<Tensor> input_grad, output_grad;
        Tape::Steps wgrads;
    };

    bool has_below(int64_t part) const { return part > 0; }
    bool has_above(int64_t part) const { return part + 1 < schedule_.parts(); }
    void send(Channel& channel, const Tensor& x);
    Tensor receive(Channel& channel, const Message& message, const Shape& shape);
    void post_next(Channel& channel, const Shape& shape);
    void release_sent();  // of what has been sent
    void forward(const Step& step, const Batch& batch);
    void backward(const Step& step);
    void time(const Step& step, const std::function<void()>& work);
    Tensor no_loss() const;

    Llama& model_;
    const Comm ranks_;
    const Schedule schedule_;
    const int64_t row_parts_;
    bool splits_ = false;  // the schedule computes weight gradients in steps of their own
    bool measures_ = false;
    // Activations go up: in from the rank below, out to the rank above; gradients come down.
    Channel up_in_, up_out_, down_in_, down_out_;
    std::map<std::pair<int64_t, int64_t>, InFlight> in_flight_;  // micro-batch, chunk
    std::vector<Work> sends_;
    Shape hidden_;  // of the activations between two stages
    Tensor loss_;
    std::vector<Timeline::Span> spans_;
    int64_t most_in_flight_ = 0;
};

}  // namespace train70b
