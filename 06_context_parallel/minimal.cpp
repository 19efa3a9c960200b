// Context parallelism: every rank has the whole model, and computes some tokens of each sequence. Everything in a Llama
// but attention works on single tokens; attention is the ring of this folder's minimal.h. Gradients are sums over
// tokens, so they are summed over the ranks as in chapter 02.
//
// Run:   mpirun -np 4 --oversubscribe build/bin/06_minimal           (zigzag)
//        mpirun -np 4 --oversubscribe build/bin/06_minimal ring      (tokens in order: the last rank has the most work)
#include "06_context_parallel/minimal.h"

#include "02_data_parallel/runtime/connect.h"

namespace train70b::minimal {

class Training {
  public:
    const Sizes s;
    const Comm ranks;
    Llama model;

    Training(const Sizes& sizes, const Comm& all, int64_t chunks)
        : s(sizes), ranks(all), model(s), text_(open_text(s)), parts_(all, chunks) {
        if (const int64_t pieces = ranks.size() * chunks; s.T % pieces != 0)
            usage_error("{} tokens do not divide into {} chunks: use another number of ranks", s.T, pieces);
        model.allocate(s);
    }

    Result step(int64_t number) {
        for (Unit& unit : model.units) fill(unit.grad, 0);
        const Batch batch = make_batch(text_, s, (number - 1) * s.batch, s.batch, parts_.tokens(s.T));
        Llama::Saved saved;
        const Tensor loss = model.forward({}, saved, batch, parts_);
        model.backward({}, saved, batch, parts_);

        for (Unit& unit : model.units) ranks.all_reduce(unit.grad).wait();
        const double norm = std::sqrt(squares(model));
        for (Unit& unit : model.units) update(unit, unit.data, unit.grad, number, norm);
        return {ranks.sum(read(loss)[0]), norm};
    }

  private:
    const Source text_;
    RingAttention parts_;
};

static void program(int argc, char** argv) {
    const std::string_view order = argc > 1 ? argv[1] : "zigzag";
    if (order != "zigzag" && order != "ring") usage_error("{}: must be zigzag or ring", order);
    const Sizes s;
    Training training(s, connect(s.device), order == "ring" ? 1 : 2);
    train(training);
}

}  // namespace train70b::minimal

int main(int argc, char** argv) { return train70b::run_ranks(argc, argv, train70b::minimal::program); }
