// Tensor parallelism (Shoeybi et al. 2019): every matrix is cut over N ranks, and so is the work; every rank computes
// the whole batch. A half of a block is f, a column-parallel layer, a row-parallel layer, g:
//
//            forward                                              backward
//   f        x, the same on all ranks                             all-reduce: dx is the sum of the ranks' parts
//   A        q, k, v, gate, up: a rank has some of the outputs    a part of dx: what comes through these outputs
//   B        o, down: a rank has the matching inputs              the gradient of these inputs
//   g        all-reduce: the output is the sum of the parts       dy, the same on all ranks
//
// Between A and B, attention and SwiGLU need this rank's heads and channels only. So a block costs four all-reduces of
// (R, E) per step, the embedding (which ends in g) and the head (which begins with f) one each. The residual stream is
// the same on all ranks, and so are norm weights and their gradients, which are computed after f's all-reduce.
//
// Run:   mpirun -np 4 --oversubscribe build/bin/04_minimal
#include "01_single_gpu/minimal.h"

#include "02_data_parallel/runtime/connect.h"

namespace train70b::minimal {

struct TensorParallel : OneDevice {
    Comm ranks;

    explicit TensorParallel(const Comm& all) : ranks(all) {}
    // tag::f-and-g[]
    // A rank's rectangle {first row, rows, first column, columns} of a matrix (out, in).
    Param rows(Param p) const {  // some outputs (of q, k, v whole heads): column-parallel
        const int64_t n = p.local.rows / ranks.size();
        p.local = {n * ranks.rank(), n, 0, p.local.cols};
        return p;
    }
    Param cols(Param p) const {  // some inputs: row-parallel
        const int64_t n = p.local.cols / ranks.size();
        p.local = {0, p.local.rows, n * ranks.rank(), n};
        return p;
    }
    Param whole(Param p) const {  // on all of them; only rank 0 counts it in the norm of the gradient
        p.replica = ranks.rank();
        return p;
    }
    // In place: x is a fresh tensor in every call.
    Tensor f_backward(const Tensor& dx) { return summed(dx); }
    Tensor g(const Tensor& y) { return summed(y); }
    Tensor summed(const Tensor& x) {
        ranks.all_reduce(x).wait();
        return x;
    }
    // end::f-and-g[]

    // A row's logits lie on all ranks, V/N on each. Only three numbers per row travel:
    //   max = max of the ranks' maxima,  sum = sum of e^(logit - max),  target's logit, 0 where its column is not
    void whole_vocabulary(Tensor& row_max, Tensor& row_sum, Tensor& target_logit) {
        Tensor whole_max = Tensor::like(row_max);
        copy(whole_max, row_max);
        ranks.all_reduce(whole_max, Reduce::max).wait();
        rescale_sums(row_sum, row_max, whole_max);  // e^(logit - row_max) becomes e^(logit - whole_max)
        row_max = whole_max;
        ranks.all_reduce(row_sum).wait();
        ranks.all_reduce(target_logit).wait();
    }
};

class Training {
  public:
    const Sizes s;
    TensorParallel parts;
    Llama model;

    // A rank has 1/N of every matrix; the embedding's table and the head are cut along the vocabulary.
    Training(const Sizes& sizes, const Comm& all)
        : s(checked(sizes, all.size())), parts(all), model(s, parts), text_(open_text(s)) {
        model.allocate(s);
    }

    Result step(int64_t number) {
        for (Unit& unit : model.units) fill(unit.grad, 0);
        const Batch batch = make_batch(text_, s, (number - 1) * s.batch, s.batch, {{0, s.T}});
        Llama::Saved saved;
        const Tensor loss = model.forward({}, saved, batch, parts);
        model.backward({}, saved, batch, parts);

        const double norm = std::sqrt(parts.ranks.sum(squares(model)));  // RMSNorms' weights: counted on rank 0 only
        for (Unit& unit : model.units) update(unit, unit.data, unit.grad, number, norm);
        return {read(loss)[0], norm};  // the loss is the same on all ranks
    }

  private:
    static Sizes checked(const Sizes& s, int64_t ranks) {
        for (int64_t size : {s.H, s.K, s.F, s.V})
            if (size % ranks != 0) usage_error("{} ranks: heads, ffn and vocabulary must be divisible by them", ranks);
        return s;
    }
    const Source text_;
};

static void program(int, char**) {
    const Sizes s;
    Training training(s, connect(s.device));
    train(training);
}

}  // namespace train70b::minimal

int main(int argc, char** argv) { return train70b::run_ranks(argc, argv, train70b::minimal::program); }
