#include "01_single_gpu/complete/roles.h"

#include <cstring>
#include <nlohmann/json.hpp>

#include "01_single_gpu/complete/step_report.h"

namespace train70b {

std::vector<double> gather(const Groups& groups, const std::vector<double>& own) {
    return groups.pp->gather(groups.dp_cp->gather(groups.tp->gather(own)));
}

nlohmann::ordered_json Runtime::memory_per_rank(const MemoryPeak& own) const {
    return nlohmann::ordered_json::array({to_json(own)});
}

// ---- one rank -------------------------------------------------------------------------------------------------------

double LocalStore::matrix_squares() const {
    std::vector<Param*> matrices;
    for (Param* param : model_.params())
        if (model_.is_matrix_of_one_use(*param)) matrices.push_back(param);
    return total_squares(matrices, Which::grad);
}

Tensor Accumulate::forward_backward(const MicroBatches& batches) {
    // tag::lab-accumulate[]
    // The tape of a micro-batch, and with it its activations, is gone before the next one begins.
    Tensor total;
    for (int64_t i = 0; i < batches.count; ++i) {
        Tape tape;
        ledger().phase(fmt::format("forward {}", i));
        Tensor loss = [&] {
            Span span("forward", "phase");
            return model_.forward(tape, batches.get(i)).data;
        }();
        accumulate(total, loss);
        ledger().phase(fmt::format("backward {}", i));
        Span span("backward", "phase");
        tape.backward();
    }
    return total;
    // end::lab-accumulate[]
}

// ---- functions over the roles ---------------------------------------------------------------------------------------

void sum_partial_gradients(Llama& model, const ParamStore& store) {
    std::vector<const Group*> groups;
    std::map<const Group*, std::vector<Tensor>> grads;
    for (const Param* param : model.params()) {
        const Group* group = param->partial_grad_group.get();
        if (!group) continue;
        if (!grads.contains(group)) groups.push_back(group);
        for (const Tensor& part : store.gradient_parts(*param)) grads[group].push_back(part);
        grads.try_emplace(group);
    }
    // Ranks with several groups do not wait in a cycle: all ranks of a stage meet theirs in one order, and the one
    // group that is of two stages (tied embeddings) comes first on the first stage and last on the last.
    for (const Group* group : groups) {
        const int64_t size = total_size(grads[group]);
        if (size == 0) continue;  // then so it is on all ranks of the group: their shards have equal bounds
        if (grads[group].size() == 1 && grads[group][0].device() == model.options.device) {
            group->sum_tensor(grads[group][0]);
            continue;
        }
        Tensor message({size}, model.options.grad_dtype, model.options.device, Memory::comm);
        copy_to_flat(message, grads[group]);
        group->sum_tensor(message);
        copy_from_flat(grads[group], message);
    }
}

namespace {

// Assembles the full parameter on rank 0 of the ranks that divide it, from the ranks' rectangles one by one. local:
// this rank's rectangle.
Tensor assemble(const Group& ranks, const Param& param, const Tensor& local) {
    const Rect own = param.real();
    const std::vector<double> rects = ranks.gather(
        {double(own.row_begin), double(own.rows), double(own.col_begin), double(own.cols), double(param.replica)});
    const auto replica = [&](int rank) { return rects[5 * size_t(rank) + 4] > 0; };
    if (ranks.rank() > 0) {
        if (!replica(ranks.rank())) ranks.send(local, 0);
        return {};
    }
    Tensor full(param.global_shape, local.dtype(), Device::cpu, Memory::workspace);
    const int64_t cols = param.is_matrix() ? param.global_shape[1] : 1, width = size_of(full.dtype());
    for (int r = 0; r < ranks.size(); ++r) {
        if (replica(r)) continue;
        Tensor part = local;
        if (r > 0) ranks.recv(part = Tensor(local.shape(), local.dtype(), local.device(), Memory::workspace), r);
        const Tensor host = converted(part, part.dtype(), Device::cpu);
        const double* rect = &rects[5 * size_t(r)];
        const int64_t row_begin = int64_t(rect[0]), rows = int64_t(rect[1]), col_begin = int64_t(rect[2]);
        const int64_t part_cols = int64_t(rect[3]);
        for (int64_t row = 0; row < rows; ++row)
            std::memcpy(full.data<char>() + ((row_begin + row) * cols + col_begin) * width,
                        host.data<char>() + row * part_cols * width, size_t(part_cols * width));
    }
    return full;
}

// Sends a parameter from the pipeline stage that holds it to the first one. `local`: empty on the other stages.
Tensor send_to_first_stage(const Group& pp, const Tensor& local, const Shape& shape, DType dtype, Device device) {
    const std::vector<double> has = pp.gather({local ? 1.0 : 0.0});
    const int owner = int(std::find(has.begin(), has.end(), 1.0) - has.begin());
    if (owner == 0 || owner == pp.size()) return local;
    if (pp.rank() != owner && pp.rank() != 0) return {};
    Tensor x(shape, dtype, device, Memory::workspace);
    if (pp.rank() == 0) {
        pp.recv(x, owner);
        return x;
    }
    copy(x, local);
    pp.send(x, 0);
    return {};
}

}  // namespace

Tensor full_param(Llama& model, const ParamStore& store, const Groups& groups, const Param& wanted, Which which) {
    const std::vector<Param*> params = model.params();
    const auto found = std::find_if(params.begin(), params.end(), [&](const Param* param) {
        const bool copy = param == &model.embed_tokens && !model.stage.embedding;  // tied, on the last stage
        return param->name == wanted.name && !copy;
    });
    Tensor x;
    if (const FeedForward* owner = model.with_buffer(wanted.name)) {  // equal on all ranks of the stage
        x = buffer_tensor(*owner, model.options.device);
    } else if (found != params.end()) {  // on this pipeline stage
        x = store.full(**found, which);
        const Group& ranks = (*found)->over_ep ? *groups.ep : *groups.tp;
        if (x && ranks.size() > 1) x = assemble(ranks, **found, x);  // x: on all of these ranks, or on none
    } else {
        CHECK(groups.pp->size() > 1, "{} is not a parameter of this model", wanted.name);
    }
    if (groups.pp->size() == 1) return x;
    const DType dtype = which == Which::data ? model.options.dtype : model.options.grad_dtype;
    return send_to_first_stage(*groups.pp, x, wanted.global_shape, stored_dtype(wanted.name, dtype),
                               model.options.device);
}

}  // namespace train70b
