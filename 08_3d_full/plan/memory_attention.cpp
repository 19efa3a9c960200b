// Attention on one device and with context parallelism.
#include <algorithm>

#include "08_3d_full/plan/memory_unit_walk.h"

namespace train70b {

namespace {}

UnitWalk::QKV UnitWalk::q_k_v(int64_t rows, int64_t q, int64_t kv) {
    return {held(kActivations, s_.a * rows * q), held(kActivations, s_.a * rows * kv),
            held(kActivations, s_.a * rows * kv)};
}

// q, k, v with RoPE; norms of the heads need a copy of all three meanwhile
UnitWalk::QKV UnitWalk::split_rope() {
    QKV parts = q_k_v(s_.R, s_.q, s_.kv);
    Held normed;
    if (s_.norms) normed = held(kActivations, s_.a * s_.R * (s_.q + 2 * s_.kv));
    return parts;
}

// All heads of this rank's tokens -> this rank's heads of the group's tokens (Ulysses); width: q or kv.
Held UnitWalk::scatter_heads(int64_t width) {
    const int64_t bytes = s_.a * s_.R * width, copies = std::max<int64_t>(s_.U / (width / s_.D), 1);
    Held outgoing = held(kComm, bytes), by_head;
    if (copies > 1) {
        by_head = outgoing;
        outgoing = held(kComm, copies * bytes);
    }
    const Held incoming = held(kComm, copies * bytes);
    return held(kActivations, copies * bytes);
}

// And back; copies of a head are summed.
Held UnitWalk::gather_heads(int64_t width) {
    const int64_t bytes = s_.a * s_.R * width, copies = std::max<int64_t>(s_.U / (width / s_.D), 1);
    const Held outgoing = held(kComm, copies * bytes);
    Held by_head = held(kComm, copies * bytes);
    if (copies > 1) {
        const Held sums = held(kWorkspace, s_.s * s_.R * width);
        by_head = held(kComm, bytes);
    }
    return held(kActivations, bytes);
}

UnitWalk::Attended UnitWalk::attend() {
    if (s_.gather) return gather_attention();
    if (s_.ring > 1 || s_.chunks > 1) return ring_attention();
    return {held(kActivations, s_.a * s_.R * s_.q), held(kActivations, s_.s * s_.R * (s_.q / s_.D))};
}

UnitWalk::Attended UnitWalk::ring_attention() {
    const int64_t rows = s_.attention_rows(), q = s_.attention_q(), kv = s_.attention_kv(), part = rows / s_.chunks;
    Attended result{held(kActivations, s_.a * rows * q), held(kActivations, s_.s * rows * (q / s_.D))};
    const Held sum = held(kWorkspace, s_.s * rows * q);   // fp32
    const Held keys = held(kComm, 2 * s_.a * rows * kv);  // of the block that this rank has now: K and V
    Held next_keys;
    if (s_.ring > 1) next_keys = held(kComm, 2 * s_.a * rows * kv);
    const Held out = held(kWorkspace, s_.a * part * q), lse = held(kWorkspace, s_.s * part * (q / s_.D));  // of a pair
    return result;
}

UnitWalk::QKV UnitWalk::ring_attention_backward() {
    const int64_t rows = s_.attention_rows(), q = s_.attention_q(), kv = s_.attention_kv(), part = rows / s_.chunks;
    QKV grads = q_k_v(rows, q, kv);
    const Held dq = held(kWorkspace, s_.s * rows * q);  // fp32
    Held keys = held(kComm, 2 * s_.a * rows * kv), next_keys, sum_dkv, next_dkv;
    // The first step, one between, the last one: more of them hold no more.
    const int64_t steps = std::min<int64_t>(s_.ring, 3);
    for (int64_t step = 0; step < steps; ++step) {
        if (step + 1 < steps) next_keys = held(kComm, 2 * s_.a * rows * kv);
        const Held dkv = held(kComm, 2 * s_.s * rows * kv);  // this rank's part of the block's gradient
        if (s_.chunks > 1 || step <= s_.position)            // something is visible: fp32 dq, dk, dv of two chunks
            moment(kWorkspace, s_.s * part * (q + 2 * kv));
        sum_dkv = dkv;
        next_dkv = held(kComm, 2 * s_.s * rows * kv);
        keys = next_keys;
    }
    return grads;
}

UnitWalk::Attended UnitWalk::gather_attention() {
    const int64_t last = s_.chunks > 1 ? s_.chunks * s_.ring - s_.position : s_.position + 1;
    const int64_t seen = last * s_.chunk_len;  // tokens up to this rank's last
    Attended result{held(kActivations, s_.a * s_.R * s_.q), held(kActivations, s_.s * s_.R * (s_.q / s_.D))};
    Held mine = held(kComm, 2 * s_.a * s_.R * s_.kv);
    const Held all = held(kComm, 2 * s_.a * s_.ring * s_.R * s_.kv);
    mine = Held();
    moment(kWorkspace, 2 * s_.a * seen * s_.kv);  // K and V of a sequence in order
    return result;
}

UnitWalk::QKV UnitWalk::gather_attention_backward() {
    const int64_t last = s_.chunks > 1 ? s_.chunks * s_.ring - s_.position : s_.position + 1;
    const int64_t seen = last * s_.chunk_len;
    QKV grads = q_k_v(s_.R, s_.q, s_.kv);
    Held mine = held(kComm, 2 * s_.a * s_.R * s_.kv), all = held(kComm, 2 * s_.a * s_.ring * s_.R * s_.kv);
    mine = Held();
    const Held dkv = held(kComm, 2 * s_.s * s_.ring * s_.R * s_.kv);  // fp32, of all ranks' keys
    // K and V of a sequence in order; fp32 dq of a chunk, dk and dv of the keys that it sees
    moment(kWorkspace, 2 * s_.a * seen * s_.kv + s_.s * (s_.chunk_len * s_.q + 2 * seen * s_.kv));
    all = Held();
    mine = held(kComm, 2 * s_.s * s_.R * s_.kv);
    return grads;
}

UnitWalk::QKV UnitWalk::attend_backward() {
    if (s_.gather) return gather_attention_backward();
    if (s_.ring > 1 || s_.chunks > 1) return ring_attention_backward();
    return q_k_v(s_.attention_rows(), s_.attention_q(), s_.attention_kv());
}

// q, k, v once more, as attention reads them. Ulysses needs them by tokens first, which stay as long: `by_tokens`.
void UnitWalk::recompute_qkv(SavedBlock& saved, QKV& by_tokens) {
    by_tokens = split_rope();
    if (s_.U == 1) {
        saved.q = by_tokens.q, saved.k = by_tokens.k, saved.v = by_tokens.v;
    } else {
        saved.q = scatter_heads(s_.q);
        saved.k = scatter_heads(s_.kv);
        saved.v = scatter_heads(s_.kv);
    }
}

}  // namespace train70b
