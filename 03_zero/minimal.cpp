// ZeRO: data parallelism in which N ranks divide what each would otherwise hold whole, with each stage more of it. Per
// parameter in fp32, bytes on a rank between two steps:
//
//   stage   weights   gradients   AdamW's moments   what a rank sends per step, for P bytes of weights
//   1          4          4            8/N          reduce-scatter of gradients, all-gather of weights    2 P (N-1)/N
//   2          4         4/N           8/N          the same, each unit's gradients in its backward pass  2 P (N-1)/N
//   3         4/N        4/N           8/N          two all-gathers of weights, one reduce-scatter        3 P (N-1)/N
//
// Reductions are sums: the loss is divided by the tokens of all ranks. Every collective is waited for immediately; the
// complete version starts them earlier, beside the computation.
//
// Run:   mpirun -np 4 --oversubscribe build/bin/03_minimal 3
#include "01_single_gpu/minimal.h"

#include "02_data_parallel/runtime/connect.h"

namespace train70b::minimal {

class Training {
  public:
    const Sizes s;
    const int stage;
    const Comm ranks;
    Llama model;
    struct Shard {          // of a unit's buffer, padded to a multiple of N: it may begin and end inside a parameter
        Tensor data, grad;  // elements [rank * size / N, (rank + 1) * size / N)
    };
    std::vector<Shard> shards;  // one per unit

    Training(const Sizes& sizes, int zero_stage, const Comm& all)
        : s(sizes), stage(zero_stage), ranks(all), model(s), text_(open_text(s)) {
        if (s.batch % N() != 0) usage_error("{} sequences are not divisible by {} ranks", s.batch, N());
        model.allocate(s, N());  // moments: 1/N; weights whole, for the initial values (complete/: shards)
        for (Unit& unit : model.units) {
            Shard shard = {own(unit.data), own(unit.grad)};  // views: what stays whole is reduced in place
            if (stage >= 2) shard.grad = Tensor::like(shard.grad, Memory::grads), free_grads(unit);
            if (stage == 3) {
                shard.data = Tensor::like(shard.data, Memory::params);
                copy(shard.data, own(unit.data));
                free_weights(unit);
            }
            shards.push_back(shard);
        }
    }

    Result step(int64_t number) {  // from 1
        if (stage == 1)
            for (Unit& unit : model.units) fill(unit.grad, 0);
        const int64_t share = s.batch / N();
        const Batch batch = make_batch(text_, s, (number - 1) * s.batch + ranks.rank() * share, share, {{0, s.T}});

        // Units: 0 the embedding, 1 to L the blocks, L + 1 the head.
        const size_t L = model.blocks.size();
        Llama::Saved saved;
        saved.blocks.resize(L);
        before_forward(0);
        Tensor x = model.embed(batch, parts_);
        after_forward(0);
        for (size_t i = 0; i < L; ++i) {
            before_forward(i + 1);
            x = model.blocks[i].forward(x, saved.blocks[i], batch, parts_);
            after_forward(i + 1);
        }
        before_forward(L + 1);
        const Tensor loss = model.loss(x, saved, batch, parts_);
        after_forward(L + 1);

        before_backward(L + 1);  // the head is no exception, although it has just been freed
        Tensor dx = model.loss_backward(saved, parts_);
        after_backward(L + 1);
        for (size_t i = L; i-- > 0;) {
            before_backward(i + 1);
            dx = model.blocks[i].backward(dx, saved.blocks[i], batch, parts_);
            after_backward(i + 1);
        }
        before_backward(0);
        model.embed_backward(dx, batch, parts_);
        after_backward(0);
        return {ranks.sum(read(loss)[0]), update_weights(number)};
    }

  private:
    // ---- what the stages do around a unit ----
    void before_forward(size_t unit) {
        if (stage == 3) gather_weights(unit);
    }
    void after_forward(size_t unit) {
        if (stage == 3) free_weights(model.units[unit]);
    }
    // tag::stages[]
    void before_backward(size_t unit) {
        if (stage == 3) gather_weights(unit);
        if (stage >= 2) {
            Unit& u = model.units[unit];
            u.grad = zeros(shards[unit].grad.size() * N(), s, Memory::grads);
            bind_grads(u.params, u.grad);
        }
    }
    void after_backward(size_t unit) {
        Unit& u = model.units[unit];
        if (stage >= 2) {
            ranks.reduce_scatter(shards[unit].grad, u.grad).wait();
            free_grads(u);
        }
        if (stage == 3) free_weights(u);
    }
    // end::stages[]
    // ---- and after the backward pass: AdamW on this rank's shards ----
    double update_weights(int64_t number) {
        double squares = 0;
        for (size_t i = 0; i < shards.size(); ++i) {
            Unit& unit = model.units[i];
            if (stage == 1) ranks.reduce_scatter(shards[i].grad, unit.grad).wait();
            squares += minimal::squares(unit, shards[i].grad, offset(i));
        }
        const double norm = std::sqrt(ranks.sum(squares));
        for (size_t i = 0; i < shards.size(); ++i) {
            update(model.units[i], shards[i].data, shards[i].grad, number, norm, offset(i));
            if (stage < 3) ranks.all_gather(model.units[i].data, shards[i].data).wait();
        }
        return norm;
    }

    int64_t N() const { return ranks.size(); }
    int64_t offset(size_t unit) const { return ranks.rank() * shards[unit].grad.size(); }
    Tensor own(const Tensor& whole) const {
        const int64_t size = whole.size() / N();
        return whole.element_slice(ranks.rank() * size, {size});
    }
    void gather_weights(size_t unit) {
        Unit& u = model.units[unit];
        u.data = Tensor({shards[unit].data.size() * N()}, s.dtype, s.device, Memory::params);
        ranks.all_gather(u.data, shards[unit].data).wait();
        bind_data(u.params, u.data);
    }
    // Parameters are views of the unit's buffer: bound to nothing, they free it, with its last reference.
    static void free_weights(Unit& u) { bind_data(u.params, u.data = {}); }
    static void free_grads(Unit& u) { bind_grads(u.params, u.grad = {}); }

    const Source text_;
    OneDevice parts_;  // no tensor or context parallelism: a rank has whole matrices and sequences
};

static void program(int argc, char** argv) {
    const Sizes s;
    const int stage = argc > 1 ? std::atoi(argv[1]) : 3;
    if (stage < 1 || stage > 3) usage_error("{}: the stage must be 1, 2 or 3", argv[1]);
    Training training(s, stage, connect(s.device));
    train(training);
    if (this_rank != 0) return;
    const MemoryBytes& now = ledger().now();
    fmt::print("rank 0 holds {} bytes of weights, {} of gradients, {} of moments\n", now[int(Memory::params)],
               now[int(Memory::grads)], now[int(Memory::optimizer)]);
}

}  // namespace train70b::minimal

int main(int argc, char** argv) { return train70b::run_ranks(argc, argv, train70b::minimal::program); }
