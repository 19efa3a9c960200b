#include "08_3d_full/plan/memory_formula.h"

#include <algorithm>
#include <utility>

#include "05_pipeline/complete/schedule_file.h"
#include "08_3d_full/plan/memory_zero.h"
#include "08_3d_full/plan/unit_memory.h"

namespace train70b {

namespace {

// ---- the pipeline ---------------------------------------------------------------------------------------------------

// A rank's steps, and where its neighbours are. Of a schedule with a name only as many micro-batches as show all that
// many more do: `left_out` more are like those in the middle.
struct RankSteps {
    std::vector<Step> steps;
    int64_t left_out = 0;  // in flight as well, between the last two forward steps (gpipe)
    bool splits = false;   // weight gradients in steps of their own
    int64_t p, rank;
    std::vector<int64_t> stage, rank_of;  // of each chunk of this rank; of each stage

    RankSteps(const Workload& w, const ParallelConfig& config, int64_t pp_rank) : p(config.mesh.pp), rank(pp_rank) {
        const PipelineOptions& o = config.pipeline;
        const std::string file = "file:";
        if (o.schedule.starts_with(file)) {
            Schedule schedule = read_schedule("--pipeline " + o.schedule, o.schedule.substr(file.size()));
            use(schedule.placement, std::move(schedule.ranks[size_t(rank)]));
            return;
        }
        const ScheduleGenerator& generator = find_schedule(o.schedule);
        const int64_t m = w.micro_batches(config.mesh.dp),
                      v = o.virtual_stages > 0 ? o.virtual_stages : generator.default_chunks();
        const bool grows = generator.in_flight({p, 8 * p, v}, rank) > generator.in_flight({p, 4 * p, v}, rank);
        const int64_t shown = std::min(m, grows ? 4 : generator.multiple ? 3 * p : 2 * p + 2);
        if (grows) left_out = m - shown;
        use(make_placement(o.schedule, p, v), generator.steps({p, shown, v}, rank));
    }

  private:
    void use(const Placement& placement, std::vector<Step> list) {
        steps = std::move(list);
        splits = std::any_of(steps.begin(), steps.end(),
                             [](const Step& step) { return step.pass == Pass::backward_weight; });
        stage = placement.stage[size_t(rank)];
        rank_of = placement.rank;
    }
};

// ---- a step ---------------------------------------------------------------------------------------------------------

Workload without_experts(Workload workload) {
    workload.model.experts = {};
    return workload;
}

class StepWalk {
  public:
    StepWalk(const Workload& workload, const ParallelConfig& config, int64_t rank)
        : w_(workload),
          config_(config),
          units_(workload, config, rank),
          dense_(without_experts(workload)),
          memory_(unit_memory(dense_, config, rank)),
          sparse_(units_.sparse_blocks > 0 ? unit_memory(workload, config, rank) : memory_),
          steps_(workload, config, config.mesh.coordinate(rank).pp),
          zero_(config.zero, walk_) {
        book_states();
        add_passes();
    }
    MemoryPeak peak();

  private:
    // A pass of a unit in its chunk.
    struct UnitPass {
        const UnitMemory* memory;
        int64_t skipped;  // blocks like this one that follow it
    };
    struct Channel {
        int64_t expected = 0;  // messages
        bool posted = false;
    };

