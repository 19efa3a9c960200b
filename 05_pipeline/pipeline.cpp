#include "05_pipeline/pipeline.h"

#include <numeric>
#include <utility>

#include "01_single_gpu/core/profile.h"
#include "02_data_parallel/runtime/launch.h"

namespace train70b {

void add_pipeline_flags(Flags& flags, int64_t& pp, PipelineOptions& o) {
    flags.group("Communication");
    flags.add("--pp", pp, "pipeline stages of a model copy [what --dp leaves, all without it]", whole_number_from(1))
        .default_text("");
    flags.add("--pipeline", o.schedule, "schedule", one_of({"naive", "gpipe", "1f1b", "interleaved", "zero-bubble"}));
    flags
        .add("--virtual-stages", o.virtual_stages, "chunks of layers per rank, of --pipeline interleaved",
             whole_number_from(1))
        .default_text("2; 1 for the others");
    flags
        .add("--stage-layers", o.stage_layers, "a,b,...: layers of each stage, in order [equally many]",
             whole_number_from(0))
        .default_text("");
}

Stage pipeline_stage(const LlamaConfig& config, int64_t stages, int64_t rank, const PipelineOptions& o) {
    const int64_t chunks = o.chunks(), parts = stages * chunks, layers = config.layers;
    if (chunks > 1 && o.schedule != "interleaved")
        usage_error("--virtual-stages {}: belongs to --pipeline interleaved; {} has one chunk per rank", chunks,
                    o.schedule);
    if (chunks > 1 && stages == 1)
        usage_error("--pipeline interleaved: one stage has nothing to take turns with; --pp 2 or more would do");
    if (parts > layers)
        usage_error("--pp {}{}: more than --layers {}; each needs one at least", stages,
                    chunks > 1 ? fmt::format(" x --virtual-stages {} = {} parts", chunks, parts) : "", layers);
    std::vector<int64_t> sizes = o.stage_layers;
    if (sizes.empty()) {
        if (layers % parts != 0)
            usage_error("--layers {} does not divide by {} {}; {} would, or --stage-layers {}", layers, parts,
                        chunks > 1 ? "parts (--pp x --virtual-stages)" : "stages (--pp)", (layers / parts + 1) * parts,
                        [&] {  // the first ones take what is left over
                            std::string example;
                            for (int64_t i = 0; i < parts; ++i)
                                example += fmt::format("{}{}", i ? "," : "", layers / parts + (i < layers % parts));
                            return example;
                        }());
        sizes.assign(size_t(parts), layers / parts);
    }
    const auto shown = [&] {
        std::string text;
        for (size_t i = 0; i < sizes.size(); ++i) text += fmt::format("{}{}", i ? "," : "", sizes[i]);
        return text;
    };
    if (int64_t(sizes.size()) != parts)
        usage_error("--stage-layers {}: lists {} stages; --pp {}{} makes {}", shown(), sizes.size(), stages,
                    chunks > 1 ? fmt::format(" x --virtual-stages {}", chunks) : "", parts);
    const int64_t sum = std::accumulate(sizes.begin(), sizes.end(), int64_t(0));
    if (sum != layers) usage_error("--stage-layers {}: {} layers; the model has {}", shown(), sum, layers);
    for (const int64_t size : sizes)
        if (size < 1) usage_error("--stage-layers {}: each stage needs a layer at least", shown());

    Stage stage{{}, rank == 0, rank == stages - 1};
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const auto mine = sizes.begin() + chunk * stages + rank;
        const int64_t first = std::accumulate(sizes.begin(), mine, int64_t(0));
        stage.chunks.push_back({first, first + *mine});
    }
    return stage;
}

Schedule pipeline_schedule(const PipelineOptions& o, int64_t stages, int64_t micro_batches) {
    return make_schedule(o.schedule, stages, micro_batches, o.chunks());
}

