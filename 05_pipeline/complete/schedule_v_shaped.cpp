// Schedules whose second chunk runs from the last rank back to the first, a V: ZB-V, and DualPipe-V's two directions.
#include <algorithm>
#include <deque>

#include "05_pipeline/complete/schedule.h"

namespace train70b {

namespace {

// A rank's list as it grows. Micro-batches pass each chunk in order, so a step is a letter and a chunk.
class List {
  public:
    explicit List(int64_t micro_batches) : m_(micro_batches) {}

    void F(int64_t chunk) { add(Pass::forward, chunk, forwards_[chunk]++); }
    void B(int64_t chunk) { add(Pass::backward, chunk, backwards_[chunk]++); }
    void I(int64_t chunk) {
        waiting_.push_back({Pass::backward_weight, backwards_[chunk], chunk});
        add(Pass::backward_input, chunk, backwards_[chunk]++);
    }
    void W() {  // of the oldest I
        add(waiting_.front());
        waiting_.pop_front();
    }
    void W(int64_t chunk) {  // of the oldest I of this chunk
        const auto found = oldest(chunk);
        add(*found);
        waiting_.erase(found);
    }
    bool waits(int64_t chunk) const { return oldest(chunk) != waiting_.end(); }
    int64_t forwards(int64_t chunk) const { return forwards_[chunk]; }
    std::vector<Step> steps() const { return steps_; }

  private:
    std::deque<Step>::const_iterator oldest(int64_t chunk) const {
        return std::ranges::find(waiting_, chunk, &Step::chunk);
    }
    void add(Pass pass, int64_t chunk, int64_t micro_batch) { add({pass, micro_batch, chunk}); }
    void add(const Step& step) {
        if (step.micro_batch < m_) steps_.push_back(step);  // the others only keep their place
    }

    const int64_t m_;
    std::vector<Step> steps_;
    int64_t forwards_[2] = {}, backwards_[2] = {};
    std::deque<Step> waiting_;  // W of each I so far
};

}  // namespace

// With fewer than 2p - 1 micro-batches: the list for 2p - 1, without those that there are not.
// tag::zb-v[]
std::vector<Step> zb_v(int64_t p, int64_t m, int64_t rank) {
    List list(m);
    const int64_t all = std::max(m, 2 * p - 1), to_turn = p - rank;  // ranks from here to the turn of the V
    // Warm-up: fill the time until micro-batch 0 comes back from the turn; then both chunks forward in turn, until its
    // gradient can begin.
    for (int64_t i = 0; i < 2 * to_turn - 1; ++i) list.F(0);
    for (int64_t i = 0; i < rank; ++i) list.F(1), list.F(0);
    // The gradients of chunk 1, until the first of them comes back from the turn.
    for (int64_t i = 0; i < to_turn; ++i) list.F(1), list.I(1), list.W(1);
    // Steady state: both chunks forward and backward. No step waits, with F = I = W.
    while (list.forwards(1) < all) {
        if (list.forwards(0) < all) list.F(0);
        list.I(0), list.W(0);
        list.F(1), list.I(1), list.W(1);
    }
    // Cool-down: I first, which other ranks wait for; W where the rank would idle, the rest at the end.
    for (int64_t i = 0; i < rank; ++i) list.I(0), list.I(1);
    for (int64_t i = 0; i < to_turn; ++i) list.I(0), list.W(0);
    while (list.waits(1)) list.W(1);
    while (list.waits(0)) list.W(0);
    return list.steps();
}
// end::zb-v[]

int64_t zb_v_wait(PipelineSize s) { return s.p == 1 ? 0 : std::max<int64_t>(0, 4 * s.p - 2 - 2 * s.m); }

// tag::dualpipe-v[]
std::vector<Step> dualpipe_v(int64_t p, int64_t m, int64_t rank) {
    List list(m);
    const int64_t behind = rank + 1, ahead = p - 1 - rank;  // ranks up to this one, ranks from here to the turn
    for (int64_t i = 0; i < 2 * ahead; ++i) list.F(0);
    for (int64_t i = 0; i < behind; ++i) list.F(0), list.F(1);
    for (int64_t i = 0; i < ahead; ++i) list.I(1), list.W(), list.F(1);
    for (int64_t i = 0; i < m - 2 * p + behind; ++i) {  // the pairs F&B, in this order
        list.F(0), list.B(1);
        list.F(1), list.B(0);
    }
    for (int64_t i = 0; i < ahead; ++i) {
        list.B(1);
        list.F(1), list.B(0);
    }
    // The last backward passes: from the middle on W waits, because other ranks wait for I.
    for (int64_t i = 0; i < 2 * behind; ++i) {
        const int64_t chunk = 1 - i % 2;
        i < behind ? list.B(chunk) : list.I(chunk);
    }
    for (int64_t i = 0; i < ahead; ++i) list.W(), list.I(0);
    for (int64_t i = 0; i < behind; ++i) list.W();
    return list.steps();
}
// end::dualpipe-v[]

}  // namespace train70b
