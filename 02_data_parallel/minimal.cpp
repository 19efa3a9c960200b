// Data parallelism: every rank has the whole model and computes 1/N of the batch; a ring sums the gradients, unit by
// unit, in turns with the backward pass of the earlier units. A sum, not a mean: the loss is already divided by the
// tokens of all ranks. On the CPU, with nothing but MPI.
//
// Run:   mpirun -np 4 --oversubscribe build/bin/02_minimal
#include "01_single_gpu/minimal.h"

#include <mpi.h>

#include "01_single_gpu/core/cpu_threads.h"

namespace train70b::minimal {

struct Ranks {
    const MPI_Comm comm;
    int rank, size;
    explicit Ranks(MPI_Comm of) : comm(of) {
        MPI_Comm_rank(comm, &rank);
        MPI_Comm_size(comm, &size);
    }
};

// x becomes its sum over all ranks, in place. It is cut into N chunks; in every step a rank sends one to the rank after
// it and receives another from the rank before it. In the first N - 1 steps it adds what arrives: rank r then has the
// whole sum of chunk r. In the next N - 1 it stores what arrives, the other sums. A rank sends 2 (N-1)/N of x.
class RingAllReduce {
  public:
    RingAllReduce(const Tensor& x, const Ranks& ranks, int tag) : x_(x), ranks_(ranks), tag_(tag) { start(); }
    // Takes all steps whose messages have arrived; true: x is summed. MPI may move messages only during its own calls.
    // tag::ring[]
    bool advance() {
        for (int arrived; step_ < 2 * (N_ - 1); start()) {
            MPI_Testall(2, requests_, &arrived, MPI_STATUSES_IGNORE);
            if (!arrived) return false;
            Tensor here = chunk(ranks_.rank - step_ - 2);
            step_++ < N_ - 1 ? add(here, here, incoming_) : copy(here, incoming_);
        }
        return true;
    }
    // end::ring[]

  private:
    Tensor chunk(int number) const {
        const int64_t i = (number % N_ + N_) % N_, begin = x_.size() * i / N_, end = x_.size() * (i + 1) / N_;
        return x_.element_slice(begin, {end - begin});
    }
    void start() {
        if (step_ == 2 * (N_ - 1)) return;
        const Tensor out = chunk(ranks_.rank - step_ - 1);
        incoming_ = Tensor::like(chunk(ranks_.rank - step_ - 2), Memory::comm);
        const int after = (ranks_.rank + 1) % N_, before = (ranks_.rank + N_ - 1) % N_;
        MPI_Irecv(incoming_.raw(), int(incoming_.bytes()), MPI_BYTE, before, tag_, ranks_.comm, &requests_[0]);
        MPI_Isend(out.raw(), int(out.bytes()), MPI_BYTE, after, tag_, ranks_.comm, &requests_[1]);
    }

    Tensor x_, incoming_;
    const Ranks ranks_;
    const int tag_, N_ = ranks_.size;
    int step_ = 0;
    MPI_Request requests_[2] = {MPI_REQUEST_NULL, MPI_REQUEST_NULL};
};

class Training {
  public:
    const Sizes s;
    Llama model;
    const Ranks world;
    const Source text;
    OneDevice parts;

    Training(const Sizes& sizes, const Ranks& ranks) : s(sizes), model(s), world(ranks), text(open_text(s)) {
        if (s.batch % ranks.size != 0) usage_error("{} sequences are not divisible by {} ranks", s.batch, ranks.size);
        model.allocate(s);  // the same weights on every rank, without a message: functions of seed and name
    }

    Result step(int64_t number) {
        for (Unit& unit : model.units) fill(unit.grad, 0);
        const int64_t share = s.batch / world.size;
        const Batch batch = make_batch(text, s, (number - 1) * s.batch + world.rank * share, share, {{0, s.T}});
        Llama::Saved saved;
        const Tensor loss = model.forward({}, saved, batch, parts);
        // Backward, the last unit first: as soon as a unit's gradients are complete, their ring starts.
        std::vector<RingAllReduce> rings;
        const auto complete = [&] {
            const size_t unit = model.units.size() - 1 - rings.size();
            rings.emplace_back(model.units[unit].grad, world, int(unit));  // the unit is the tag
            for (RingAllReduce& ring : rings) ring.advance();
        };
        Tensor dx = model.loss_backward(saved, parts);
        complete();
        for (size_t i = model.blocks.size(); i-- > 0;) {
            dx = model.blocks[i].backward(dx, saved.blocks[i], batch, parts);
            complete();
        }
        model.embed_backward(dx, batch, parts);
        complete();
        for (RingAllReduce& ring : rings)
            while (!ring.advance()) {}  // in the same order on all ranks
        // Now all ranks have the same gradients, bit for bit, and compute the same update. The loss is still a part.
        double sum_of_losses = read(loss)[0];
        MPI_Allreduce(MPI_IN_PLACE, &sum_of_losses, 1, MPI_DOUBLE, MPI_SUM, world.comm);
        const double norm = std::sqrt(squares(model));
        for (Unit& u : model.units) update(u, u.data, u.grad, number, norm);
        return {sum_of_losses, norm};
    }
};

static void program(int, char**) {
    MPI_Init(nullptr, nullptr);
    std::atexit([] { MPI_Finalize(); });
    const Ranks world(MPI_COMM_WORLD);
    this_rank = world.rank;
    set_cpu_threads(world.size);  // of ranks that share the cores
    Training training({.device = Device::cpu}, world);
    train(training);
}

}  // namespace train70b::minimal

int main(int argc, char** argv) { return train70b::run_program(argc, argv, train70b::minimal::program); }
