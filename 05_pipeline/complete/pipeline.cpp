#include "05_pipeline/complete/pipeline.h"

#include <utility>

#include "02_data_parallel/runtime/comm_roles.h"

namespace train70b {

Pipeline::Pipeline(Llama& model, const Comm& ranks, Schedule schedule, int64_t row_parts)
    : model_(model), ranks_(ranks), row_parts_(row_parts) {
    open_channels(schedule.placement);
    use(std::move(schedule));
    tie_embeddings();
}

// One channel up and one down between any two ranks that hold neighbouring stages.
void Pipeline::open_channels(const Placement& placement) {
    std::set<std::pair<int, int>> opened;
    for (size_t stage = 0; stage + 1 < placement.rank.size(); ++stage) {
        const int below = int(placement.rank[stage]), above = int(placement.rank[stage + 1]), rank = ranks_.rank();
        if (below == above || !opened.insert({below, above}).second) continue;
        const Comm up = ranks_.p2p_channel(below, above), down = ranks_.p2p_channel(above, below);
        if (rank != below && rank != above) continue;
        // A channel numbers its two ranks in the order of `ranks`.
        const int peer = (rank == below) == (above > below) ? 1 : 0;
        channels_.push_back({.comm = up, .forward = true, .from = below, .to = above, .peer = peer});
        channels_.push_back({.comm = down, .forward = false, .from = above, .to = below, .peer = peer});
    }
}

Pipeline::Channel& Pipeline::channel(bool forward, int64_t from, int64_t to) {
    for (Channel& channel : channels_)
        if (channel.forward == forward && channel.from == from && channel.to == to) return channel;
    CHECK(false, "no channel from rank {} to rank {}", from, to);
    return channels_.front();
}

void Pipeline::use(Schedule schedule) {
    schedule_ = std::move(schedule);
    const int64_t p = ranks_.size(), rank = ranks_.rank();
    CHECK(schedule_.stages == p && int64_t(model_.stage.chunks.size()) == schedule_.chunks, "{} stages of {} chunks", p,
          model_.stage.chunks.size());
    std::string wrong = incomplete(schedule_);
    if (wrong.empty()) wrong = deadlock(schedule_, Sends::posted);
    CHECK(wrong.empty(), "{}", wrong);
    splits_.clear();
    for (const Step& step : schedule_.ranks[size_t(rank)])
        if (step.pass == Pass::backward_weight) splits_.insert({step.micro_batch, step.chunk});
    // The receives to post, in the order of the other ranks' steps.
    for (Channel& channel : channels_) {
        channel.expected.clear();
        if (channel.to != rank) continue;
        for (const Step& step : schedule_.ranks[size_t(channel.from)]) {
            if (step.pass == Pass::backward_weight || (step.pass == Pass::forward) != channel.forward) continue;
            const int64_t stage = schedule_.stage_index(channel.from, step.chunk);
            const int64_t to = channel.forward ? stage + 1 : stage - 1;
            if (to >= 0 && to < schedule_.stage_count() && schedule_.rank_of(to) == rank)
                channel.expected.push_back({channel.forward, step.micro_batch, stage});
        }
    }
}

// Closing a channel may be collective over its two ranks, so all ranks close them in the order in which they were
// opened.
Pipeline::~Pipeline() {
    for (Channel& channel : channels_) channel = {};
}

// Tied embeddings, multi-token prediction: the last stage's matrix is a copy of the first stage's. Each has the
// gradient of its own use; the trainer sums the two once per step (sum_partial_gradients), so that both make the same
// update.
void Pipeline::tie_embeddings() {
    const int64_t first = schedule_.rank_of(0), last = schedule_.rank_of(schedule_.stage_count() - 1);
    if (!model_.config.embeds_twice() || first == last) return;
    const Comm ends =
        ranks_.split([=](int rank) { return rank == first || rank == last ? 0 : -1; }, "tied", GroupLoad::light);
    if (!model_.has_embedding_matrix()) return;
    Param& matrix = model_.embed_tokens;
    matrix.replicas = 2;
    matrix.replica = model_.stage.embedding ? 0 : 1;  // norms and checkpoints count replica 0
    matrix.partial_grad_group = group_of(ends);
}

// ---- messages -------------------------------------------------------------------------------------------------------

// To the stage that needs it: above for activations, below for a gradient.
void Pipeline::send(const Message& message, const Tensor& x) {
    const int64_t to = schedule_.rank_of(message.stage + (message.forward ? 1 : -1));
    if (to == ranks_.rank()) {
        kept_[message] = x;
        return;
    }
    Channel& out = channel(message.forward, ranks_.rank(), to);
    sends_.push_back(out.comm.send(x, out.peer));
}

void Pipeline::post_next(Channel& channel) {
    if (channel.posted || channel.next == channel.expected.size()) return;
    Tensor x(activation_shape_, model_.options.dtype, model_.options.device);
    channel.recv = channel.comm.recv(x, channel.peer);
    channel.posted = {channel.expected[channel.next++], x};
}

Tensor Pipeline::receive(const Message& message) {
    const int64_t from = schedule_.rank_of(message.stage);
    if (from == ranks_.rank()) {
        CHECK(kept_.contains(message), "micro-batch {}: stage {} has not run", message.micro_batch, message.stage);
        return kept_.extract(message).mapped();
    }
    Channel& in = channel(message.forward, from, ranks_.rank());
    while (!in.arrived.contains(message)) {
        post_next(in);
        CHECK(in.posted, "micro-batch {}: no rank sends what this rank waits for", message.micro_batch);
        in.recv.wait();
        in.arrived.insert(*std::exchange(in.posted, std::nullopt));
    }
    Tensor x = in.arrived.extract(message).mapped();
    post_next(in);
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
    Tensor zero({model_.loss_numbers()}, stats_dtype(model_.options.dtype), model_.options.device);
    fill(zero, 0);
    return zero;
}

// tag::forward[]
void Pipeline::forward(const Step& step, const Batch& batch) {
    const int64_t stage = schedule_.stage_index(ranks_.rank(), step.chunk);
    InFlight& micro = in_flight_[{step.micro_batch, step.chunk}];
    most_in_flight_ = std::max(most_in_flight_, int64_t(in_flight_.size()));
    if (splits_.contains({step.micro_batch, step.chunk})) micro.tape.deferred_wgrads = &micro.wgrads;
    Var x;
    if (has_below(stage)) x.data = receive({true, step.micro_batch, stage - 1});
    micro.input_grad = x.grad;
    Var y;
    time(step, [&] { y = model_.forward(micro.tape, batch, x, size_t(step.chunk)); });
    micro.output_grad = y.grad;
    if (has_above(stage))
        send({true, step.micro_batch, stage}, y.data);
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
        *micro.output_grad = receive({false, step.micro_batch, stage + 1});
    time(step, [&] {
        if (step.pass == Pass::backward_weight) {
            for (auto& wgrad : micro.wgrads) std::exchange(wgrad, nullptr)();  // releases its tensors at once
        } else {
            micro.output_grad.reset();  // the closure that uses it owns it from here on
            micro.tape.backward();
        }
    });
    if (step.pass != Pass::backward_weight && has_below(stage))
        send({false, step.micro_batch, stage}, std::exchange(*micro.input_grad, {}));
    if (step.pass != Pass::backward_input) in_flight_.erase(found);
}

Tensor Pipeline::forward_backward(const MicroBatches& micro_batches) {
    CHECK(in_flight_.empty() && sends_.empty() && !loss_, "the previous step has not finished");
    if (micro_batches.count != schedule_.micro_batches)
        use(make_schedule(schedule_.name, schedule_.stages, micro_batches.count, schedule_.chunks));
    spans_.clear();
    most_in_flight_ = 0;
    for (Channel& channel : channels_) channel.next = 0;
    std::vector<Batch> batches;  // before the first message is posted: a new pinned buffer may wait for the device
    for (int64_t i = 0; i < schedule_.micro_batches; ++i) batches.push_back(micro_batches.get(i));
    activation_shape_ = {batches[0].tokens.size() / row_parts_, model_.config.hidden};
    for (const Step& step : schedule_.ranks[size_t(ranks_.rank())]) {
        ledger().phase(to_string(step));
        std::erase_if(sends_, [](Work& work) { return work.done(); });  // releases the buffers
        step.pass == Pass::forward ? forward(step, batches[size_t(step.micro_batch)]) : backward(step);
    }
    CHECK(in_flight_.empty() && kept_.empty(), "{} micro-batches are still in flight", in_flight_.size());
    for (Work& work : sends_) work.wait();
    sends_.clear();
    return loss_ ? std::exchange(loss_, Tensor()) : no_loss();
}

// Chunk by chunk, in the order of the stages.
Tensor Pipeline::forward_only(const Batch& batch) {
    Tape tape{.recording = false};
    const Shape hidden = {batch.tokens.size() / row_parts_, model_.config.hidden};
    const int64_t rank = ranks_.rank();
    Var y;
    for (int64_t chunk = 0; chunk < schedule_.chunks; ++chunk) {
        const int64_t stage = schedule_.stage_index(rank, chunk);
        Var x;
        if (has_below(stage) && schedule_.rank_of(stage - 1) == rank) {
            x.data = y.data;
        } else if (has_below(stage)) {
            const Channel& in = channel(true, schedule_.rank_of(stage - 1), rank);
            x.data = Tensor(hidden, model_.options.dtype, model_.options.device);
            in.comm.recv(x.data, in.peer).wait();
        }
        y = model_.forward(tape, batch, x, size_t(chunk));
        if (!has_above(stage) || schedule_.rank_of(stage + 1) == rank) continue;
        const Channel& out = channel(true, rank, schedule_.rank_of(stage + 1));
        out.comm.send(y.data, out.peer).wait();
    }
    return model_.stage.head ? y.data : no_loss();
}

// ---- what was measured ----------------------------------------------------------------------------------------------

Timeline Pipeline::measured() const {
    ranks_.barrier().wait();
    size_t longest = 0;
    for (const auto& steps : schedule_.ranks) longest = std::max(longest, steps.size());
    std::vector<double> local = {now_seconds()};  // just after the barrier: the common zero of clocks of several nodes
    for (const Timeline::Span& span : spans_) local.insert(local.end(), {span.begin, span.end});
    local.resize(1 + 2 * longest);
    const std::vector<double> all = ranks_.gather(local);
    Timeline timeline;
    for (size_t rank = 0; rank < schedule_.ranks.size(); ++rank) {
        const double* times = &all[rank * local.size()];
        auto& spans = timeline.ranks.emplace_back();
        for (size_t i = 0; i < schedule_.ranks[rank].size(); ++i)
            spans.push_back({schedule_.ranks[rank][i], times[1 + 2 * i] - times[0], times[2 + 2 * i] - times[0]});
    }
    return timeline;
}

}  // namespace train70b
