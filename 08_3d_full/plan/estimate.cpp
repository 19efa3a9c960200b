#include "08_3d_full/plan/estimate.h"

#include <cmath>

#include "01_single_gpu/complete/hf/hf.h"
#include "01_single_gpu/core/registry.h"
#include "05_pipeline/complete/schedule_simulation.h"
#include "07_fp8/complete/optimizers.h"

namespace train70b {

std::vector<std::pair<const char*, double>> parts_of(const Estimate& e) {
    return {{"compute", e.compute}, {"recompute", e.recompute}, {"exposed tp", e.tp},
            {"exposed cp", e.cp},   {"exposed pp", e.pp},       {"exposed dp", e.dp},
            {"bubble", e.bubble},   {"update", e.update},       {"exposed ep", e.ep}};
}

Estimator::Estimator(const PlanRequest& request, const ClusterModel& cluster)
    : request_(request), cluster_(cluster), network_(cluster, request.gpus), element_(int64_t(size_of(request.dtype))) {
    if (!find_optimizer(request.optimizer).muon) return;
    for (const Param& param : all_params(request.model)) {
        if (!takes_muon(param)) continue;
        const int64_t rows = param.matrix_rows(), cols = param.global_shape[1];
        const int64_t small = std::min(rows, cols), large = std::max(rows, cols);
        const double step = product(small, small, large, false) + product(small, small, small, false) +
                            product(small, large, small, false);
        orthogonalization_ += double(param.matrices) * kNewtonSchulzSteps * step / double(request.model.layers);
    }
}

double Estimator::op(const std::string& name, std::vector<int64_t> shape, double flops, double bytes, DType dtype) {
    return op_seconds(cluster_.device, {name, std::move(shape), dtype, flops, bytes});
}

double Estimator::product(int64_t m, int64_t n, int64_t k, bool fp8) {
    const double flops = 2.0 * double(m) * double(n) * double(k);
    const double operand_bytes = fp8 ? 1 : double(element_);
    const double bytes =
        operand_bytes * (double(m) * double(k) + double(k) * double(n)) + double(element_) * double(m) * double(n);
    return op(fp8 ? "scaled_matmul" : "matmul", {m, n, k}, flops, bytes, fp8 ? DType::e4m3 : request_.dtype);
}

// A message goes from the first rank to the second; a shift around the ring takes as long as its slowest message.
double Estimator::seconds_of(const std::string& operation, double bytes, int64_t stride, int64_t count) {
    if (count == 1 || bytes <= 0) return 0;
    const auto [known, is_new] = seconds_.insert({{operation, bytes, stride, count}, 0});
    if (!is_new) return known->second;
    std::vector<int64_t> members;
    for (int64_t i = 0; i < count; ++i) members.push_back(i * stride);
    CommCall call;
    call.operation = operation;
    call.bytes = std::llround(bytes);
    call.shift = operation == "send_recv";
    call.channel = operation == "send";
    if (call.channel) call.to = 1;
    for (int64_t i = 0; i < (call.shift ? count : 1); ++i) {
        if (call.shift) call.to = int((i + 1) % count), call.from = int((i + count - 1) % count);
        known->second = std::max(known->second, network_.seconds_alone(network_.transfer(call, members, i)));
    }
    return known->second;
}

// Of a layer: 4 FLOPs per pair of tokens, head and dimension, for scores and values; backward five products instead of
// two. A ring does it in n parts, in the mean of the layers, each with a block of the keys, and merges them.
Estimator::PassSeconds Estimator::attention(const Layout& l, double n) {
    const LlamaConfig& c = request_.model;
    const double T = double(request_.seq_len), rows = double(l.micro_batch) * T / double(l.cp);
    const double q = double(c.q_width(l.tp)), kv = double(c.kv_width(l.tp)), a = double(element_);
    const double flops = 4 * rows * c.attended(T) / 2 * q / n, bytes = a * rows * (2 * q + 2 * kv);
    // Gathered keys: all queries of the rank in one call, as efficient as a whole sequence.
    const std::vector<int64_t> shape = {l.micro_batch,
                                        request_.seq_len / l.cp,
                                        std::llround(c.attended(T)) / (n > 1 ? l.cp : 1),
                                        c.heads / l.tp,
                                        std::max<int64_t>(c.kv_heads / l.tp, 1),
                                        c.head_dim(),
                                        1};
    const double merge = n > 1 ? memory_bound(a * rows * 3 * q) : 0;
    const double merge_back = n > 1 ? memory_bound(a * rows * 3 * (q + 2 * kv)) : 0;
    return {n * op("attention", shape, flops, bytes, request_.dtype) + (n - 1) * merge,
            n * op("attention_backward", shape, 2.5 * flops, 2 * bytes, request_.dtype) + (n - 1) * merge_back, 0};
}

std::vector<std::pair<int64_t, int64_t>> Estimator::halves(const Layout& l, bool sparse) const {
    const LlamaConfig& c = request_.model;
    const int64_t q = c.q_width(l.tp), F = (sparse ? c.experts.shared * c.experts.ffn : c.ffn) / l.tp;
    std::vector<std::pair<int64_t, int64_t>> list = {{q + 2 * c.kv_width(l.tp), q}};
    if (F > 0) list.push_back({2 * F, F});
    return list;
}

// f and g of a layer's column-parallel and row-parallel products, of each half one. With overlap
// (04_tensor_parallel/complete/overlap.h) a product is tp pieces of rows, and what a ring's shift takes longer than a
// piece is exposed, as is what the pieces take longer than the whole; in the backward pass the gather of x stands
// beside dX, and f's collective beside dW.
Estimator::PassSeconds Estimator::tp_of(const Layout& l, bool sparse) {
    const int64_t rows = l.micro_batch * request_.seq_len / l.cp, E = request_.model.hidden;
    const auto widths = halves(l, sparse);
    const double n = double(widths.size());
    const double bytes = double(element_) * double(rows) * double(E), steps = double(l.tp - 1);
    const double gather = l.sequence_parallel ? seconds_of("all_gather", bytes, 1, l.tp) : 0;
    const double reduce = seconds_of(l.sequence_parallel ? "reduce_scatter" : "all_reduce", bytes, 1, l.tp);
    PassSeconds all;
    if (!l.tp_overlap) {  // sequence parallelism gathers the input of the weight gradients once more
        all.forward = n * (gather + reduce);
        all.backward = n * (2 * gather + reduce);
    } else if (!l.sequence_parallel) {
        all.forward = n * reduce;
        for (const auto& [out, in] : widths) all.backward += std::max(0.0, reduce - product(out, E, rows, false));
    } else {
        const double shift = seconds_of("send_recv", bytes / double(l.tp), 1, l.tp);
        const auto ring = [&](int64_t out, int64_t in) {
            const double piece = product(rows / l.tp, out, in, false);
            return double(l.tp) * piece - product(rows, out, in, false) + steps * std::max(0.0, shift - piece);
        };
        for (const auto& [out, in] : widths) {  // column-parallel: x (rows, E) -> (rows, out)
            all.forward += ring(out, E);
            all.backward += std::max(0.0, gather - product(rows, E, out, false)) +
                            std::max(0.0, reduce - product(out, E, rows, false));
        }
        for (const auto& [out, in] : widths) {  // row-parallel: x (rows, in) -> (rows, E)
            all.forward += ring(E, in);
            all.backward += ring(in, E);
        }
    }
    all.again = l.recompute == Recompute::full ? all.forward : 0;
    return all;
}

// Rows: tokens of a micro-batch on a rank. Products and attention see all rows of the tp group; with sequence
// parallelism norms and residuals see their part.
Estimator::Layer Estimator::layer_of(const Layout& l, bool sparse) {
    const auto key = std::tuple(l.tp, l.cp, l.micro_batch, l.sequence_parallel, l.tp_overlap, l.recompute,
                                sparse ? l.ep : 1, sparse);
    if (const auto found = layers_.find(key); found != layers_.end()) return found->second;
    const LlamaConfig& c = request_.model;
    const bool fp8 = request_.fp8.recipe != "off";
    const int64_t rows = l.micro_batch * request_.seq_len / l.cp, E = c.hidden;
    const int64_t q = c.q_width(l.tp), kv = c.kv_width(l.tp);
    const double R = double(rows), a = double(element_), own = R / (l.sequence_parallel ? double(l.tp) : 1);
    const auto widths = halves(l, sparse);
    const int64_t F = widths.size() > 1 ? widths[1].second : 0;

    double products = 0, gradients = 0;  // Y = X W; dX and dW
    const auto multiply = [&](int64_t in, int64_t out) {
        products += product(rows, out, in, fp8);
        gradients += product(rows, in, out, fp8) + product(out, in, rows, fp8);
    };
    for (const auto& [columns, inner] : widths) multiply(E, columns), multiply(inner, E);
    const ContextAlgorithm& algorithm = find_entry(context_algorithms(), "--cp-algorithm", request_.cp_algorithm);
    const bool ring = l.cp > 1 && !algorithm.gather && algorithm.ulysses(l.cp, 0) == 1;
    double n = double(l.cp);  // steps of a ring, in the mean of the layers
    if (ring) {
        const ContextLayout context{.ranks = l.cp, .chunks = algorithm.chunks};
        const auto steps = ring_steps(context, request_.seq_len / context.granularity(), c.window);
        n += c.window_share() * (double(steps.size()) - n);
    }
    const PassSeconds attend = attention(l, ring ? n : 1);
    // Elements read and written: two norms, two residuals (own rows); RoPE; SwiGLU. Backward: twice.
    const double pointwise =
        memory_bound(a * (own * double(2 * 2 * E + 2 * 3 * E) + R * double(2 * (q + kv)) + R * double(3 * F)));

    Layer layer;
    layer.compute = {products + attend.forward + pointwise, gradients + attend.backward + 2 * pointwise, 0};
    layer.compute.again = l.recompute == Recompute::none        ? 0
                          : l.recompute == Recompute::pointwise ? pointwise
                          : l.recompute == Recompute::selective ? pointwise + attend.forward
                                                                : layer.compute.forward;
    if (sparse) add_experts(layer, l);
    if (l.tp > 1) layer.tp = tp_of(l, sparse);
    if (l.cp > 1) {  // keys and values of the others; backward their gradients as well
        const double bytes = a * R * double(2 * kv);
        if (ring) {  // each shift beside one step of attention
            const double shift = seconds_of("send_recv", bytes, l.tp, l.cp);
            const double back = seconds_of("send_recv", 2 * bytes, l.tp, l.cp);
            layer.cp = {(n - 1) * std::max(0.0, shift - attend.forward / n),
                        (n - 1) * std::max(0.0, back - attend.backward / n), 0};
        } else {
            layer.cp.forward = seconds_of("all_gather", n * bytes, l.tp, l.cp);
            layer.cp.backward = layer.cp.forward + seconds_of("reduce_scatter", n * bytes, l.tp, l.cp);
        }
        if (l.recompute >= Recompute::selective) layer.cp.again = layer.cp.forward;
    }
    return layers_[key] = layer;
}

// Of a rank's rows, all of which have the same number of slots for each expert: what they pass besides the halves.
// Elements read and written: rows gathered by slot, sorted by expert where several are on the rank, and summed by row;
// SwiGLU; the router's logits and weights in fp32, with its gradients' operands.
void Estimator::add_experts(Layer& layer, const Layout& l) {
    const LlamaConfig& c = request_.model;
    const int64_t N = c.experts.count, local_experts = N / l.ep, E = c.hidden, F = c.experts.ffn;
    const int64_t rows = l.micro_batch * request_.seq_len / (l.cp * l.tp), slots = rows * c.experts.top_k;
    const int64_t expert_rows =
        std::max<int64_t>((slots + local_experts - 1) / local_experts, 1);  // of ep ranks for one expert
    const double a = double(element_), stats_bytes = 4, R = double(rows), S = double(slots),
                 groups = S / double(expert_rows);
    const auto in_fp32 = [&](int64_t m, int64_t n, int64_t k) {
        const double flops = 2.0 * double(m) * double(n) * double(k);
        return op("matmul", {m, n, k}, flops, stats_bytes * double(m * k + k * n + m * n), DType::f32);
    };
    double products = product(rows, N, E, false), gradients = in_fp32(rows, E, N) + in_fp32(N, E, rows);
    for (const auto& [in, out] : {std::pair(E, 2 * F), {F, E}}) {
        products += groups * product(expert_rows, out, in, false);
        gradients += groups * (product(expert_rows, in, out, false) + product(out, in, expert_rows, false));
    }
    const double sorts = l.ep > 1 && local_experts > 1 ? 2 * memory_bound(a * S * double(2 * E)) : 0;
    const double moved = memory_bound(a * S * double(2 * E)) + memory_bound(a * (S + R) * double(E)) + sorts;
    const double swiglu = memory_bound(a * S * double(3 * F));
    const double router = memory_bound(stats_bytes * R * double(3 * N));
    const double moved_back =
        moved + memory_bound(a * S * double(2 * E)) + memory_bound((a + stats_bytes) * R * double(2 * E));
    const PassSeconds experts{products + moved + swiglu + router, gradients + moved_back + 2 * swiglu + router, 0};

    const double shared = double(c.experts.shared * F / l.tp), there = a * S * double(E);
    const double exchange = seconds_of("all_to_all", there, 1, l.ep);
    const double numbers =
        double(8 * N);  // of bytes, with what the ranks of a sequence tell each other for its balance
    const double counts = seconds_of("scalar", numbers, 1, l.ep) + seconds_of("scalar", numbers, 1, l.tp) +
                          seconds_of("scalar", numbers, l.tp, l.cp);
    const auto beside = [&](double passes) {  // the shared experts' products
        return shared > 0 ? passes * product(rows * l.tp, int64_t(3 * shared), E, false) : 0;
    };
    layer.ep.forward = exchange + std::max(0.0, exchange - beside(1));
    layer.ep.backward = exchange + std::max(0.0, exchange - beside(2));
    layer.ep.again = l.recompute == Recompute::full ? layer.ep.forward : 0;
    layer.ep.forward += counts;

    layer.attention = layer.compute.forward;
    layer.compute.forward += experts.forward;
    layer.compute.backward += experts.backward;
    if (l.recompute == Recompute::full) layer.compute.again += experts.forward;
    if (l.recompute == Recompute::pointwise || l.recompute == Recompute::selective) layer.compute.again += swiglu;
}

// The head: its product and the loss. (The embedding is a lookup.)
Estimator::PassSeconds Estimator::head_of(const Layout& l) {
    const auto key = std::tuple(l.tp, l.cp, l.micro_batch, l.sequence_parallel);
    if (const auto found = heads_.find(key); found != heads_.end()) return found->second;
    const LlamaConfig& c = request_.model;
    const int64_t rows = l.micro_batch * request_.seq_len / l.cp, V = (c.vocab + l.tp - 1) / l.tp, E = c.hidden;
    const double loss = memory_bound(double(element_) * double(rows) * double(V) * 2);
    return heads_[key] = {product(rows, V, E, false) + loss,
                          product(rows, E, V, false) + product(V, E, rows, false) + loss, 0};
}

// Over the ranks that share parameters. Hybrid shard: over a group's, and what was reduced there over its replicas.
// Experts: over theirs.
double Estimator::reduction(const Layout& l, double elements, double ep_elements, const char* operation,
                            double bytes_per_element) {
    const int64_t ranks = l.dp * l.cp, group = l.zero == 0 ? ranks : l.shards();
    if (l.own_edp() && ep_elements > 0)
        return reduction(l, elements, 0, operation, bytes_per_element) +
               seconds_of(operation, ep_elements * bytes_per_element, l.ep, l.edp());
    const double bytes = (elements + ep_elements) * bytes_per_element;
    const double own = seconds_of(operation, bytes, l.tp, group);
    if (group == ranks || std::string(operation) == "all_gather") return own;
    return own + seconds_of("all_reduce", bytes / double(group), l.tp * group, ranks / group);
}

// ZeRO-3 gathers a layer's experts while the block around them runs: beside its attention, and, in a backward pass
// without recomputation, beside nothing, because they come first.
double Estimator::gathered_experts(const Layout& l, const StageSize& stage, const Layer& layer) {
    if (stage.sparse_layers == 0) return 0;
    const double layers = double(stage.sparse_layers);
    const double gather = reduction(l, 0, stage.ep_elements / layers, "all_gather", double(element_));
    const double after_attention = std::max(0.0, gather - layer.attention);
    return layers * (after_attention + (l.recompute == Recompute::full ? after_attention : gather));
}

double Estimator::tp_bytes_per_layer(const Layout& l) const {
    const double bytes =
        double(element_) * double(l.micro_batch * request_.seq_len / l.cp) * double(request_.model.hidden);
    const double shares = double(l.tp - 1) / double(l.tp);
    const bool sparse = request_.model.experts.count > 0;
    return shares * bytes * (l.sequence_parallel ? 10 : 8) * double(halves(l, sparse).size()) / 2;
}

Estimate Estimator::operator()(const Layout& l) {
    const bool some_sparse = request_.model.experts.count > 0;
    const Layer dense = some_sparse && request_.model.experts.dense_layers == 0 ? Layer() : layer_of(l, false);
    const Layer sparse = some_sparse ? layer_of(l, true) : Layer();
    const PassSeconds head = head_of(l);
    const double m = double(request_.global_batch) / double(l.dp * l.micro_batch), a = double(element_);
    const double g = double(size_of(request_.grad_dtype));
    const ParallelConfig config = config_of(request_, l);
    const Workload workload = workload_of(request_, l);
    Estimate slowest;
    for (const int64_t pp : outer_stages(l)) {
        const StageSize stage = stage_size(workload, config, config.mesh.rank({.pp = pp}));
        const double sparse_layers = double(stage.sparse_layers), layers = double(stage.layers) - sparse_layers;
        Estimate e;
        double forward = stage.head ? head.forward : 0, backward = stage.head ? head.backward : 0;
        double once = stage.head ? head.total() : 0;
        for (const auto& [count, layer] : {std::pair(layers, dense), {sparse_layers, sparse}}) {
            once += count * layer.compute.total();
            e.recompute += m * count * layer.compute.again;
            e.tp += m * count * (layer.tp.total() + layer.tp.again);
            e.cp += m * count * (layer.cp.total() + layer.cp.again);
            e.ep += m * count * (layer.ep.total() + layer.ep.again);
            forward += count * (layer.compute.forward + layer.tp.forward + layer.cp.forward);
            backward += count * (layer.compute.backward + layer.compute.again + layer.tp.backward + layer.tp.again +
                                 layer.cp.backward + layer.cp.again);
        }
        e.compute = m * once;
        // Gradients and ZeRO's parameters over dp x cp, those of experts over edp; their rows hide none of it.
        if (l.dp * l.cp > 1 || (some_sparse && l.edp() > 1)) {
            const double units = double(stage.layers) + 1;
            // All but the last unit's may be hidden. Collectives run one after another: beside tensor or context
            // parallelism, what hides them is the time to that group's next call.
            const double beside = l.tp > 1 || l.cp > 1 ? 0.25 : 1;
            const auto behind = [&](double comm, double work) {
                return std::max(0.0, comm - beside * work) + std::min(comm, beside * work) / units;
            };
            const double reduce =
                reduction(l, stage.elements, stage.ep_elements, l.zero == 0 ? "all_reduce" : "reduce_scatter", g);
            if (l.zero <= 1) e.dp = behind(reduce, backward);
            if (l.zero == 2) e.dp = m * behind(reduce, backward);
            if (l.zero == 3) {
                const double gather = reduction(l, stage.elements, 0, "all_gather", a);
                e.dp = m * (behind(gather, forward) + behind(gather + reduce, backward) +
                            gathered_experts(l, stage, sparse));
            }
            if (l.zero == 1 || l.zero == 2)
                e.update += reduction(l, stage.elements, stage.ep_elements, "all_gather", a);
        }
        // Master weights and moments are read and written, gradients read, weights written.
        const double owned = stage.elements / double(l.shards()) + stage.ep_elements / double(l.ep_shards());
        const double states = state_bytes(request_.optimizer, request_.dtype, muon_share(request_.model));
        e.update += memory_bound(owned * (2 * states + g + a));
        if (orthogonalization_ > 0) {  // Muon: by owners, to whom parts go and from whom they come back
            const int64_t ranks = l.tp * l.shards();
            e.update += orthogonalization_ * double(stage.layers) / double(ranks) +
                        2 * seconds_of("all_to_all", a * owned, 1, ranks);
        }
        if (l.pp > 1) {
            const double busy = e.compute + e.recompute + e.tp + e.cp + e.ep;
            const int64_t p = l.pp, v = l.virtual_stages;
            const double share = l.generator().bubble({p, int64_t(m), v});
            e.bubble = busy * share / (1 - share);
            const double rows =
                double(l.micro_batch * request_.seq_len / l.cp) / (l.sequence_parallel ? double(l.tp) : 1);
            const double hop = seconds_of("send", a * rows * double(request_.model.hidden), l.tp * l.cp * l.dp, 2);
            // Each micro-batch makes a round trip; where no more are in flight than a pipeline needs, it is exposed.
            const double filling = 2 * double(p - 1) * hop,
                         tight = v == 1 ? m * 2 * hop * double(p - 1) / double(p) : 0;
            const double passing = std::max(0.0, 2 * m * double(v) * hop - busy);
            e.pp = filling + std::max(tight, passing);
        }
        if (e.seconds() > slowest.seconds()) slowest = e;
    }
    return slowest;
}

}  // namespace train70b
