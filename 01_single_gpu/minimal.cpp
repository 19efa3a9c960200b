// One device: forward, backward, update. Later chapters change where the numbers are, not what they are.
//
// Run:   build/bin/01_minimal
#include "01_single_gpu/minimal.h"

#include "01_single_gpu/core/cpu_threads.h"

namespace train70b::minimal {

class Training {
  public:
    const Sizes s;
    Llama model;
    explicit Training(const Sizes& sizes) : s(sizes), model(s), text_(open_text(s)) { model.allocate(s); }

    // Gradients are zeroed first, then added to, and stay until the next step. On a GPU operations are only queued; the
    // host waits in make_batch, which uploads, and where it reads numbers: squares and read.
    // tag::step[]
    Result step(int64_t number) {
        for (Unit& unit : model.units) fill(unit.grad, 0);
        const Batch batch = make_batch(text_, s, (number - 1) * s.batch, s.batch, {{0, s.T}});
        Llama::Saved saved;
        const Tensor loss = model.forward({}, saved, batch, parts_);
        model.backward({}, saved, batch, parts_);
        const double norm = std::sqrt(squares(model));
        for (Unit& unit : model.units) update(unit, unit.data, unit.grad, number, norm);
        return {read(loss)[0], norm};
    }
    // end::step[]

  private:
    const Source text_;
    OneDevice parts_;
};

static void program(int, char**) {
    set_cpu_threads(1);  // of ranks that share the cores
    Training training({});
    train(training);
}

}  // namespace train70b::minimal

int main(int argc, char** argv) { return train70b::run_program(argc, argv, train70b::minimal::program); }
