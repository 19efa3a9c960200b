#include "08_3d_full/plan/unit_memory.h"

#include <map>
#include <tuple>

#include "01_single_gpu/complete/experts/expert_balance.h"
#include "02_data_parallel/runtime/backend.h"
#include "03_zero/complete/zero.h"
#include "04_tensor_parallel/complete/tensor_parallel.h"
#include "06_context_parallel/complete/context_parallel.h"
#include "07_fp8/complete/flags.h"
#include "07_fp8/complete/zero_cast.h"
#include "08_3d_full/complete/compose.h"
#include "08_3d_full/experts/expert_parallel.h"

namespace train70b {

namespace {

auto shape_of(const LlamaConfig& c) {
    return std::tuple(
        c.hidden, c.heads, c.kv_heads, c.head_dim(), c.ffn, c.vocab, c.tied, c.qkv_bias, c.qk_norm,
        std::tuple(c.experts.count, c.experts.ffn, c.experts.shared, c.experts.top_k, c.experts.capacity_factor));
}
LlamaConfig one_block(LlamaConfig config) {
    config.layers = 1;
    config.experts.dense_layers = 0;
    return config;
}

class LedgerReading {
  public:
    void begin() {
        before_ = ledger().now();
        total_ = ledger().total();
        ledger().reset_peak();
    }
    PassMemory end() const {
        PassMemory pass{.net_total = ledger().total() - total_, .peak = ledger().peak()};
        for (size_t kind = 0; kind < size_t(kMemoryKinds); ++kind) {
            pass.net[kind] = ledger().now()[kind] - before_[kind];
            pass.peak.kind[kind] -= before_[kind];
        }
        pass.peak.total -= total_;
        return pass;
    }

  private:
    MemoryBytes before_{};
    int64_t total_ = 0;
};

// The parts of a pass.
class PassReader {
  public:
    void begin(std::vector<PassPart>& parts) {
        parts_ = &parts;
        parts.clear();
        reading_.begin();
    }
    void end(AtExperts then = AtExperts::nothing) { parts_->push_back({reading_.end(), then}); }
    void resume() { reading_.begin(); }

