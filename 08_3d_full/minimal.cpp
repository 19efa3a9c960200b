// Chapters 02-06 together: tensor (tp), context (cp), pipeline (pp) and data parallelism (dp), and ZeRO-1. A rank has a
// place in a mesh of tp x cp x dp x pp ranks, with tp numbered fastest, so that those that talk most are neighbours.
// Every axis is a group, and every technique a call on its group:
//
//   group   who                                   what it does                                          chapter
//   tp      share the matrices of a stage         f and g around each half of a block, the softmax      04
//   cp      share the tokens of a sequence        ring attention                                        06
//   pp      share the layers                      1F1B over micro-batches                               05
//   dp_cp   have the same weights: dp x cp        reduce-scatter, AdamW on a shard, all-gather          02, 03
//
// Run:   mpirun -np 8 --oversubscribe build/bin/08_minimal           (tp 2, pp 2, cp 2; 16 ranks: also dp 2)
#include "06_context_parallel/minimal.h"

#include "02_data_parallel/runtime/connect.h"

namespace train70b::minimal {

struct Mesh {
    int64_t tp = 1, cp = 1, dp = 1, pp = 1;
    int64_t size() const { return tp * cp * dp * pp; }
};
// A factor of 2 for each axis in turn; dp gets the rest.
inline Mesh mesh_of(int64_t ranks) {
    Mesh mesh;
    for (int64_t* axis : {&mesh.tp, &mesh.pp, &mesh.cp})
        if (ranks % 2 == 0) *axis = 2, ranks /= 2;
    mesh.dp = ranks;
    return mesh;
}

struct Groups {
    int64_t t, c, d, p;  // this rank's place
    Comm tp, cp, dp_cp, pp;

    Groups(const Comm& world, const Mesh& m)
        : t(world.rank() % m.tp),
          c(world.rank() / m.tp % m.cp),
          d(world.rank() / (m.tp * m.cp) % m.dp),
          p(world.rank() / (m.tp * m.cp * m.dp)) {
        // A group: the ranks with the same color, that is, those which differ along its axes only.
        const int64_t T = m.tp, TC = T * m.cp, TCD = TC * m.dp;
        tp = world.split([=](int r) { return int(r / T); }, "tp");
        cp = world.split([=](int r) { return int(r / TC * T + r % T); }, "cp");
        dp_cp = world.split([=](int r) { return int(r / TCD * T + r % T); }, "dp_cp");
        pp = world.split([=](int r) { return int(r % TCD); }, "pp");
    }
};

// A block's communication: chapter 06's ring for the tokens, over cp (its `ranks`); chapter 04's sums for the matrices.
struct Parts : RingAttention {
    Comm tp;
    explicit Parts(const Groups& groups) : RingAttention(groups.cp, /*zigzag*/ 2), tp(groups.tp) {}

    // As in chapter 04, without sequence parallelism: f and g_backward do nothing.
    Param rows(Param p) const {
        const int64_t n = p.local.rows / tp.size();
        p.local = {n * tp.rank(), n, 0, p.local.cols};
        return p;
    }
    Param cols(Param p) const {
        const int64_t n = p.local.cols / tp.size();
        p.local = {0, p.local.rows, n * tp.rank(), n};
        return p;
    }
    Param whole(Param p) const {  // its gradient is complete on every tp rank: not summed, one counts it in the norm
        p.replica = tp.rank();
        return p;
    }
    Tensor f_backward(const Tensor& dx) { return summed(dx); }
    Tensor g(const Tensor& y) { return summed(y); }
    Tensor summed(const Tensor& x) {
        tp.all_reduce(x).wait();
        return x;
    }
    void whole_vocabulary(Tensor& row_max, Tensor& row_sum, Tensor& target_logit) {
        Tensor whole_max = Tensor::like(row_max);
        copy(whole_max, row_max);
        tp.all_reduce(whole_max, Reduce::max).wait();
        rescale_sums(row_sum, row_max, whole_max);
        row_max = whole_max;
        summed(row_sum), summed(target_logit);
    }
};

// The stages before and after this one, a channel for each direction; in a channel the earlier stage is rank 0, the
// later one rank 1. Then 1F1B. Both as in chapter 05.
struct Neighbours {
    Comm to_next, from_next, to_previous, from_previous;
    explicit Neighbours(const Comm& pp) {
        for (int left = 0; left + 1 < pp.size(); ++left) {
            const Comm up = pp.p2p_channel(left, left + 1), down = pp.p2p_channel(left + 1, left);
            if (pp.rank() == left) to_next = up, from_next = down;
            if (pp.rank() == left + 1) from_previous = up, to_previous = down;
        }
    }
};
inline std::vector<std::pair<char, int64_t>> one_f_one_b(int64_t stages, int64_t stage, int64_t micro_batches) {
    const int64_t ahead = std::min(micro_batches, stages - 1 - stage);  // F's before F and B alternate
    std::vector<std::pair<char, int64_t>> steps;
    for (int64_t i = 0; i < micro_batches + ahead; ++i) {
        if (i < micro_batches) steps.push_back({'F', i});
        if (i >= ahead) steps.push_back({'B', i - ahead});
    }
    return steps;
}

class Training {
  public:
    const Sizes s;
    const Mesh mesh;
    const Groups groups;
    Parts parts;
    Llama model;                     // this rank's shards of this stage's layers
    std::vector<Tensor> grad_shard;  // of each unit's gradient: what this rank updates, a view

