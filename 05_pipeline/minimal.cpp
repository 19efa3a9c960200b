// Pipeline parallelism: each of N ranks has 1/N of the layers, a stage; the first also has the embedding, the last the
// head and the loss. A step is m micro-batches; a stage sends what it computes of each to the next one, and gradients
// come back. The schedule 1F1B (PipeDream, 2019; with a flush after each step, as here: PipeDream-2BW and DAPPLE): a
// rank first runs as many forward passes as there are stages after it, then a forward and a backward pass in turn, and
// at the end the backward passes that are left. With 4 stages, 6 micro-batches, and backward passes as long as forward:
//
//   rank 0   F0 F1 F2 F3          B0 F4 B1 F5 B2    B3    B4    B5
//   rank 1      F0 F1 F2       B0 F3 B1 F4 B2 F5 B3    B4    B5
//   rank 2         F0 F1    B0 F2 B1 F3 B2 F4 B3 F5 B4    B5
//   rank 3            F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5
//
// At most N - r micro-batches are between their F and their B on rank r, which keeps the activations of that many. A
// rank is idle for (N - 1)/(m + N - 1) of a step.
//
// Run:   mpirun -np 4 --oversubscribe build/bin/05_minimal
#include "01_single_gpu/minimal.h"

#include "02_data_parallel/runtime/connect.h"

namespace train70b::minimal {

struct Step {   // an entry of a rank's list, not a step of training
    char pass;  // F or B
    int64_t micro_batch;
};

// What a rank does, in this order.
// tag::list[]
inline std::vector<Step> one_f_one_b(int64_t ranks, int64_t rank, int64_t micro_batches) {
    const int64_t warmup = std::min(micro_batches, ranks - 1 - rank);
    std::vector<Step> steps;
    for (int64_t i = 0; i < warmup; ++i) steps.push_back({'F', i});
    for (int64_t i = warmup; i < micro_batches; ++i) {
        steps.push_back({'F', i});
        steps.push_back({'B', i - warmup});
    }
    for (int64_t i = micro_batches - warmup; i < micro_batches; ++i) steps.push_back({'B', i});
    return steps;
}
// end::list[]

// Messages to and from the stages beside this one, (R, E): activations and gradients, a channel for each direction.
// In a channel they arrive in the order they were sent, which on both sides is that of the micro-batches: no tags.
class Neighbours {
  public:
    explicit Neighbours(const Comm& ranks) {  // all ranks take part in opening every channel
        for (int left = 0; left + 1 < ranks.size(); ++left) {
            const Comm up = ranks.p2p_channel(left, left + 1), down = ranks.p2p_channel(left + 1, left);
            if (ranks.rank() == left) to_next_ = up, from_next_ = down;
            if (ranks.rank() == left + 1) from_previous_ = up, to_previous_ = down;
        }
    }
    // In a channel the lower of its two ranks is 0. A send does not wait for its receiver, or two neighbours that send
    // to each other would wait forever. Its Work keeps the tensor until the send is done.
    void send_next(const Tensor& x) { send(to_next_, x, 1); }
    void send_previous(const Tensor& dx) { send(to_previous_, dx, 0); }
    void receive_previous(const Tensor& x) { from_previous_.recv(x, 0).wait(); }
    void receive_next(const Tensor& dx) { from_next_.recv(dx, 1).wait(); }
    void wait_for_sends() {
        for (Work& send : sends_) send.wait();
        sends_.clear();
    }

  private:
    void send(const Comm& channel, const Tensor& x, int to) {
        std::erase_if(sends_, [](Work& work) { return work.done(); });  // frees what has arrived
        sends_.push_back(channel.send(x, to));
    }
    Comm to_next_, from_next_, to_previous_, from_previous_;
    std::vector<Work> sends_;
};

class Training {
  public:
    const Sizes s;
    const Comm ranks;
    Llama model;  // of this stage

    Training(const Sizes& sizes, const Comm& all)
        : s(checked(sizes, all.size())),
          ranks(all),
          model(s, {}, s.layers / all.size() * all.rank(), s.layers / all.size() * (all.rank() + 1)),
          text_(open_text(s)),
          neighbours_(all) {
        model.allocate(s);
    }

    Result step(int64_t number) {
        for (Unit& unit : model.units) fill(unit.grad, 0);
        const int64_t m = s.batch;  // micro-batches of one sequence
        const bool is_first = ranks.rank() == 0, is_last = ranks.rank() == ranks.size() - 1;
        std::vector<Llama::Saved> saved(static_cast<size_t>(m));
        double loss = 0;
        for (const Step& step : one_f_one_b(ranks.size(), ranks.rank(), m)) {
            const Batch batch = make_batch(text_, s, (number - 1) * s.batch + step.micro_batch, 1, {{0, s.T}});
            Llama::Saved& kept = saved[size_t(step.micro_batch)];
            Tensor message({s.T, s.E}, s.dtype, s.device);  // unused in the first stage's F and the last one's B
            if (step.pass == 'F') {
                if (!is_first) neighbours_.receive_previous(message);
                const Tensor y = model.forward(message, kept, batch, parts_);
                if (is_last)
                    loss += read(y)[0];
                else
                    neighbours_.send_next(y);
            } else {
                if (!is_last) neighbours_.receive_next(message);
                const Tensor dx = model.backward(message, kept, batch, parts_);  // frees the micro-batch's activations
                if (!is_first) neighbours_.send_previous(dx);
            }
        }
        neighbours_.wait_for_sends();

        const double norm = std::sqrt(ranks.sum(squares(model)));
        for (Unit& unit : model.units) update(unit, unit.data, unit.grad, number, norm);
        return {ranks.sum(loss), norm};  // all stages but the last have a loss of 0
    }

  private:
    static Sizes checked(const Sizes& s, int64_t ranks) {
        if (s.layers % ranks != 0) usage_error("{} layers are not divisible by {} ranks", s.layers, ranks);
        return s;
    }
    const Source text_;
    OneDevice parts_;
    Neighbours neighbours_;
};

static void program(int, char**) {
    const Sizes s;
    Training training(s, connect(s.device));
    train(training);
}

}  // namespace train70b::minimal

int main(int argc, char** argv) { return train70b::run_ranks(argc, argv, train70b::minimal::program); }