  private:
    LedgerReading reading_;
    std::vector<PassPart>* parts_ = nullptr;
};

// Reads the ledger around the unit's passes, inside of what ZeRO does around them. The tape's order makes it simple:
// what is recorded before the body runs after its backward pass, and what is recorded after it before.
void measure(Unit& unit, UnitMemory& memory, PassReader& reader, const bool& deferred) {
    const auto wrap = [&](Tape& tape, const Var& x, const Unit::Body& body) {
        if (deferred) tape.record_wgrad([&] { reader.end(); });
        tape.record([&] { reader.end(); });
        reader.begin(memory.forward);
        Var y = body(tape, x);
        reader.end();
        tape.record([&] { reader.begin(deferred ? memory.backward_input : memory.backward); });
        if (deferred) tape.record_wgrad([&] { reader.begin(memory.weights); });
        return y;
    };
    unit.wrappers.insert(unit.wrappers.begin() + 1, wrap);
}

// The same around what ZeRO does for experts in the middle of their block: one wrapper outside of its own, one inside.
void leave_out_zero(Unit& experts, PassReader& reader) {
    const auto outer = [&](Tape& tape, const Var& x, const Unit::Body& body) {
        tape.record_wgrad([&] { reader.resume(); });
        reader.end(tape.replays ? AtExperts::begin_replay : AtExperts::begin_forward);
        Var y = body(tape, x);
        reader.resume();
        const AtExperts then = tape.replays ? AtExperts::replayed : AtExperts::begin_backward;
        tape.record([&reader, then] { reader.end(then); });
        return y;
    };
    const auto inner = [&](Tape& tape, const Var& x, const Unit::Body& body) {
        tape.record_wgrad([&] { reader.end(AtExperts::end_backward); });
        reader.resume();
        Var y = body(tape, x);
        reader.end(tape.replays ? AtExperts::nothing : AtExperts::end_forward);
        tape.record([&] { reader.resume(); });
        return y;
    };
    experts.wrappers.insert(experts.wrappers.begin() + 1, inner);
    experts.wrappers.insert(experts.wrappers.begin(), outer);
}

RankUnitMemory measured(const Workload& w, const ParallelConfig& config, int64_t cp_rank, int64_t ep_rank) {
    Mesh mesh{.tp = config.mesh.tp, .cp = config.mesh.cp, .dp = 1, .pp = 1};
    const Comm world = make_comm(make_fake_backend(int(cp_rank * mesh.tp), int(mesh.size())), {});
    const MeshComms ranks = split(world, mesh);
    const MemoryBytes before = ledger().now();

    Llama model(one_block(w.model),
                {.dtype = w.dtype, .grad_dtype = w.grad_dtype, .device = Device::meta, .recompute = w.recompute});
    const TensorParallel tensor_parallel(model, ranks.tp, config.tensor);
    const ContextLayout context = context_layout(w.model, w.seq_len, mesh.cp, config.context);
    const Comm ep = make_comm(make_fake_backend(int(ep_rank), int(config.mesh.ep)), {}), one_rank;
    const ExpertParallel expert_parallel(model, {ranks.tp, ranks.cp, ep}, context);
    const int64_t sequence = w.seq_len / mesh.cp, rows = w.micro_batch * sequence;
    const Fp8 fp8 = apply_fp8(model, config.fp8, rows, ranks.tp);
    Zero zero(model, ranks.dp_cp, config.zero, make_optimizer_of(config.optimizer, {}), make_fp8_unsharder(fp8),
              one_rank);
    apply_context_parallel(model, ranks.cp, context);
    ExpertBalance balance(model);
    balance.begin_step();
    zero.allocate(1);
    zero.weights_changed();

    RankUnitMemory memory;
    for (const Param* param : model.blocks[0].unit.params) {
        const auto casts = [&](const auto& layer) {
            const std::vector<Param*>& weights = layer->linear->weights;
            return layer->gathered_scale_inv && std::find(weights.begin(), weights.end(), param) != weights.end();
        };
        memory.in_8_bits.push_back(std::any_of(fp8.layers().begin(), fp8.layers().end(), casts));
    }
    PassReader reader;
    bool deferred = false;
    measure(model.embedding_unit, memory.embedding, reader, deferred);
    measure(model.blocks[0].unit, memory.block, reader, deferred);
    if (Experts* experts = experts_of(model.blocks[0])) leave_out_zero(experts->unit, reader);
    measure(model.head_unit, memory.head, reader, deferred);
    if (w.model.tied) measure(model.tied_unit, memory.tied_head, reader, deferred);

    const auto numbers = [&] { return Tensor({rows}, DType::i32, Device::meta); };
    const Batch batch{.sequences = w.micro_batch,
                      .seq_len = sequence,
                      .tokens = numbers(),
                      .targets = numbers(),
                      .positions = numbers(),
                      .loss_scale = 1,
                      .whole_len = w.seq_len,
                      .sequence_scale = 1};
    for (const bool each : {false, true}) {
        deferred = each;
        zero.begin_step(1);
        Tape::Steps wgrads;
        Tape tape{.deferred_wgrads = deferred ? &wgrads : nullptr};
        memory.loss = model.forward(tape, batch).data.bytes();
        tape.backward();
        for (auto& wgrad : wgrads) std::exchange(wgrad, nullptr)();
        zero.finish_gradients();
    }
    memory.hidden = rows / (config.tensor.sequence_parallel ? mesh.tp : 1) * w.model.hidden * size_of(w.dtype);
    memory.block_workspace = ledger().now()[size_t(Memory::workspace)] - before[size_t(Memory::workspace)];
    return memory;
}

}  // namespace

const UnitParams& unit_params(const LlamaConfig& config, int64_t tp, int64_t tp_rank, bool sequence_parallel) {
    const auto key = std::tuple(shape_of(config), tp, tp_rank, sequence_parallel);
    static std::map<decltype(key), UnitParams> known;
    const auto [found, is_new] = known.insert({key, {}});
    if (!is_new) return found->second;
    Llama model(one_block(config), {.device = Device::meta});
    const Comm ranks = make_comm(make_fake_backend(int(tp_rank), int(tp)), {});
    const TensorParallel tensor_parallel(model, ranks, {sequence_parallel, false});
    std::vector<const Group*> groups;
    const auto list = [&](const Unit& unit) {
        std::vector<ParamShape> shapes;
        for (const Param* param : unit.params) {
            const GlobalIndex index = param->global_index(0);
            int sum = ParamShape::kNoSum;
            if (const Group* group = param->partial_grad_group.get()) {
                sum = int(std::find(groups.begin(), groups.end(), group) - groups.begin());
                if (sum == int(groups.size())) groups.push_back(group);
            }
            shapes.push_back({param->local.size() / index.cols, index.cols, index.global_cols, index.row_begin, sum,
                              param->replica == 0});
        }
        return shapes;
    };
    found->second = {list(model.embedding_unit), list(model.blocks[0].unit), list(model.head_unit), {}};
    if (const Experts* experts = experts_of(model.blocks[0])) found->second.experts = list(experts->unit);
    return found->second;
}

const RankUnitMemory& unit_memory(const Workload& w, const ParallelConfig& config, int64_t rank) {
    const LlamaConfig& c = w.model;
    const Mesh& mesh = config.mesh;
    const ContextLayout context = context_layout(c, w.seq_len, mesh.cp, config.context);
    // The ring's first rank sees one block of keys, the last one all of them; zigzag makes them equal.
    const int64_t position = mesh.coordinate(rank).cp;
    const bool equal_positions = context.groups() == 1 || (context.chunks > 1 && !context.gather);
    const bool fp8 = config.fp8.recipe != "off", shards = config.zero.stage == 3;
    const int64_t ep_rank = c.experts.count > 0 ? rank % mesh.stage_ranks() % mesh.ep : 0;
    const auto key = std::tuple(
        shape_of(c), std::tuple(w.dtype, w.grad_dtype, w.seq_len, w.micro_batch, w.recompute),
        std::tuple(mesh.tp, config.tensor.sequence_parallel, config.tensor.overlap),
        std::tuple(mesh.cp, config.context.algorithm, config.context.ulysses_size, equal_positions ? 0 : position),
        std::tuple(config.fp8.recipe, config.fp8.history, fp8 && shards ? int(config.zero.offload) : -1),
        std::tuple(c.experts.count > 0 ? mesh.ep : 1, ep_rank));
    static std::map<decltype(key), RankUnitMemory> known;
    auto found = known.find(key);
    if (found == known.end())
        found = known.emplace(key, measured(w, config, equal_positions ? 0 : position, ep_rank)).first;
    return found->second;
}

}  // namespace train70b
