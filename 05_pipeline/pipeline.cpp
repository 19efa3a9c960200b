#include "05_pipeline/pipeline.h"

#include <utility>

#include "01_single_gpu/core/profile.h"
#include "02_data_parallel/runtime/comm_roles.h"

namespace train70b {

int64_t PipelineOptions::chunks() const {
    return virtual_stages > 0 ? virtual_stages : find_schedule(schedule).virtual_stages ? 2 : 1;
}

Pipeline::Pipeline(Llama& model, const Comm& ranks, Schedule schedule, int64_t row_parts)
    : model_(model), ranks_(ranks), row_parts_(row_parts) {
    // One channel up and one down between any two neighbours; with virtual stages also between the last rank and the
    // first.
    const int p = ranks.size(), rank = ranks.rank(), channels = p == 1 ? 0 : schedule.chunks > 1 ? p : p - 1;
    for (int below = 0; below < channels; ++below) {
        const int above = (below + 1) % p;
        const Comm up = ranks.p2p_channel(below, above), down = ranks.p2p_channel(above, below);
        // A channel numbers its two ranks in the order of `ranks`.
        const int above_in_pair = above > below ? 1 : 0;
        if (rank == below) send_activations_ = {up, above_in_pair}, recv_gradients_ = {down, above_in_pair};
        if (rank == above) recv_activations_ = {up, 1 - above_in_pair}, send_gradients_ = {down, 1 - above_in_pair};
    }
    use(std::move(schedule));
    tie_embeddings();
}

void Pipeline::use(Schedule schedule) {
    schedule_ = std::move(schedule);
    const int p = ranks_.size(), rank = ranks_.rank();
    CHECK(schedule_.stages == p && int64_t(model_.stage.chunks.size()) == schedule_.chunks, "{} stages of {} chunks", p,
          model_.stage.chunks.size());
    const std::string wrong = incomplete(schedule_) + deadlock(schedule_, Sends::posted);
    CHECK(wrong.empty(), "{}", wrong);
    splits_ = false;
    for (const Step& step : schedule_.ranks[size_t(rank)]) splits_ = splits_ || step.pass == Pass::backward_weight;
    // The receives to post, in the order of the neighbours' steps.
    for (Channel* channel : {&recv_activations_, &recv_gradients_}) channel->expected.clear();
    for (const Step& step : schedule_.ranks[size_t((rank + p - 1) % p)]) {
        const int64_t stage = schedule_.stage_index((rank + p - 1) % p, step.chunk);
        if (step.pass == Pass::forward && has_above(stage))
            recv_activations_.expected.push_back({true, step.micro_batch, stage});
    }
    for (const Step& step : schedule_.ranks[size_t((rank + 1) % p)]) {
        const int64_t stage = schedule_.stage_index((rank + 1) % p, step.chunk);
        if ((step.pass == Pass::backward || step.pass == Pass::backward_input) && has_below(stage))
            recv_gradients_.expected.push_back({false, step.micro_batch, stage});
    }
}

// Closing a channel may be collective over its two ranks, so all ranks close them in the order in which they were
// opened.
Pipeline::~Pipeline() {
    const int p = ranks_.size(), rank = ranks_.rank();
    for (int below = 0; below < p; ++below) {
        if (rank == below) send_activations_ = {}, recv_gradients_ = {};
        if (rank == (below + 1) % p) recv_activations_ = {}, send_gradients_ = {};
    }
}

// tag::tied[]
// Tied embeddings: the last stage's matrix is a copy of the first stage's. Each has the gradient of its own use, lookup
// or product; the trainer sums the two once per step (sum_partial_gradients), so that both make the same update.
void Pipeline::tie_embeddings() {
    const int64_t first = schedule_.rank_of(0), last = schedule_.rank_of(schedule_.stage_count() - 1);
    if (!model_.config.tied || first == last) return;
    const Comm ends = ranks_.split([=](int rank) { return rank == first || rank == last ? 0 : -1; }, "tied");
    if (!model_.has_embedding_matrix()) return;
    Param& matrix = model_.embed_tokens;
    matrix.replicas = 2;
    matrix.replica = model_.stage.embedding ? 0 : 1;  // norms and checkpoints count replica 0
    matrix.partial_grad_group = group_of(ends);
}
// end::tied[]

// ---- messages -------------------------------------------------------------------------------------------------------

void Pipeline::release_sent() {
    std::erase_if(sends_, [](Work& work) { return work.done(); });
}

void Pipeline::send(Channel& channel, const Tensor& x) { sends_.push_back(channel.comm.send(x, channel.peer)); }

void Pipeline::post_next(Channel& channel, const Shape& shape) {
    if (channel.posted || channel.next == channel.expected.size()) return;
    Tensor x(shape, model_.options.dtype, model_.options.device);
    channel.recv = channel.comm.recv(x, channel.peer);
    channel.posted = {channel.expected[channel.next++], x};
}

Tensor Pipeline::receive(Channel& channel, const Message& message, const Shape& shape) {
    while (!channel.arrived.contains(message)) {
        post_next(channel, shape);
        CHECK(channel.posted, "micro-batch {}: no rank sends what this rank waits for", message.micro_batch);
        channel.recv.wait();
        channel.arrived.insert(*std::exchange(channel.posted, std::nullopt));
    }
    Tensor x = channel.arrived.extract(message).mapped();
    post_next(channel, shape);
    return x;
}

// ---- steps ----------------------------------------------------------------------------------------------------------

void Pipeline::time(const Step& step, const std::function<void()>& work) {
    constexpr const char* kNames[] = {"forward", "backward", "backward of inputs", "backward of weights"};
    Span span(kNames[int(step.pass)], "phase");
    if (measures_) synchronize(model_.options.device);  // waiting for the message is idle time, not part of the step
    const double begin = now_seconds();
    work();
    if (!measures_) return;
    synchronize(model_.options.device);
    spans_.push_back({step, begin, now_seconds()});
}

Tensor Pipeline::no_loss() const {
    Tensor zero({model_.loss_options.numbers()}, stats_dtype(model_.options.dtype), model_.options.device);
    fill(zero, 0);
    return zero;
}

// tag::forward[]
void Pipeline::forward(const Step& step, const Batch& batch) {
    const int64_t stage = schedule_.stage_index(ranks_.rank(), step.chunk);
    InFlight& micro = in_flight_[{step.micro_batch, step.chunk}];
    most_in_flight_ = std::max(most_in_flight_, int64_t(in_flight_.size()));
    if (splits_) micro.tape.deferred_wgrads = &micro.wgrads;
    Var x;
    if (has_below(stage)) x.data = receive(recv_activations_, {true, step.micro_batch, stage - 1}, activation_shape_);
    micro.input_grad = x.grad;
    Var y;
    time(step, [&] { y = model_.forward(micro.tape, batch, x, size_t(step.chunk)); });
    micro.output_grad = y.grad;
    if (has_above(stage))
        send(send_activations_, y.data);
    else
        accumulate(loss_, y.data);
}
// end::forward[]

void Pipeline::backward(const Step& step) {
    const int64_t stage = schedule_.stage_index(ranks_.rank(), step.chunk);
    const auto found = in_flight_.find({step.micro_batch, step.chunk});
    CHECK(found != in_flight_.end(), "{}", to_string(step));
    InFlight& micro = found->second;
    if (step.pass != Pass::backward_weight && has_above(stage))
        *micro.output_grad = receive(recv_gradients_, {false, step.micro_batch, stage + 1}, activation_shape_);
    time(step, [&] {
        if (step.pass == Pass::backward_weight) {
            for (auto& wgrad : micro.wgrads) std::exchange(wgrad, nullptr)();  // releases its tensors at once
        } else {
            micro.output_grad.reset();  // the closure that uses it owns it from here on
            micro.tape.backward();
        }
    });
    if (step.pass != Pass::backward_weight && has_below(stage))
        send(send_gradients_, std::exchange(*micro.input_grad, {}));
    if (step.pass != Pass::backward_input) in_flight_.erase(found);
}

Tensor Pipeline::forward_backward(const MicroBatches& micro_batches) {
    CHECK(in_flight_.empty() && sends_.empty() && !loss_, "the previous step has not finished");
    if (micro_batches.count != schedule_.micro_batches)
        use(make_schedule(schedule_.name, schedule_.stages, micro_batches.count, schedule_.chunks));
    spans_.clear();
    most_in_flight_ = 0;
    for (Channel* channel : {&recv_activations_, &recv_gradients_}) channel->next = 0;
    std::vector<Batch> batches;  // all at once: copying one to the device would wait for the work queued there
    for (int64_t i = 0; i < schedule_.micro_batches; ++i) batches.push_back(micro_batches.get(i));
    activation_shape_ = {batches[0].tokens.size() / row_parts_, model_.config.hidden};
    for (const Step& step : schedule_.ranks[size_t(ranks_.rank())]) {
        ledger().phase(to_string(step));
        release_sent();
        step.pass == Pass::forward ? forward(step, batches[size_t(step.micro_batch)]) : backward(step);
    }
    CHECK(in_flight_.empty(), "{} micro-batches are still in flight", in_flight_.size());
    for (Work& work : sends_) work.wait();
    sends_.clear();
    return loss_ ? std::exchange(loss_, Tensor()) : no_loss();
}

Tensor Pipeline::forward_only(const Batch& batch) {
    Tape tape{.recording = false};
    const Shape hidden = {batch.tokens.size() / row_parts_, model_.config.hidden};
    const int64_t rank = ranks_.rank();
    Var y;
    for (int64_t chunk = 0; chunk < schedule_.chunks; ++chunk) {
        const int64_t stage = schedule_.stage_index(rank, chunk);
        Var x;
        if (has_below(stage)) {
            x.data = Tensor(hidden, model_.options.dtype, model_.options.device);
            recv_activations_.comm.recv(x.data, recv_activations_.peer).wait();
        }
        y = model_.forward(tape, batch, x, size_t(chunk));
        if (has_above(stage)) send_activations_.comm.send(y.data, send_activations_.peer).wait();
    }
    return model_.stage.head ? y.data : no_loss();
}

// ---- what was measured ----------------------------------------------------------------------------------------------

Timeline Pipeline::measured() const {
    ranks_.barrier().wait();
    size_t most = 0;
    for (const auto& steps : schedule_.ranks) most = std::max(most, steps.size());
    std::vector<double> mine = {now_seconds()};  // just after the barrier: the common zero of clocks of several nodes
    for (const Timeline::Span& span : spans_) mine.insert(mine.end(), {span.begin, span.end});
    mine.resize(1 + 2 * most);
    const std::vector<double> all = ranks_.gather(mine);
    Timeline timeline;
    for (size_t rank = 0; rank < schedule_.ranks.size(); ++rank) {
        const double* times = &all[rank * mine.size()];
        auto& spans = timeline.ranks.emplace_back();
        for (size_t i = 0; i < schedule_.ranks[rank].size(); ++i)
            spans.push_back({schedule_.ranks[rank][i], times[1 + 2 * i] - times[0], times[2 + 2 * i] - times[0]});
    }
    return timeline;
}

}  // namespace train70b
