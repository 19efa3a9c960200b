#include "08_3d_full/plan/memory_formula.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <memory>
#include <numeric>
#include <tuple>
#include <utility>

#include "07_fp8/complete/fp8.h"
#include "07_fp8/complete/optimizers.h"
#include "07_fp8/complete/recipes.h"

namespace train70b {

namespace {

// ---- states ---------------------------------------------------------------------------------------------------------

// Units of one kind: the elements of each, how many of them the rank has, and its shard.
struct Units {
    int64_t elements = 0, count = 0, shards = 1, shard = 0;
    int64_t part() const { return (elements + shards - 1) / shards; }
    int64_t own() const { return std::clamp<int64_t>(elements - shard * part(), 0, part()); }  // without padding
};

struct RankUnits {
    Stage stage;
    Units embedding, dense, sparse, experts, head, module;  // dense, sparse: blocks; module: multi-token prediction

    RankUnits(const Workload& w, const ParallelConfig& config, int64_t rank) : stage(stage_of(config, w.model, rank)) {
        const LlamaConfig& c = w.model;
        const Mesh& mesh = config.mesh;
        const ExpertsConfig& x = c.experts;
        const int64_t all = mesh.dp * mesh.cp, E = c.hidden, place = rank % mesh.stage_ranks();
        const int64_t shards = config.zero.hybrid_shard > 0 ? std::min(config.zero.hybrid_shard, all) : all;
        embedding = dense = sparse = experts = head = module = {.shards = shards, .shard = place / mesh.tp % shards};
        if (mesh.ep > 1 || mesh.tp > 1) experts = {.shards = mesh.edp(), .shard = place / mesh.ep};
        embedding.elements = (c.vocab + mesh.tp - 1) / mesh.tp * E;
        dense.elements = c.block_parameters(mesh.tp);
        sparse.elements = dense.elements + E * (x.count + 3 * (x.shared * x.ffn - c.ffn) / mesh.tp);
        experts.elements = x.count / mesh.ep * 3 * x.ffn * E;
        head.elements = E + (c.tied ? 0 : embedding.elements);
        for (const Chunk& chunk : stage.chunks)
            for (int64_t layer = chunk.first_layer; layer < chunk.end_layer; ++layer)
                ++(c.is_sparse(layer) ? sparse : dense).count;
        module.count = stage.head && c.multi_token;
        module.elements = (c.is_sparse() ? sparse : dense).elements + (2 * E + 3) * E;
        experts.count = sparse.count + (c.is_sparse() ? module.count : 0);
        embedding.count = stage.embedding || (c.embeds_twice() && stage.head);
        head.count = stage.head;
    }
};

StateMemory state_memory(const RankUnits& units, const Workload& w, const ParallelConfig& config) {
    const int64_t a = size_of(w.dtype), g = size_of(w.grad_dtype), stage = config.zero.stage;
    StateMemory memory;
    int64_t shards = 0;
    for (const Units* unit :
         {&units.embedding, &units.dense, &units.sparse, &units.experts, &units.head, &units.module}) {
        const int64_t part = unit->count * unit->part(), padded = part * unit->shards;
        memory.params += a * (stage == 3 ? part : padded);
        memory.grads += g * (stage >= 2 ? part : padded);
        double matrices = unit == &units.experts ? 1 : 0;  // their share of the unit
        if (unit == &units.dense || unit == &units.sparse || unit == &units.module) {
            const int64_t vectors =
                w.model.block_vectors(config.mesh.tp) + (unit == &units.module ? 3 * w.model.hidden : 0);
            matrices = 1 - double(vectors) / double(unit->elements);
        }
        const double state = state_bytes(config.optimizer, w.dtype, matrices);
        memory.optimizer += std::llround(state * double(unit->count * (stage == 0 ? unit->elements : unit->own())));
        shards += part;
    }
    if (config.zero.offload != Offload::none) {
        (config.zero.offload == Offload::nvme ? memory.disk : memory.host) = std::exchange(memory.optimizer, 0);
        memory.host += (a + g) * shards;
    }
    if (config.zero.offload == Offload::all) memory.params = memory.grads = 0;
    return memory;
}

// ---- one block ------------------------------------------------------------------------------------------------------

// Bytes of a block and micro-batch, and its worst moments on top of what it keeps.
struct BlockBytes {
    double kept = 0, pending = 0;             // from F to B or I; from I to W
    double backward = 0, input = 0, end = 0;  // in B; in I; at the end of I and in W, on top of what is pending
};

// What of a recipe counts: sizes that its products divide by (0: no FP8), and whether ZeRO gathers bytes.
struct RecipeTraits {
    int64_t divisor = 0;
    bool gathers_bytes = false;
};
const RecipeTraits& traits_of(const Fp8Options& options) {
    static std::map<std::string, RecipeTraits> known = {{"off", {}}};
    const auto [at, is_new] = known.insert({options.recipe, {}});
    if (!is_new) return at->second;
    const std::unique_ptr<Recipe> recipe = make_recipe(options, 3, Device::meta, Comm());
    return at->second = {recipe->divisor(), recipe->scaling(Operand::weight) == Scaling::tensor};
}

// Of a row: buffers of attention's backward pass over context-parallel ranks, for widths q and kv.
double exchange_bytes(const Workload& w, const ContextLayout& layout, double q, double kv) {
    const double a = double(size_of(w.dtype)), s = double(size_of(stats_dtype(w.dtype))), b = double(w.micro_batch);
    if (layout.gather)  // of all ranks, and once more of one sequence
        return double(layout.ranks) * 2 * (1 + 1 / b) * kv * (a + s) + q * s / (b * double(layout.chunks));
    const ContextLayout across{.ranks = layout.groups(), .chunks = layout.chunks};
    const int64_t window = w.model.window_share() < 1 ? 0 : w.model.window;  // of every layer
    const size_t steps = ring_steps(across, w.seq_len / across.granularity(), window).size();
    const double ring = 2 * kv * ((steps > 2 ? 2 : 1) * a + 3 * s) + s * (q + (q + 2 * kv) / double(layout.chunks));
    return std::max(layout.ulysses > 1 ? 2 * a * q : 0, layout.groups() > 1 ? ring : 0);
}

BlockBytes block_bytes(const Workload& w, const ParallelConfig& config, bool sparse) {
    const ExpertsConfig x = sparse ? w.model.experts : ExpertsConfig{.top_k = 0};
    LlamaConfig c = w.model;
    c.layers = 1, c.experts = {};
    if (sparse) c.ffn = x.shared * x.ffn;
    const int64_t tp = config.mesh.tp, length = w.seq_len / config.mesh.cp;
    const bool sequence = config.tensor.sequence_parallel && tp > 1;
    const bool none = w.recompute == Recompute::none, full = w.recompute == Recompute::full, again = !none && !full;
    const bool selective = w.recompute == Recompute::selective;
    const double a = double(size_of(w.dtype)), rows = double(w.micro_batch * length);
    // Widths of this rank. part: of its rows under sequence parallelism; slots: of experts, of a row.
    const double E = double(c.hidden), part = sequence ? E / double(tp) : E, q = double(c.q_width(tp));
    const double slots = double(x.top_k) / double(tp), h = slots * double(x.ffn) + double(c.ffn / tp);
    const ContextLayout context = context_layout(w.model, w.seq_len, config.mesh.cp, config.context);
    const bool by_heads = context.ulysses > 1;  // a head that several ranks of a group need is copied
    const double kv_part = double(c.kv_width(tp)), kv = std::max(kv_part, double(context.ulysses * c.head_dim()));

    // Bytes of an element that each product keeps: 1 in FP8, where its sizes allow it.
    const int64_t divisor = traits_of(config.fp8).divisor;
    const std::array<LayerShape, 4> products = layer_shapes(c, tp);  // qkv, o, gate_up, down
    std::array<double, 4> b;
    for (size_t i = 0; i < b.size(); ++i)
        b[i] = divisor > 0 && why_not_fp8(products[i], int64_t(rows), divisor).empty() ? 1 : a;
    const double replaced = (sequence ? 0 : (2 * a - b[0] - b[2]) * E) + (a - b[3]) * h;

    const auto kept_by = [&](Recompute level) {
        const double formula =
            double(activation_formula(c, w.micro_batch, length, w.dtype, level, Division{tp, sequence}).block);
        if (level == Recompute::full) return formula + rows * 12 * slots;
        const double experts = slots * (12 + a * (2 * E + (level == Recompute::none ? 3 : 2) * double(x.ffn)));
        double heads = 0;
        if (by_heads && level == Recompute::none) heads = a * 2 * (kv - kv_part);
        if (by_heads && level == Recompute::pointwise) heads = a * (c.qk_norm ? q + 2 * kv : 2 * (kv - kv_part));
        return formula + rows * (experts + heads - (level == Recompute::none ? replaced : 0));
    };
    BlockBytes bytes{.kept = kept_by(w.recompute)};
    // Full recomputation: everything else of the block, again.
    const double before = full ? kept_by(Recompute::none) - rows * a * part : 0;

    // W needs the products' inputs, some of them made again, and the gradients of their outputs.
    const double inputs = a * (2 * part + q + h + slots * E) - (again ? 0 : replaced);
    const double made_again = (again ? h : 0) + (selective ? 2 * (q + 2 * kv_part) + (by_heads ? q + 2 * kv : 0) : 0);
    const double outputs = b[0] * (q + 2 * kv) + b[1] * E + b[2] * 2 * h + (c.ffn > 0 ? b[3] * E : 0) + a * slots * E;
    bytes.pending = rows * (inputs + a * made_again + outputs);

    // Moments of the MLP's backward pass, in bytes of a row: the gradient of h; of gate_up; of the normed x.
    const double gathered = sequence ? a * E : 0, h_again = again ? a * h : 0, h_kept = again ? 0 : b[3] * h;
    const double down = gathered + a * h + h_again + (b[3] < a ? 2 * E : 0), swiglu = a * (2 * h - slots * E) + h_again;
    const double gate_up = a * E + (b[2] < a ? 4 * h : gathered) - h_kept;
    const double mlp = std::max(swiglu, sparse ? a * slots * E : std::max(down, gate_up));
    // Of attention's, when what the MLP kept is free; with later W it is not.
    const double qkv = a * (q + 2 * kv), exchange = exchange_bytes(w, context, q, kv);
    const double heads = a * q + qkv + (again ? qkv : 0) + (selective ? a * q : 0) + exchange;
    const double attention = heads - a * (2 * (h + slots * E) + (again ? 1 : 2) * part) - h_kept;
    bytes.backward = before + rows * std::max(mlp, attention);
    double input = std::max(a * 3 * h, heads + (again ? a * (part + 2 * h) : 0));
    if (b[2] < a) input = std::max(input, a * E + 4 * h + E + (again ? a * 2 * h : 0));
    bytes.input = before + rows * input;
    bytes.end = rows * std::max(a * ((again ? 1 : 2) * E + part), h_again);
    return bytes;
}

// Muon's matrices at their owners (03_zero/complete/matrix_owners.h), and the message back; or the dearest of them.
double exchange_of_matrices(const RankUnits& units, const Workload& w, const ParallelConfig& config) {
    double owned = 0, own = 0;  // elements: of whole matrices; of the rank's shards
    const Mesh& mesh = config.mesh;
    const int64_t ranks = mesh.tp * config.zero.shards(mesh.dp * mesh.cp);  // that divide the matrices
    for (const Units* unit : {&units.dense, &units.sparse, &units.experts}) {
        const int64_t divided = unit == &units.experts ? mesh.ep : mesh.tp;
        owned += double(unit->count * unit->elements * divided) / double(std::max(divided, ranks));
        own += double(unit->count * (config.zero.stage > 0 ? unit->own() : unit->elements));
    }
    const LlamaConfig& c = w.model;
    const int64_t ffn = c.is_sparse() ? std::max(c.experts.ffn, c.experts.shared * c.experts.ffn) : c.ffn;
    const double work = 4 * double(c.hidden * std::max(ffn, c.q_width())), a = double(size_of(w.dtype));
    return ranks == 1 ? a * work : a * (owned + std::max(2 * own, work));
}

// ---- a step ---------------------------------------------------------------------------------------------------------

// A rank's steps, of as many micro-batches as show what more of them repeat.
const std::vector<Step>& steps_of(const Workload& w, const ParallelConfig& config, int64_t rank) {
    const ScheduleGenerator& generator = find_schedule(config.pipeline.schedule);
    const int64_t p = config.mesh.pp, m = w.micro_batches(config.mesh.dp);
    const int64_t v = config.pipeline.virtual_stages > 0 ? config.pipeline.virtual_stages : generator.default_chunks();
    const int64_t multiple = generator.multiple ? generator.multiple(p) : 1;
    const int64_t enough = generator.in_flight({p, m, v}, rank) / v + 2 * p + 2;
    const int64_t shown = std::min(m, (enough + multiple - 1) / multiple * multiple);
    static std::map<std::tuple<std::string, int64_t, int64_t, int64_t, int64_t>, std::vector<Step>> known;
    const auto [at, is_new] = known.insert({{generator.name, p, shown, v, rank}, {}});
    if (is_new) at->second = generator.steps({p, shown, v}, rank);
    return at->second;
}

// A chunk of the rank's model: bytes of a micro-batch, and of its units' unsharded parameters and gradients.
struct ChunkBytes {
    double kept = 0, pending = 0, layers = 0, unsharded = 0;
    double backward = 0, input = -kInfinity, end = 0;  // worst moments of its blocks, on top of what all keep
    bool embedding = false, head = false;
    int64_t open = 0;  // micro-batches between I and W
};

}  // namespace

MemoryPeak memory_formula(const Workload& w, const ParallelConfig& config, int64_t rank) {
    const LlamaConfig& c = w.model;
    const Mesh& mesh = config.mesh;
    const RankUnits units(w, config, rank);
    const bool has_sparse = units.sparse.count > 0, sequence = config.tensor.sequence_parallel && mesh.tp > 1;
    Workload kept = w;  // of the blocks that --recompute-every leaves out, the first of two
    kept.recompute = Recompute::none;
    std::array<BlockBytes, 2> dense, sparse;
    for (const bool again : {false, true}) {
        if (!again && w.recompute_every == 1) continue;
        if (units.dense.count > 0) dense[again] = block_bytes(again ? w : kept, config, false);
        if (has_sparse) sparse[again] = block_bytes(again ? w : kept, config, true);
    }
    const double a = double(size_of(w.dtype)), rows = double(w.micro_batch * (w.seq_len / mesh.cp));
    const double complete = rows * a * double(c.hidden), hidden = sequence ? complete / double(mesh.tp) : complete;
    const double vocab = double((c.vocab + mesh.tp - 1) / mesh.tp), in_chunk = double(w.loss_chunk);
    // Of a micro-batch, after its head's forward pass: the logits and their input; by chunks the gradient of that.
    const bool chunks_loss = in_chunk > 0 && in_chunk < rows;
    const double logits = chunks_loss ? complete : hidden + rows * a * vocab;
    const double chunk_work = hidden + sequence * complete + in_chunk * a * (vocab + double(c.hidden));
    const double head_work = chunks_loss ? hidden : complete * (sequence ? 2 : 1);

    // Unsharded bytes: of a parameter, in a block and elsewhere; of a gradient. Elements of units.
    const double other_param = config.zero.stage == 3 ? a : 0;
    const double param = traits_of(config.fp8).gathers_bytes ? other_param / a : other_param;
    const double grad = config.zero.stage >= 2 ? double(size_of(w.grad_dtype)) : 0;
    const double block = double((has_sparse ? units.sparse : units.dense).elements);
    const double in_use = block + (has_sparse ? double(units.experts.elements) : 0);
    const double embedding = double(units.embedding.elements), head = c.tied ? embedding : double(units.head.elements);

    std::vector<ChunkBytes> chunks;
    for (const Chunk& layers : units.stage.chunks) {
        ChunkBytes& chunk = chunks.emplace_back();
        chunk.embedding = units.stage.embedding && chunks.size() == 1;
        chunk.head = units.stage.head && chunks.size() == units.stage.chunks.size();
        chunk.unsharded = (other_param + grad) * (chunk.embedding * embedding + chunk.head * head);
        for (int64_t layer = layers.first_layer; layer < layers.end_layer; ++layer, ++chunk.layers) {
            const bool again = layer % w.recompute_every == 0;
            const BlockBytes& bytes = (c.is_sparse(layer) ? sparse : dense)[again];
            const auto larger = [&](double BlockBytes::*what) {
                return std::max(dense[again].*what, sparse[again].*what);
            };
            chunk.kept += bytes.kept;
            chunk.pending += bytes.pending;
            chunk.backward = larger(&BlockBytes::backward);  // of the last: when all of the chunk is still held
            // Of the first, if W needs more of the others than they have kept.
            chunk.input = std::max(chunk.input + bytes.pending - bytes.kept, larger(&BlockBytes::input));
            chunk.end = std::max(chunk.end, larger(&BlockBytes::end));
            chunk.unsharded += (param + grad) * (c.is_sparse(layer) ? in_use : double(units.dense.elements));
        }
    }
    const bool several = chunks.size() > 1;
    // Whether the first and the last block of each chunk are gathered ahead of its pass, by that of another chunk.
    std::vector<int64_t> first(chunks.size() + 1), last(chunks.size() + 1);

    double held = 0;  // by all micro-batches in flight, and a message from each neighbour
    if (mesh.pp > 1 && w.micro_batches(mesh.dp) > 1)
        held = hidden * ((several || !units.stage.embedding) + (several || !units.stage.head));
    double open = 0;      // unsharded bytes of the chunks whose W is still to come
    double reducing = 0;  // elements of the unit whose gradients are being reduced
    double activations = 0, workspace = 0;
    const auto note = [&](double of_activations, double of_workspace) {
        if (of_activations + of_workspace <= activations + workspace) return;
        activations = of_activations;
        workspace = of_workspace;
    };
    for (const Step& step : steps_of(w, config, mesh.coordinate(rank).pp)) {
        const size_t k = size_t(step.chunk);
        ChunkBytes& chunk = chunks[k];
        const bool split = step.pass == Pass::backward_input, is_new = chunk.open == 0;
        const bool is_forward = step.pass == Pass::forward, is_last = chunk.embedding && chunk.layers == 1;
        last[k + 1] = 0;
        if (is_forward || chunk.layers == 1) first[k] = 0;
        const int64_t waiting = std::accumulate(first.begin(), first.end() - 1, int64_t(0)) +
                                std::accumulate(last.begin() + 1, last.end(), int64_t(0));
        first[k] = 0;
        if (step.pass != Pass::backward_weight) (is_forward ? first[k + 1] : last[k]) = 1;
        const double next = double(config.zero.prefetch) * (is_last ? other_param * embedding : param * block);
        const double ahead = param * block * double(waiting);
        const double params = is_new ? param * in_use + ahead + next : 0, gradients = is_new ? grad * in_use : 0;
        if (is_forward) {
            note(held + chunk.kept + complete, open + params + grad * reducing);
            held += chunk.kept + chunk.head * (logits + hidden);
            if (chunk.head && chunks_loss)
                note(held + chunk_work, open + (other_param + grad) * head + grad * reducing);
            continue;
        }
        if (step.pass == Pass::backward_weight) {
            held -= chunk.pending + (chunk.head && !chunks_loss) * logits;
            if (--chunk.open > 0) continue;
            open -= chunk.unsharded;
            reducing = chunk.embedding ? embedding : block;
            continue;
        }
        if (chunk.head) {
            const double of_head = is_new ? (other_param + grad) * head + ahead + (c.tied ? 0 : next) : 0;
            note(held + head_work + (split && !chunks_loss) * complete, open + of_head + grad * reducing);
            held -= hidden + (split && !chunks_loss ? 0 : logits);
            if (!split) reducing = head;
        }
        if (!split) {
            note(held + hidden + chunk.backward, params + gradients + grad * std::max(reducing, block));
            held -= chunk.kept;
            reducing = chunk.embedding ? embedding : block;
            continue;
        }
        const double more = chunk.pending - chunk.kept;
        const double in_i = more > 0 ? chunk.unsharded + ahead + (k > 0 ? next : 0)
                                     : params + gradients + chunk.head * (other_param + grad) * head;
        note(held + hidden + chunk.input, open + is_new * in_i + grad * reducing);
        held += more;
        if (chunk.open++ == 0) open += chunk.unsharded;
        note(held + hidden + chunk.end, open + grad * reducing);
    }
    if (find_optimizer(config.optimizer).muon) note(0, exchange_of_matrices(units, w, config));
    activations += 3 * 4 * rows * double(w.micro_batches(mesh.dp));  // tokens, targets, positions
    const StateMemory states = state_memory(units, w, config);
    MemoryPeak peak{.kind = {states.params, states.grads, states.optimizer, std::llround(activations), 0,
                             std::llround(workspace), states.host, states.disk}};
    peak.total = std::accumulate(peak.kind.begin(), peak.kind.begin() + kDeviceMemoryKinds, int64_t(0));
    return peak;
}

StageSize stage_size(const Workload& workload, const ParallelConfig& config, int64_t rank) {
    const RankUnits units(workload, config, rank);
    StageSize size{.layers = units.dense.count + units.sparse.count,
                   .sparse_layers = units.sparse.count,
                   .head = units.stage.head,
                   .ep_elements = double(units.experts.count * units.experts.elements)};
    for (const Units* unit : {&units.embedding, &units.dense, &units.sparse, &units.head})
        size.elements += double(unit->count * unit->elements);
    return size;
}

StateMemory state_memory(const Workload& workload, const ParallelConfig& config, int64_t rank) {
    return state_memory(RankUnits(workload, config, rank), workload, config);
}

}  // namespace train70b