Pipeline::Pipeline(Llama& model, const Comm& ranks, Schedule schedule, int64_t row_parts)
    : model_(model), ranks_(ranks), schedule_(std::move(schedule)), row_parts_(row_parts) {
    const int p = ranks.size(), rank = ranks.rank();
    CHECK(schedule_.stages == p && int64_t(model.stage.chunks.size()) == schedule_.chunks, "{} stages of {} chunks", p,
          model.stage.chunks.size());
    const std::string wrong = incomplete(schedule_) + deadlock(schedule_, Sends::posted);
    CHECK(wrong.empty(), "{}", wrong);
    for (const Step& step : schedule_.ranks[size_t(rank)]) splits_ = splits_ || step.pass == Pass::backward_weight;
    if (p == 1) return;

    // Between every two neighbours one street up and one down; from the last rank round to the first, where chunks need
    // it.
    const int streets = schedule_.chunks > 1 ? p : p - 1;
    for (int below = 0; below < streets; ++below) {
        const int above = (below + 1) % p;
        const Comm up = ranks.p2p_channel(below, above), down = ranks.p2p_channel(above, below);
        // A group has its ranks in the order of the group it is of.
        const int above_in_pair = above > below ? 1 : 0;
        if (rank == below) up_out_ = {up, above_in_pair}, down_in_ = {down, above_in_pair};
        if (rank == above) up_in_ = {up, 1 - above_in_pair}, down_out_ = {down, 1 - above_in_pair};
    }
    // What the neighbours will send, in the order of their steps.
    for (const Step& step : schedule_.ranks[size_t((rank + p - 1) % p)]) {
        const int64_t part = schedule_.part((rank + p - 1) % p, step.chunk);
        if (step.pass == Pass::forward && has_above(part)) up_in_.expected.push_back({true, step.micro_batch, part});
    }
    for (const Step& step : schedule_.ranks[size_t((rank + 1) % p)]) {
        const int64_t part = schedule_.part((rank + 1) % p, step.chunk);
        if ((step.pass == Pass::backward || step.pass == Pass::backward_input) && has_below(part))
            down_in_.expected.push_back({false, step.micro_batch, part});
    }
}

// Streets close in the order in which they were opened, because closing one may be a matter of both its ranks.
Pipeline::~Pipeline() {
    const int p = ranks_.size(), rank = ranks_.rank();
    for (int below = 0; below < p; ++below) {
        if (rank == below) up_out_ = {}, down_in_ = {};
        if (rank == (below + 1) % p) up_in_ = {}, down_out_ = {};
    }
}

// ---- messages -------------------------------------------------------------------------------------------------------

void Pipeline::let_go() {
    std::erase_if(sends_, [](Work& work) { return work.done(); });
}

void Pipeline::send(Street& street, const Tensor& x) { sends_.push_back(street.comm.send(x, street.peer)); }

void Pipeline::post_next(Street& street, const Shape& shape) {
    if (street.ahead || street.taken == street.expected.size()) return;
    Tensor x(shape, model_.options.dtype, model_.options.device);
    street.work = street.comm.recv(x, street.peer);
    street.ahead = {street.expected[street.taken++], x};
}

Tensor Pipeline::receive(Street& street, const Message& message, const Shape& shape) {
    while (!street.arrived.contains(message)) {
        post_next(street, shape);
        CHECK(street.ahead, "micro-batch {}: nobody sends what this rank waits for", message.micro_batch);
        street.work.wait();
        street.arrived.insert(*std::exchange(street.ahead, std::nullopt));
    }
    Tensor x = street.arrived.extract(message).mapped();
    post_next(street, shape);
    return x;
}

// ---- steps ----------------------------------------------------------------------------------------------------------

void Pipeline::time(const Step& step, const std::function<void()>& work) {
    constexpr const char* kNames[] = {"forward", "backward", "backward of inputs", "backward of weights"};
    Span span(kNames[int(step.pass)], "phase");
    if (measures_) synchronize(model_.options.device);  // the message is there: waiting for it is no work
    const double begin = now_seconds();
    work();
    if (!measures_) return;
    synchronize(model_.options.device);
    spans_.push_back({step, begin, now_seconds()});
}

Tensor Pipeline::no_loss() const {
    Tensor zero({1}, stats_dtype(model_.options.dtype), model_.options.device);
    fill(zero, 0);
    return zero;
}

void Pipeline::forward(const Step& step, const Batch& batch) {
    const int64_t part = schedule_.part(ranks_.rank(), step.chunk);
    Flight& flight = flights_[{step.micro_batch, step.chunk}];
    most_in_flight_ = std::max(most_in_flight_, int64_t(flights_.size()));
    if (splits_) flight.tape.weights = &flight.weights;
    Var x;
    if (has_below(part)) x.data = receive(up_in_, {true, step.micro_batch, part - 1}, hidden_);
    flight.input_grad = x.grad;
    Var y;
    time(step, [&] { y = model_.forward(flight.tape, batch, x, size_t(step.chunk)); });
    flight.output_grad = y.grad;
    if (has_above(part))
        send(up_out_, y.data);
    else
        accumulate(loss_, y.data);
}

