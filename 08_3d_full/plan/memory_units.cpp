// The passes of a block, the head and the embedding.
#include <algorithm>

#include "08_3d_full/plan/memory_unit_walk.h"

namespace train70b {

namespace {}

// ---- a block, forward -----------------------------------------------------------------------------------------------

Held UnitWalk::attention_half(const Held& x, const Held& inv_rms, Held normed, SavedBlock* saved) {
    const bool recomputes = saved && s_.pointwise();
    const bool gathers = s_.sequence && !s_.overlap;
    const bool keeps_transposed = saved && s_.fp8[size_t(Layer::qkv)] && !recomputes && !gathers;
    if (saved) {
        saved->x = x;
        saved->x_inv_rms = inv_rms;
        if (!recomputes && !keeps_transposed) saved->x_normed = normed;
    }
    Held input = input_of_column(normed);
    if (gathers && recomputes) normed = Held();  // made again from x
    Held qkv;
    {
        Held gathered;
        if (s_.sequence && s_.overlap) gathered = all_rows(kComm);  // all_gather_matmul
        qkv = linear(Layer::qkv, kActivations, s_.a * s_.R * (s_.q + 2 * s_.kv),
                     keeps_transposed ? &saved->transposed[int(Layer::qkv)] : nullptr);
    }
    QKV local = split_rope();
    if (saved && (s_.norms || (recomputes && (s_.U == 1 || s_.selective())))) saved->qkv = qkv;
    if (!recomputes) qkv = Held();  // what is made again from it keeps it

    Held mixed, out_by_heads;  // Ulysses can make one again from the other
    {
        QKV heads = local;
        if (s_.U > 1) {
            heads.q = scatter_heads(s_.q);
            heads.k = scatter_heads(s_.kv);
            heads.v = scatter_heads(s_.kv);
        }
        Attended attended = attend();
        if (saved && !(s_.U == 1 && recomputes) && !s_.selective())
            saved->q = heads.q, saved->k = heads.k, saved->v = heads.v;
        if (saved && !s_.selective()) saved->out = attended.out, saved->lse = attended.lse;
        attended.lse = Held();
        if (s_.U == 1) {
            mixed = attended.out;
        } else {
            mixed = gather_heads(s_.q);
            if (!saved) out_by_heads = attended.out;
        }
    }
    return row_parallel(Layer::o, nullptr);
}

Held UnitWalk::mlp_half(const Held& normed, SavedBlock* saved) {
    const bool recomputes = saved && s_.pointwise();
    const bool gathers = s_.sequence && !s_.overlap;
    const bool keeps_transposed = saved && s_.fp8[size_t(Layer::gate_up)] && !recomputes && !gathers;
    if (saved && !recomputes && !keeps_transposed) saved->middle_normed = normed;
    Held h;
    {
        const Held input = input_of_column(normed);
        Held gate_up;
        {
            Held gathered;
            if (s_.sequence && s_.overlap) gathered = all_rows(kComm);
            gate_up = linear(Layer::gate_up, kActivations, s_.a * s_.R * 2 * s_.F,
                             keeps_transposed ? &saved->transposed[int(Layer::gate_up)] : nullptr);
        }
        h = held(kActivations, s_.a * s_.R * s_.F);
        if (saved) saved->gate_up = gate_up;
    }
    const bool keeps_h = saved && !recomputes;
    const bool fp8 = s_.fp8[size_t(Layer::down)];
    if (keeps_h && !fp8) saved->h = h;
    return row_parallel(Layer::down, keeps_h && fp8 ? &saved->transposed[int(Layer::down)] : nullptr);
}

// (R_l, E) -> (R_l, E)
Held UnitWalk::block_forward(const Held& x, SavedBlock* saved) {
    Held middle, inv_rms, normed;
    {
        Held z;
        {
            Held x_normed = residual();
            z = attention_half(x, row_stats(), std::move(x_normed), saved);
        }
        middle = residual();
        normed = residual();
        inv_rms = row_stats();
    }
    if (saved) saved->middle = middle, saved->middle_inv_rms = inv_rms;
    inv_rms = Held();
    const Held mlp = mlp_half(normed, saved);
    return residual();
}

// ---- a block, backward ----------------------------------------------------------------------------------------------

// The gradient through a norm is added to that of its input, in place where nothing else refers to it.
Held UnitWalk::norm_backward(Held& x, Held& inv_rms, Held /*dy*/, Held dx) {
    const Held part = residual();
    if (!dx)
        dx = part;
    else if (!dx.sole_owner())
        dx = residual();
    x = inv_rms = Held();
    return dx;
}

Held UnitWalk::mlp_half_backward(SavedBlock& saved, Held dy) {
    Held dh = linear_backward(Layer::down, gather_rows(std::move(dy)), std::move(saved.h),
                              std::move(saved.transposed[int(Layer::down)]));
    if (split_ && s_.pointwise()) deferred_.back().made_from[0] = saved.gate_up;
    Held dgate_up = held(kActivations, s_.a * s_.R * 2 * s_.F);
    dh = Held();
    saved.gate_up = Held();
    Held dnormed = linear_backward(Layer::gate_up, std::move(dgate_up), std::move(saved.middle_normed),
                                   std::move(saved.transposed[int(Layer::gate_up)]));
    if (split_ && s_.pointwise()) {
        deferred_.back().made_from[0] = saved.middle;
        deferred_.back().made_from[1] = saved.middle_inv_rms;
    }
    return scatter_rows(std::move(dnormed));
}

Held UnitWalk::attention_half_backward(SavedBlock& saved, Held dz) {
    WeightGradient of_o;
    Held dmixed = input_gradient(Layer::o, gather_rows(std::move(dz)), of_o);
    QKV by_tokens;
    const auto recompute_attention = [&] {
        recompute_qkv(saved, by_tokens);
        const Attended attended = attend();
        saved.out = attended.out, saved.lse = attended.lse;
    };
    if (s_.selective() && !split_) recompute_attention();
    of_o.x = saved.out;
    if (!split_) run(of_o), of_o = {};
    if (s_.U > 1) {
        const Held dmixed_by_tokens = std::move(dmixed);
        dmixed = scatter_heads(s_.q);
    }
    if (s_.selective() && split_) recompute_attention();
    if (s_.pointwise() && !s_.selective() && s_.U == 1) recompute_qkv(saved, by_tokens);
    QKV d = attend_backward();
    if (split_) {
        of_o.x = saved.out;
        if (s_.selective()) {
            const Held parts[] = {saved.qkv, saved.q,     saved.k,     saved.v,    saved.out,
                                  saved.lse, by_tokens.q, by_tokens.k, by_tokens.v};
            std::copy(std::begin(parts), std::end(parts), of_o.made_from);
        }
        deferred_.push_back(std::move(of_o));
    }
    dmixed = saved.q = saved.k = saved.v = saved.out = saved.lse = Held();
    by_tokens = {};
    if (!s_.norms) saved.qkv = Held();
    if (s_.U > 1) {
        d.v = gather_heads(s_.kv);
        d.k = gather_heads(s_.kv);
        d.q = gather_heads(s_.q);
    }
    Held dqkv = held(kActivations, s_.a * s_.R * (s_.q + 2 * s_.kv));
    d = {};
    saved.qkv = Held();
    Held dnormed = linear_backward(Layer::qkv, std::move(dqkv), std::move(saved.x_normed),
                                   std::move(saved.transposed[int(Layer::qkv)]));
    if (split_ && s_.pointwise()) {
        deferred_.back().made_from[0] = saved.x;
        deferred_.back().made_from[1] = saved.x_inv_rms;
    }
    return scatter_rows(std::move(dnormed));
}

Held UnitWalk::block_backward(SavedBlock& saved, Held dy) {
    // The residual branch and g have one gradient, which is added to in place where only one of them is left.
    Held dmiddle = dy;
    Held dnormed = mlp_half_backward(saved, std::move(dy));
    dmiddle = norm_backward(saved.middle, saved.middle_inv_rms, std::move(dnormed), std::move(dmiddle));
    Held dx = dmiddle;
    dnormed = attention_half_backward(saved, std::move(dmiddle));
    return norm_backward(saved.x, saved.x_inv_rms, std::move(dnormed), std::move(dx));
}

// ---- the head -------------------------------------------------------------------------------------------------------

// (R_l, E) normed -> the gradient of the logits, which overwrites them
Held UnitWalk::head_product(const Held& normed) {
    Held logits;
    {
        const Held input = input_of_column(normed);
        Held gathered;
        if (s_.sequence && s_.overlap) gathered = all_rows(kComm);
        logits = held(kActivations, s_.a * s_.R * s_.V);
    }
    // The maximum, the sum, the target's logit, lse; over several ranks also the maximum of them all
    moment(kActivations, s_.s * s_.R * (s_.tensor_parallel ? 5 : 4));
    return logits;
}

Held UnitWalk::head_product_backward(Held dlogits, Held normed) {
    return scatter_rows(linear_backward(Layer::head, std::move(dlogits), std::move(normed), {}));
}

// ---- units ----------------------------------------------------------------------------------------------------------

// (R, E) is this rank's part of the sum.
UnitMemory embedding_memory(const UnitShapes& s) {
    UnitMemory memory;
    UnitWalk unit(s, false);
    MemoryWalk& walk = unit.walk();
    walk.begin_pass();
    Held y;
    {
        const Held full = unit.all_rows(kActivations);
        y = s.sequence ? unit.residual() : full;
    }
    memory.forward = walk.end_pass();
    walk.begin_pass();
    if (s.sequence) unit.all_rows(kComm);
    y = Held();
    memory.backward = memory.backward_input = walk.end_pass();
    return memory;
}

namespace {

// forward(unit) on top of its input `x`, backward(unit, x), and the weight gradients; B, and, where it is split, I
// and W.
template <class Forward, class Backward>
UnitMemory unit_memory(const UnitShapes& s, bool split, const Forward& forward, const Backward& backward) {
    UnitMemory memory;
    for (const bool deferred : {false, true}) {
        if (deferred && !split) continue;
        UnitWalk unit(s, deferred);
        MemoryWalk& walk = unit.walk();
        Held x = unit.residual();
        walk.begin_pass();
        auto saved = forward(unit, x);
        memory.forward = walk.end_pass();
        walk.begin_pass();
        {
            const Held dx = backward(unit, std::move(x), saved);
            (deferred ? memory.backward_input : memory.backward) = walk.end_pass();
        }
        walk.begin_pass();
        unit.weight_gradients();
        memory.weights = walk.end_pass();
    }
    return memory;
}

struct HeadSaved {
    Held normed, inv_rms, dlogits;
};

}  // namespace

UnitMemory block_memory(const UnitShapes& s, bool split) {
    const bool full = s.recompute == Recompute::full;
    struct State {
        SavedBlock saved;
        Held y;
    };
    return unit_memory(
        s, split,
        [&](UnitWalk& unit, const Held& x) {
            State state;
            state.y = unit.block_forward(x, full ? nullptr : &state.saved);
            return state;
        },
        [&](UnitWalk& unit, Held x, State& state) {
            Held dy = std::move(state.y);  // as large; y itself belongs to the next unit
            if (full)
                unit.block_forward(x, &state.saved);
            else
                x = Held();
            return unit.block_backward(state.saved, std::move(dy));
        });
}

UnitMemory head_memory(const UnitShapes& s, bool split) {
    return unit_memory(
        s, split,
        [](UnitWalk& unit, const Held&) {
            HeadSaved saved{unit.residual(), unit.row_stats(), {}};
            saved.dlogits = unit.head_product(saved.normed);
            return saved;
        },
        [](UnitWalk& unit, Held x, HeadSaved& saved) {
            Held dnormed = unit.head_product_backward(std::move(saved.dlogits), std::move(saved.normed));
            return unit.norm_backward(x, saved.inv_rms, std::move(dnormed), {});
        });
}

UnitMemory head_norm_memory(const UnitShapes& s) {
    return unit_memory(
        s, true,
        [](UnitWalk& unit, const Held&) {
            return HeadSaved{unit.residual(), unit.row_stats(), {}};
        },
        [](UnitWalk& unit, Held x, HeadSaved& saved) {
            return unit.norm_backward(x, saved.inv_rms, std::move(saved.normed), {});  // dy: as large as y
        });
}

UnitMemory head_product_memory(const UnitShapes& s, bool split) {
    return unit_memory(
        s, split, [](UnitWalk& unit, const Held& normed) { return unit.head_product(normed); },
        [](UnitWalk& unit, Held normed, Held& dlogits) {
            return unit.head_product_backward(std::move(dlogits), std::move(normed));
        });
}

}  // namespace train70b
