#include "02_data_parallel/complete/all_reduce.h"

#include <algorithm>
#include <numeric>

#include "01_single_gpu/core/registry.h"
#include "01_single_gpu/ops/ops.h"
#include "02_data_parallel/complete/across_nodes.h"

namespace train70b {

namespace {

// Elements [begin, end) of a flat tensor.
Tensor part(const Tensor& x, int64_t begin, int64_t end) { return x.element_slice(begin, {end - begin}); }

// The blocking form.
void exchange(const Peers& peers, const Tensor& out, int to, const Tensor& in, int from) {
    if (const RequestPtr request = peers.exchange(out, to, in, from)) request->wait();
}
void send(const Peers& peers, const Tensor& x, int to) { exchange(peers, x, to, Tensor(), to); }

Tensor scratch_for(const Peers& peers, const Tensor& x, int64_t count, size_t number = 0) {
    return part(peers.scratch(count, x.dtype(), x.device(), number), 0, count);
}

}  // namespace

Peers::Peers(Backend& group) : group_(group), ranks_(size_t(group.size())), rank_(group.rank()) {
    std::iota(ranks_.begin(), ranks_.end(), 0);
}
Peers::Peers(Backend& group, std::vector<int> ranks)
    : group_(group), ranks_(std::move(ranks)), rank_(int(std::ranges::find(ranks_, group.rank()) - ranks_.begin())) {}
RequestPtr Peers::exchange(const Tensor& out, int to, const Tensor& in, int from) const {
    return group_.exchange(out, ranks_[size_t(to)], in, ranks_[size_t(from)]);
}
Tensor Peers::scratch(int64_t count, DType dtype, Device device, size_t number) const {
    return group_.scratch(count, dtype, device, number);
}

Tensor segment(const Tensor& x, int i, int ranks) {
    i = ((i % ranks) + ranks) % ranks;
    return part(x, x.size() * i / ranks, x.size() * (i + 1) / ranks);
}

void receive(const Peers& peers, const Tensor& x, int from) { exchange(peers, Tensor(), from, x, from); }

void add_to(Tensor x, const Tensor& other) {
    if (x.size() > 0) add(x, x, other);
}

void naive_all_reduce(Backend& peers, const Tensor& x) {
    if (peers.rank() > 0) {
        send(peers, x, 0);
        receive(peers, x, 0);
        return;
    }
    const Tensor other = scratch_for(peers, x, x.size());
    for (int from = 1; from < peers.size(); ++from) {
        receive(peers, other, from);
        add_to(x, other);
    }
    for (int to = 1; to < peers.size(); ++to) send(peers, x, to);
}

// tag::ring-reduce-scatter[]
void ring_reduce_scatter(const Peers& peers, const Tensor& x) {
    // tag::lab-ring-all-reduce-reduce-scatter[]
    // With N = 4, rank r sends segments r-1, r-2, r-3 in steps 0 to 2, each with everything added to it so far. The
    // last segment to arrive is r, by then the sum over all ranks.
    const int N = peers.size(), r = peers.rank(), next = (r + 1) % N, previous = (r + N - 1) % N;
    const Tensor received = scratch_for(peers, x, N > 1 ? x.size() / N + 1 : 0);
    for (int step = 0; step < N - 1; ++step) {
        const Tensor kept = segment(x, r - step - 2, N);
        const Tensor arrived = part(received, 0, kept.size());
        exchange(peers, segment(x, r - step - 1, N), next, arrived, previous);
        add_to(kept, arrived);
    }
    // end::lab-ring-all-reduce-reduce-scatter[]
}
// end::ring-reduce-scatter[]

void ring_all_gather(const Peers& peers, const Tensor& x) {
    // tag::lab-ring-all-reduce-all-gather[]
    const int N = peers.size(), r = peers.rank(), next = (r + 1) % N, previous = (r + N - 1) % N;
    for (int step = 0; step < N - 1; ++step)
        exchange(peers, segment(x, r - step, N), next, segment(x, r - step - 1, N), previous);
    // end::lab-ring-all-reduce-all-gather[]
}

void ring_all_reduce(const Peers& peers, const Tensor& x) {
    ring_reduce_scatter(peers, x);
    ring_all_gather(peers, x);
}

// The same 2 (N-1) hops with each segment in K pieces: one list of 2 (N-1) K exchanges. Exchange i sends what exchange
// i - K received, so up to K - 1 exchanges can be in progress while a piece is added.
void pipelined_ring_all_reduce(Backend& peers, const Tensor& x, int64_t piece_bytes) {
    const int N = peers.size(), r = peers.rank(), next = (r + 1) % N, previous = (r + N - 1) % N;
    const int64_t longest = x.size() / N + 1;  // elements of the longest segment
    const int64_t K = std::clamp<int64_t>(longest * size_of(x.dtype()) / piece_bytes, 1, 1024);
    const int64_t hops = 2 * (N - 1), ahead = std::min<int64_t>(K - 1, 2);
    std::vector<RequestPtr> in_progress(ahead + 1);
    std::vector<Tensor> received;
    for (int64_t i = 0; i <= ahead; ++i) received.push_back(scratch_for(peers, x, longest / K + 1, size_t(i)));

    const auto piece = [&](int i, int64_t k) { return segment(segment(x, i, N), int(k), int(K)); };
    const auto target = [&](int64_t i) { return piece(r - int(i / K) - 2, i % K); };
    const auto adds = [&](int64_t i) { return i / K < N - 1; };  // the first half of the hops
    const auto arrives_in = [&](int64_t i) {
        const Tensor to = target(i);
        return adds(i) ? part(received[i % (ahead + 1)], 0, to.size()) : to;
    };
    for (int64_t i = 0; i < hops * K + ahead; ++i) {
        if (i < hops * K)
            in_progress[i % (ahead + 1)] =
                peers.exchange(piece(r - int(i / K) - 1, i % K), next, arrives_in(i), previous);
        const int64_t oldest = i - ahead;
        if (oldest < 0) continue;
        if (const RequestPtr& request = in_progress[oldest % (ahead + 1)]) request->wait();
        if (adds(oldest)) add_to(target(oldest), arrives_in(oldest));
    }
}

// Rabenseifner 2004. Halving: two ranks a distance of N/2, N/4, ..., 1 apart split their common range; each sends the
// half that the other keeps and adds the half it receives. Doubling: the same steps in reverse, exchanging complete
// halves. Ranks beyond the largest power of two first send their x to a partner and receive the result at the end.
void halving_doubling_all_reduce(Backend& peers, const Tensor& x) {
    const int N = peers.size(), r = peers.rank();
    int power = 1;
    while (2 * power <= N) power *= 2;
    if (r >= power) {
        send(peers, x, r - power);
        receive(peers, x, r - power);
        return;
    }
    const bool has_extra = r + power < N;
    const Tensor received = scratch_for(peers, x, has_extra ? x.size() : x.size() / 2 + 1);
    if (has_extra) {
        receive(peers, part(received, 0, x.size()), r + power);
        add_to(x, part(received, 0, x.size()));
    }
    struct Halves {
        int partner;
        Tensor kept, arrived;
    };
    std::vector<Halves> steps;
    int64_t begin = 0, end = x.size();
    for (int distance = power / 2; distance > 0; distance /= 2) {
        const int64_t middle = begin + (end - begin) / 2;
        const bool upper = (r & distance) != 0;
        const Tensor low = part(x, begin, middle), high = part(x, middle, end);
        steps.push_back({r ^ distance, upper ? high : low, upper ? low : high});
        (upper ? begin : end) = middle;
        const Tensor sum_of_two = part(received, 0, steps.back().kept.size());
        exchange(peers, steps.back().arrived, r ^ distance, sum_of_two, r ^ distance);
        add_to(steps.back().kept, sum_of_two);
    }
    for (; !steps.empty(); steps.pop_back())
        exchange(peers, steps.back().kept, steps.back().partner, steps.back().arrived, steps.back().partner);
    if (has_extra) send(peers, x, r + power);
}

// In step s every rank sends to the s-th rank after it and receives from the s-th before it: one message each way.
void pairwise_all_to_all(Backend& peers, const std::vector<Tensor>& to, const std::vector<Tensor>& from) {
    const size_t N = size_t(peers.size()), r = size_t(peers.rank());
    Tensor own = to[r];
    copy(own, from[r]);
    for (size_t step = 1; step < N; ++step) {
        const size_t next = (r + step) % N, previous = (r + N - step) % N;
        exchange(peers, from[next], int(next), to[previous], int(previous));
    }
}

const std::vector<AllReduceAlgorithm>& all_reduce_algorithms() {
    const auto scatter = [](Backend& peers, const Tensor& x) { ring_reduce_scatter(peers, x); };
    static const std::vector<AllReduceAlgorithm> list = {
        {"library", "MPI's or NCCL's own"},
        {"naive", "everything to rank 0 and back", naive_all_reduce},
        {"ring", "reduce-scatter, then all-gather, around a ring",
         [](Backend& peers, const Tensor& x) { ring_all_reduce(peers, x); }, scatter},
        {"pipelined", "the ring in pieces of 512 KiB, which overlap",
         [](Backend& peers, const Tensor& x) { pipelined_ring_all_reduce(peers, x, 512 << 10); }, scatter},
        {"halving", "recursive halving, then doubling", halving_doubling_all_reduce},
        {"hierarchical", "rings inside the nodes and across them", hierarchical_all_reduce, hierarchical_reduce_scatter,
         hierarchical_all_gather},
        {"tree", "two binary trees of nodes, each with half, in pieces of 64 KiB",
         [](Backend& peers, const Tensor& x) { tree_all_reduce(peers, x, 64 << 10); }}};
    return list;
}

std::vector<std::string> all_reduce_names() { return names_of(all_reduce_algorithms()); }

const AllReduceAlgorithm& find_all_reduce(const std::string& name) {
    return find_entry(all_reduce_algorithms(), "--all-reduce", name);
}

}  // namespace train70b