void Pipeline::backward(const Step& step) {
    const int64_t part = schedule_.part(ranks_.rank(), step.chunk);
    const auto found = flights_.find({step.micro_batch, step.chunk});
    CHECK(found != flights_.end(), "{}", to_string(step));
    Flight& flight = found->second;
    if (step.pass != Pass::backward_weight && has_above(part))
        *flight.output_grad = receive(down_in_, {false, step.micro_batch, part + 1}, hidden_);
    time(step, [&] {
        if (step.pass == Pass::backward_weight) {
            for (auto& half : flight.weights) std::exchange(half, nullptr)();  // each lets its input go when it is done
        } else {
            flight.output_grad.reset();  // from here on it belongs to the closure that uses it
            flight.tape.backward();
        }
    });
    if (step.pass != Pass::backward_weight && has_below(part)) send(down_out_, std::exchange(*flight.input_grad, {}));
    if (step.pass != Pass::backward_input) flights_.erase(found);
}

Tensor Pipeline::forward_backward(const std::function<Batch(int64_t)>& micro_batch) {
    CHECK(flights_.empty() && sends_.empty() && !loss_, "the step before this did not end");
    spans_.clear();
    most_in_flight_ = 0;
    for (Street* street : {&up_in_, &down_in_}) street->taken = 0;
    std::vector<Batch> batches;  // all now: bringing one to the device waits for whatever goes on there
    for (int64_t i = 0; i < schedule_.micro_batches; ++i) batches.push_back(micro_batch(i));
    hidden_ = {batches[0].tokens.size() / row_parts_, model_.config.hidden};
    for (const Step& step : schedule_.ranks[size_t(ranks_.rank())]) {
        ledger().phase(to_string(step));
        let_go();
        step.pass == Pass::forward ? forward(step, batches[size_t(step.micro_batch)]) : backward(step);
    }
    CHECK(flights_.empty(), "{} micro-batches are still in flight", flights_.size());
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
        const int64_t part = schedule_.part(rank, chunk);
        Var x;
        if (has_below(part)) {
            x.data = Tensor(hidden, model_.options.dtype, model_.options.device);
            up_in_.comm.recv(x.data, up_in_.peer).wait();
        }
        y = model_.forward(tape, batch, x, size_t(chunk));
        if (has_above(part)) up_out_.comm.send(y.data, up_out_.peer).wait();
    }
    return model_.stage.head ? y.data : no_loss();
}

// ---- around the steps -----------------------------------------------------------------------------------------------

void Pipeline::attach(Trainer& trainer) {
    trainer.forward_backward = [this, &trainer](int64_t step) {
        CHECK(trainer.micro_batches() == schedule_.micro_batches, "{} micro-batches", trainer.micro_batches());
        return forward_backward([&](int64_t i) { return trainer.micro_batch(step, i); });
    };
    trainer.forward_only = [this](const Batch& batch) { return forward_only(batch); };
    if (ranks_.size() == 1) return;
    trainer.sum_over_ranks = [ranks = ranks_, inner = trainer.sum_over_ranks](double x) {
        return ranks.sum(inner ? inner(x) : x);  // the loss: of the last rank, 0 on the others
    };
    sum_norms(trainer, ranks_);
    // From the rank that has the parameter to the first.
    trainer.whole = [&model = model_, ranks = ranks_, inner = trainer.whole](const Param& wanted, Which which) {
        Tensor here;
        for (const Param* param : model.params())
            if (param->name == wanted.name) here = inner(wanted, which);
        const std::vector<double> has = ranks.gather({here ? 1.0 : 0.0});
        const int owner = int(std::find(has.begin(), has.end(), 1.0) - has.begin());
        if (owner == 0 || owner == ranks.size()) return here;
        if (ranks.rank() != owner && ranks.rank() != 0) return Tensor();
        Tensor x(wanted.global_shape, which == Which::data ? model.options.dtype : model.options.grad_dtype,
                 model.options.device, Memory::workspace);
        if (ranks.rank() == 0) return ranks.recv(x, owner).wait(), x;
        copy(x, here);
        return ranks.send(x, 0).wait(), Tensor();
    };
}

Timeline Pipeline::measured() const {
    ranks_.barrier().wait();
    size_t most = 0;
    for (const auto& steps : schedule_.ranks) most = std::max(most, steps.size());
    std::vector<double> mine = {now_seconds()};  // when the barrier opens: clocks of several nodes are set by it
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
