// Expert parallelism: every layer has 8 experts in place of its MLP, and each of P ranks has 8/P of them, beside a copy
// of everything else. A rank computes its part of the batch, as in data parallelism, but sends each row to the ranks of
// its two experts and gets it back:
//
//   x (R, E) -> router: two experts a row -> sorted by expert (2R, E) -> all-to-all -> experts -> all-to-all -> sum
//
// A row's choice depends on that row alone, so it is the same on any number of ranks, and so is the loss. There is no
// balancing loss here, and no capacity.
//
// Run:   mpirun -np 4 --oversubscribe build/bin/08_experts_minimal           (1, 2, 4 or 8 ranks)
#include "01_single_gpu/minimal.h"

#include <map>

#include "01_single_gpu/ops/routing.h"
#include "02_data_parallel/comm.h"
#include "02_data_parallel/runtime/connect.h"

namespace train70b::minimal::sparse {

using Counts = std::vector<int64_t>;

// The parameters of a block's MLP become those of its experts: `gate` is the router (8, E), `up` the first products of
// this rank's experts, one below the other (8/P 2F, E), `down` their second ones (8/P E, F).
struct Experts : OneDevice {
    static constexpr int64_t kExperts = 8, kTopK = 2;
    const Comm ranks;
    const Sizes s;
    const int64_t F = s.F / kTopK;  // as many active parameters as the dense model
    const RouterShape shape{.experts = kExperts, .top_k = kTopK};
    struct Routed {  // of a block, for its backward pass
        Tensor logits, chosen, weights, order, place, here, gate_up, h, back;
        Counts sent, received;          // rows to and from each rank
        std::vector<Counts> of_expert;  // received: of each source rank, for each expert here
    };
    std::map<const Block*, Routed> routed;

    Experts(const Sizes& sizes, const Comm& of) : ranks(of), s(sizes) {
        if (kExperts % ranks.size() + s.batch % ranks.size() != 0)
            usage_error("-np {}: must divide {} experts and {} sequences", ranks.size(), kExperts, s.batch);
    }
    static bool is_expert(const Param& p) { return p.name.find(".experts.") != p.name.npos; }

    // tag::parameters[]
    Param rows(const Param& p) const {
        const Param router = instead(p, "gate_proj.weight", "gate.weight", {kExperts, s.E}, false);
        return instead(router, "up_proj.weight", "experts.gate_up_proj", {kExperts * 2 * F, s.E}, true);
    }
    Param cols(const Param& p) const {
        return instead(p, "down_proj.weight", "experts.down_proj", {kExperts * s.E, F}, true);
    }
    Param instead(const Param& p, const std::string& old, const std::string& name, const Shape& shape,
                  bool part) const {
        const size_t at = p.name.find("mlp." + old);
        if (at == p.name.npos) return p;
        Param other = make_param(p.name.substr(0, at) + "mlp." + name, shape, p.init_std);
        if (!part) return other;
        other.local.rows /= ranks.size();
        other.local.row_begin = ranks.rank() * other.local.rows;
        return other;
    }
    // end::parameters[]

    // Rows of the other ranks' experts to them; both ways in both passes.
    Tensor exchanged(const Tensor& x, Counts sent, Counts received) const {
        int64_t rows = 0;
        for (const int64_t count : received) rows += count;
        Tensor y = empty(x, rows, x.cols());
        for (Counts* counts : {&sent, &received})
            for (int64_t& count : *counts) count *= x.cols();
        ranks.all_to_all(y, received, x, sent).wait();
        return y;
    }
    // Calls body(begin, end, rows of each expert here) for the rows of each source rank, which are sorted by expert.
    static void for_sources(const Routed& to, auto&& body) {
        int64_t begin = 0;
        for (size_t rank = 0; rank < to.received.size(); begin += to.received[rank++])
            body(begin, begin + to.received[rank], to.of_expert[rank]);
    }

    // tag::route[]
    Routed route(const Tensor& logits) const {
        const int64_t R = logits.rows();
        Routed to{.logits = logits, .chosen = Tensor({R, kTopK}, DType::i32, s.device)};
        to.weights = Tensor({R, kTopK}, logits.dtype(), s.device);
        choose_experts(to.chosen, logits, {}, shape);
        router_weights(to.weights, logits, to.chosen, shape);
        Tensor counted({1, kExperts}, DType::i32, s.device);
        count_choices(counted, to.chosen);
        // Slots (K row + choice) sorted by expert: where each one's begin, how many stay (all); place: the inverse.
        const std::vector<double> counts = read(counted);
        std::vector<int32_t> begin_keep(size_t(2 * kExperts), 0);
        for (size_t e = 0; e < kExperts; ++e) {
            begin_keep[kExperts + e] = int32_t(counts[e]);
            if (e > 0) begin_keep[e] = begin_keep[e - 1] + int32_t(counts[e - 1]);
        }
        to.order = Tensor({R * kTopK}, DType::i32, s.device);
        to.place = Tensor({R, kTopK}, DType::i32, s.device);
        place_slots(to.order, to.place, to.chosen, upload(begin_keep, {2, 1, kExperts}, s.device));
        // Numbers first: what each rank has for each expert.
        const std::vector<double> all = ranks.gather(counts);
        const size_t P = size_t(ranks.size()), share = kExperts / P, first = size_t(ranks.rank()) * share;
        to.sent.assign(P, 0), to.received.assign(P, 0);
        for (size_t rank = 0; rank < P; ++rank) {
            for (size_t e = 0; e < share; ++e) to.sent[rank] += int64_t(counts[rank * share + e]);
            const auto from = all.begin() + long(rank * kExperts + first);
            to.of_expert.emplace_back(from, from + long(share));
            for (const int64_t count : to.of_expert.back()) to.received[rank] += count;
        }
        return to;
    }
    // end::route[]