    void book_states();
    void add_passes();
    void add_pass(const ShardedUnit& unit, const UnitMemory& memory, int64_t skipped = 0);
    void add_blocks(int64_t layers, bool sparse);
    void run(const std::vector<PassPart>& parts, int64_t pass);
    ShardedUnit sharded(const UnitState& unit, const std::vector<bool>& in_8_bits = {}) const;
    void run(const Step& step);
    void forward(int64_t chunk);
    void backward(int64_t chunk, bool weights_later);
    void weight_gradients(int64_t chunk);
    bool is_here(int64_t stage) const { return steps_.rank_of[size_t(stage)] == steps_.rank; }
    Channel& channel(bool forward, int64_t stage) {
        return channels_[size_t(2 * steps_.rank_of[size_t(stage)] + forward)];
    }
    void expect(bool forward, int64_t stage);
    void receive(bool forward, int64_t stage);
    void release() { walk_.book(Memory::activations, -memory_.hidden); }
    void end_of_step();
    // Tokens, targets and positions of all micro-batches
    int64_t batches() const {
        return w_.micro_batches(config_.mesh.dp) * 3 * 4 * w_.micro_batch * (w_.seq_len / config_.mesh.cp);
    }
    PassMemory net_since(const MemoryBytes& before) const;

    const Workload& w_;
    const ParallelConfig& config_;
    const RankUnits units_;
    const Workload dense_;
    const RankUnitMemory &memory_, &sparse_;
    const RankSteps steps_;
    MemoryWalk walk_;
    ShardedUnits zero_;
    std::vector<UnitPass> passes_;
    std::vector<int64_t> first_pass_;  // of each chunk, and the end
    std::vector<Channel> channels_;    // by rank: gradients, activations
    bool has_loss_ = false;
};

void StepWalk::book_states() {
    const StateMemory states = state_memory(units_, w_, config_);
    walk_.book(Memory::params, states.params);
    walk_.book(Memory::grads, states.grads);
    walk_.book(Memory::optimizer, states.optimizer);
    walk_.book(Memory::host, states.host);
    walk_.book(Memory::workspace,
               units_.blocks * memory_.block_workspace + units_.sparse_blocks * sparse_.block_workspace);
    walk_.book(Memory::activations, batches());
}

// ---- units ----------------------------------------------------------------------------------------------------------

// Unsharded, and the gradients. Parameters in 8 bits are gathered in a byte per element of the unit, and what is not in
// a second message: from each shard as much as from the one with most.
ShardedUnit StepWalk::sharded(const UnitState& unit, const std::vector<bool>& in_8_bits) const {
    const int64_t a = size_of(w_.dtype), g = size_of(w_.grad_dtype);
    ShardedUnit sharded{.gathering = a * unit.padded(), .params = a * unit.padded(), .grads = g * unit.padded()};
    if (config_.zero.offload == Offload::all) sharded.host_sum = g * unit.part();
    if (std::find(in_8_bits.begin(), in_8_bits.end(), true) == in_8_bits.end()) return sharded;
    int64_t rest = 0, most = 0;
    for (size_t i = 0; i < in_8_bits.size(); ++i)
        if (!in_8_bits[i]) rest += unit.params[i].size();
    for (const int64_t shard : unit.special_shards()) {
        int64_t here = 0;
        for (size_t i = 0; i < in_8_bits.size(); ++i) {
            const auto [begin, end] = unit.piece(unit.params[i], shard);
            if (!in_8_bits[i]) here += end - begin;
        }
        most = std::max(most, here);
    }
    sharded.rest = a * rest;
    sharded.params = unit.padded() + a * rest;
    sharded.gathering = unit.padded() + a * unit.shards * most;
    return sharded;
}

void StepWalk::add_pass(const ShardedUnit& unit, const UnitMemory& memory, int64_t skipped) {
    zero_.passes.push_back(int(zero_.units.size()));
    zero_.units.push_back(unit);
    passes_.push_back({&memory, skipped});
}

// Of many equal blocks the first ones and the last ones, unless each holds workspace of its own for long.
void StepWalk::add_blocks(int64_t layers, bool sparse) {
    const bool all = config_.zero.stage >= 2 && (steps_.splits || config_.zero.bucket_mb > 0);
    const int64_t booked = std::min(layers, all ? INT64_MAX : 2 * (config_.zero.prefetch + 2));
    for (int64_t i = 0; i < booked; ++i) {
        const int64_t skipped = i + 1 == (booked + 1) / 2 ? layers - booked : 0;
        if (!sparse) {
            add_pass(sharded(units_.block, memory_.in_8_bits), memory_.block, skipped);
            continue;
        }
        add_pass(sharded(units_.sparse_block), sparse_.block, skipped);
        add_pass(sharded(units_.experts), sparse_.block);
        zero_.units.back().inside = true;
    }
}

void StepWalk::add_passes() {
    const Stage& stage = units_.stage;
    if (stage.embedding) {
        first_pass_.push_back(0);
        add_pass(sharded(*units_.embedding), memory_.embedding);
    }
    for (const Chunk& chunk : stage.chunks) {
        if (!(stage.embedding && first_pass_.size() == 1 && passes_.size() == 1))
            first_pass_.push_back(int64_t(passes_.size()));
        const int64_t layers = chunk.end_layer - chunk.first_layer;
        const int64_t dense = w_.model.experts.count == 0
                                  ? layers
                                  : std::clamp<int64_t>(w_.model.experts.dense_layers - chunk.first_layer, 0, layers);
        add_blocks(dense, false);
        add_blocks(layers - dense, true);
    }
    if (stage.head) add_pass(sharded(*units_.head), memory_.head);
    if (stage.head && w_.model.tied) {
        if (stage.embedding) {
            passes_.push_back({&memory_.tied_head, 0});
            zero_.passes.push_back(0);
        } else {
            add_pass(sharded(*units_.embedding), memory_.tied_head);
        }
    }
    first_pass_.push_back(int64_t(passes_.size()));
}

// ---- steps ----------------------------------------------------------------------------------------------------------

void StepWalk::expect(bool forward, int64_t stage) {
    if (!is_here(stage)) ++channel(forward, stage).expected;
}

// The next message of a channel is posted as soon as one has arrived.
void StepWalk::receive(bool forward, int64_t stage) {
    if (is_here(stage)) return;  // what the other chunk has kept
    Channel& from = channel(forward, stage);
    if (!from.posted) walk_.book(Memory::activations, memory_.hidden);
    from.posted = --from.expected > 0;
    if (from.posted) walk_.book(Memory::activations, memory_.hidden);
}

void StepWalk::run(const std::vector<PassPart>& parts, int64_t pass) {
    for (const PassPart& part : parts) {
        walk_.book(part.memory);
        switch (part.then) {
            case AtExperts::nothing: break;
            case AtExperts::begin_forward: zero_.begin_forward(pass + 1); break;
            case AtExperts::end_forward: zero_.end_forward(pass + 1); break;
            case AtExperts::begin_replay: zero_.begin_replay(pass + 1); break;
            case AtExperts::replayed: zero_.begin_gradients(pass + 1); break;
            case AtExperts::begin_backward: zero_.begin_backward(pass + 1); break;
            case AtExperts::end_backward: zero_.end_backward(pass + 1); break;
        }
    }
}

void StepWalk::forward(int64_t chunk) {
    for (int64_t i = first_pass_[size_t(chunk)]; i < first_pass_[size_t(chunk) + 1]; ++i) {
        const UnitPass& pass = passes_[size_t(i)];
        if (zero_.is_inside(i)) continue;
        zero_.begin_forward(i);
        run(pass.memory->forward, i);
        zero_.end_forward(i);
        walk_.skip(pass.memory->forward, pass.skipped);
    }
    // The first loss stays, and the others are added to it.
    const bool ends_with_loss = units_.stage.head && chunk + 1 == int64_t(units_.stage.chunks.size());
    if (ends_with_loss && std::exchange(has_loss_, true)) walk_.book(Memory::activations, -memory_.loss);
}

void StepWalk::backward(int64_t chunk, bool weights_later) {
    for (int64_t i = first_pass_[size_t(chunk) + 1]; i-- > first_pass_[size_t(chunk)];) {
        const UnitPass& pass = passes_[size_t(i)];
        if (zero_.is_inside(i)) continue;
        const std::vector<PassPart>& parts = weights_later ? pass.memory->backward_input : pass.memory->backward;
        walk_.skip(parts, pass.skipped);
        zero_.begin_backward(i);
        run(parts, i);
        if (!weights_later) zero_.end_backward(i);
    }
}

void StepWalk::weight_gradients(int64_t chunk) {
    for (int64_t i = first_pass_[size_t(chunk) + 1]; i-- > first_pass_[size_t(chunk)];) {
        const UnitPass& pass = passes_[size_t(i)];
        if (zero_.is_inside(i)) continue;
        walk_.skip(pass.memory->weights, pass.skipped);
        run(pass.memory->weights, i);
        zero_.end_backward(i);
    }
}

void StepWalk::run(const Step& step) {
    const int64_t stage = steps_.stage[size_t(step.chunk)], last = int64_t(steps_.rank_of.size()) - 1;
    switch (step.pass) {
        case Pass::forward:
            if (stage > 0) receive(true, stage - 1);
            forward(step.chunk);
            if (stage < last && !is_here(stage + 1)) release();  // sent
            break;
        case Pass::backward:
        case Pass::backward_input:
            if (stage < last) receive(false, stage + 1);
            backward(step.chunk, step.pass == Pass::backward_input);
            if (stage > 0 && !is_here(stage - 1)) release();
            break;
        case Pass::backward_weight: weight_gradients(step.chunk); break;
    }
}

void StepWalk::end_of_step() {
    walk_.book(Memory::activations, -batches());
    if (!units_.stage.head) walk_.book(Memory::activations, memory_.loss);  // a loss of 0
    zero_.finish();
    const int64_t message = partial_gradient_message(units_, w_, config_);
    walk_.book(Memory::comm, message);
    walk_.book(Memory::comm, -message);
    const int64_t norm = norm_bytes(units_, config_);
    walk_.book(Memory::workspace, norm);
    walk_.book(Memory::workspace, -norm);
}

PassMemory StepWalk::net_since(const MemoryBytes& before) const {
    PassMemory pass;
    for (size_t kind = 0; kind < size_t(kMemoryKinds); ++kind) {
        pass.net[kind] = walk_.now()[kind] - before[kind];
        if (kind < size_t(kDeviceMemoryKinds)) pass.net_total += pass.net[kind];
    }
    return pass;
}

MemoryPeak StepWalk::peak() {
    channels_.resize(size_t(2 * steps_.p));
    const int64_t last = int64_t(steps_.rank_of.size()) - 1;
    for (const Step& step : steps_.steps) {
        const int64_t stage = steps_.stage[size_t(step.chunk)];
        if (step.pass == Pass::forward && stage > 0) expect(true, stage - 1);
        if ((step.pass == Pass::backward || step.pass == Pass::backward_input) && stage < last)
            expect(false, stage + 1);
    }
    // Micro-batches that were left out hold as much as the one before the last forward step, until the last backward
    // step.
    const auto is_forward = [](const Step& step) { return step.pass == Pass::forward; };
    const int64_t forwards = std::count_if(steps_.steps.begin(), steps_.steps.end(), is_forward);
    int64_t done = 0;
    PassMemory of_one;
    for (const Step& step : steps_.steps) {
        const MemoryBytes before = walk_.now();
        run(step);
        if (steps_.left_out == 0) continue;
        if (++done == forwards - 1) {
            of_one = net_since(before);
            walk_.skip(of_one, steps_.left_out);
        }
        if (done + 1 == int64_t(steps_.steps.size())) walk_.skip(of_one, -steps_.left_out);
    }
    end_of_step();
    return walk_.peak();
}

}  // namespace

MemoryPeak memory_formula(const Workload& workload, const ParallelConfig& config, int64_t rank) {
    return StepWalk(workload, config, rank).peak();
}

}  // namespace train70b