    Training(const Sizes& sizes, const Comm& world, const Mesh& m)
        : s(checked(sizes, m)),
          mesh(m),
          groups(world, m),
          parts(groups),
          model(s, parts, s.layers / m.pp * groups.p, s.layers / m.pp * (groups.p + 1)),
          text_(open_text(s)),
          neighbours_(groups.pp) {
        model.allocate(s, groups.dp_cp.size());
        for (const Unit& unit : model.units) grad_shard.push_back(own(unit.grad));
    }

    Result step(int64_t number) {
        for (Unit& unit : model.units) fill(unit.grad, 0);
        const double loss = forward_backward(number);

        // tag::update[]
        // ZeRO-1: gradients are summed over the ranks that have the same weights, each of which updates a part. Nothing
        // overlaps the backward pass here.
        double squares = 0;
        for (size_t i = 0; i < model.units.size(); ++i) {
            groups.dp_cp.reduce_scatter(grad_shard[i], model.units[i].grad).wait();
            squares += minimal::squares(model.units[i], grad_shard[i], offset(i));
        }
        // Shards over dp_cp, parts of matrices over tp, layers over pp.
        const double norm = std::sqrt(groups.pp.sum(groups.tp.sum(groups.dp_cp.sum(squares))));
        for (size_t i = 0; i < model.units.size(); ++i) {
            const Tensor shard = own(model.units[i].data);
            update(model.units[i], shard, grad_shard[i], number, norm, offset(i));
            groups.dp_cp.all_gather(model.units[i].data, shard).wait();
        }
        return {groups.pp.sum(groups.dp_cp.sum(loss)), norm};  // tp ranks: the same loss; other stages: 0
        // end::update[]
    }

  private:
    // All micro-batches, of one sequence each; returns this rank's share of the loss.
    double forward_backward(int64_t number) {
        const int64_t m = s.batch / mesh.dp, first = (number - 1) * s.batch + groups.d * m;
        const bool is_first = groups.p == 0, is_last = groups.p == mesh.pp - 1;
        std::vector<Llama::Saved> saved(static_cast<size_t>(m));
        std::vector<Work> sends;
        double loss = 0;
        for (const auto& [pass, micro_batch] : one_f_one_b(mesh.pp, groups.p, m)) {
            const Batch batch = make_batch(text_, s, first + micro_batch, 1, parts.tokens(s.T));
            Llama::Saved& kept = saved[size_t(micro_batch)];
            // This cp rank's tokens, all of E: every tp rank sends the same to its own peer in the next stage.
            Tensor message({batch.T, s.E}, s.dtype, s.device);
            std::erase_if(sends, [](Work& work) { return work.done(); });  // frees what has arrived
            if (pass == 'F') {
                if (!is_first) neighbours_.from_previous.recv(message, 0).wait();
                const Tensor y = model.forward(message, kept, batch, parts);
                if (is_last)
                    loss += read(y)[0];
                else
                    sends.push_back(neighbours_.to_next.send(y, 1));
            } else {
                if (!is_last) neighbours_.from_next.recv(message, 1).wait();
                const Tensor dx = model.backward(message, kept, batch, parts);
                if (!is_first) sends.push_back(neighbours_.to_previous.send(dx, 0));
            }
        }
        for (Work& send : sends) send.wait();
        return loss;
    }

    Tensor own(const Tensor& whole) const {
        const int64_t size = whole.size() / groups.dp_cp.size();
        return whole.element_slice(groups.dp_cp.rank() * size, {size});
    }
    int64_t offset(size_t unit) const { return groups.dp_cp.rank() * grad_shard[unit].size(); }

    static Sizes checked(const Sizes& s, const Mesh& m) {
        if (s.K % m.tp + s.F % m.tp + s.V % m.tp + s.layers % m.pp + s.T % (2 * m.cp) + s.batch % m.dp != 0)
            usage_error(
                "tp {} must divide heads, ffn and vocabulary, pp {} the layers, 2 x cp {} the tokens, dp {} the "
                "sequences: use another number of ranks",
                m.tp, m.pp, m.cp, m.dp);
        return s;
    }

    const Source text_;
    Neighbours neighbours_;
};

static void program(int, char**) {
    const Sizes s;
    const Comm world = connect(s.device);
    Training training(s, world, mesh_of(world.size()));
    train(training);
}

}  // namespace train70b::minimal

int main(int argc, char** argv) { return train70b::run_ranks(argc, argv, train70b::minimal::program); }