    // tag::forward[]
    Tensor feed_forward(Block& b, const Block::Saved& saved) {
        const Tensor& x = saved.normed2;
        Routed to = route(matmul(x, b.gate.data, Transpose::b));
        Tensor sorted = empty(x, to.order.size(), x.cols());
        gather_slots(sorted, x, to.order, kTopK);
        to.here = exchanged(sorted, to.sent, to.received);
        to.gate_up = empty(x, to.here.rows(), 2 * F), to.h = empty(x, to.here.rows(), F);
        Tensor z = Tensor::like(to.here);
        for_sources(to, [&](int64_t begin, int64_t end, const Counts& rows) {
            Tensor gate_up = to.gate_up.row_slice(begin, end), h = to.h.row_slice(begin, end);
            Tensor out = z.row_slice(begin, end);
            grouped_forward(gate_up, to.here.row_slice(begin, end), b.up.data, rows);
            swiglu(h, gate_up);
            grouped_forward(out, h, b.down.data, rows);
        });
        to.back = exchanged(z, to.received, to.sent);
        Tensor y = Tensor::like(x);
        sum_slots(y, to.back, to.place, to.weights);
        routed[&b] = to;
        return y;
    }
    // end::forward[]

    // Adds to the gradients of the weights; returns that of normed2.
    // tag::backward[]
    Tensor feed_forward_backward(Block& b, const Block::Saved& saved, const Tensor& dy) {
        const Routed to = std::exchange(routed[&b], {});
        Tensor dweights = Tensor::like(to.weights), dback = Tensor::like(to.back);
        slot_products(dweights, dy, to.back, to.place);
        gather_slots(dback, dy, to.order, kTopK, to.weights);
        const Tensor dz = exchanged(dback, to.sent, to.received);
        Tensor dhere = Tensor::like(to.here), dh = Tensor::like(to.h), dgate_up = Tensor::like(to.gate_up);
        for_sources(to, [&](int64_t begin, int64_t end, const Counts& rows) {
            const auto part = [&](const Tensor& x) { return x.row_slice(begin, end); };
            Tensor dx = part(dhere), dh_part = part(dh), dgate_up_part = part(dgate_up);
            grouped_wgrad(b.down.grad, part(dz), part(to.h), rows);
            grouped_dgrad(dh_part, part(dz), b.down.data, rows);
            swiglu_backward(dgate_up_part, dh_part, part(to.gate_up));
            grouped_wgrad(b.up.grad, dgate_up_part, part(to.here), rows);
            grouped_dgrad(dx, dgate_up_part, b.up.data, rows);
        });
        Tensor dx = Tensor::like(dy), dlogits = Tensor::like(to.logits);
        sum_slots(dx, exchanged(dhere, to.received, to.sent), to.place);
        router_backward(dlogits, dweights, to.logits, to.chosen, {}, 0, shape);  // {}, 0: no balancing losses
        matmul_into(b.gate.grad, dlogits, saved.normed2, Transpose::a, 1);
        return sum(dx, matmul(dlogits, b.gate.data));
    }
    // end::backward[]
};

class Training {
  public:
    const Sizes s;
    const Comm world;
    Experts parts;
    Llama model;
    const Source text;

    Training(const Sizes& sizes, const Comm& ranks)
        : s(sizes), world(ranks), parts(s, ranks), model(s, parts), text(open_text(s)) {
        model.allocate(s);
    }

    Result step(int64_t number) {
        for (Unit& unit : model.units) fill(unit.grad, 0);
        const int64_t share = s.batch / world.size();
        const Batch batch = make_batch(text, s, (number - 1) * s.batch + world.rank() * share, share, {{0, s.T}});
        Llama::Saved saved;
        const Tensor loss = model.forward({}, saved, batch, parts);
        model.backward({}, saved, batch, parts);
        // An expert has had the rows of all ranks: its gradient is complete. The rest has a part on each rank.
        // tag::gradients[]
        double here = 0, everywhere = 0;  // squares: of experts of this rank, of what all ranks have
        for (Unit& unit : model.units)
            for (Param* p : unit.params) {
                if (!Experts::is_expert(*p)) world.all_reduce(p->grad).wait();
                (Experts::is_expert(*p) ? here : everywhere) += train70b::squares({p->grad})[0];
            }
        const double norm = std::sqrt(world.sum(here) + everywhere);
        // end::gradients[]
        for (Unit& u : model.units) update(u, u.data, u.grad, number, norm);
        return {world.sum(read(loss)[0]), norm};
    }
};

static void program(int, char**) {
    const Sizes s;
    Training training(s, connect(s.device));
    train(training);
}

}  // namespace train70b::minimal::sparse

int main(int argc, char** argv) { return train70b::run_ranks(argc, argv, train70b::minimal::sparse::program); }
