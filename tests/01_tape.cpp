// The tape: sums without aliasing, memory freed when its last use is over, recomputation, the order as a hook.
#include "01_single_gpu/complete/layers.h"
#include "tests/support.h"

using namespace train70b;
using namespace train70b::test;

namespace {
int64_t activations() { return ledger().now()[int(Memory::activations)]; }

struct OneLinear {
    Param param;
    Linear linear;
    OneLinear(int64_t out, int64_t in, uint64_t key) : param(make_param("w", {out, in}, 1)) {
        linear.weights = {&param};
        param.data = tensor(randoms(out * in, key), {out, in});
        param.grad = Tensor::like(param.data, Memory::grads);
        fill(param.grad, 0);
    }
};
}  // namespace

TEST_CASE("a residual branch: the shared gradient buffer is not changed behind its other holder's back") {
    // y = x + W x: dy is handed to both branches, and the second share is added to a buffer that the first still needs.
    OneLinear w(3, 3, 1);
    Tape tape;
    Var x{.data = tensor(randoms(6, 2), {2, 3})};
    Var y = add(tape, x, w.linear(tape, x));
    const Tensor dy = tensor(randoms(6, 3), {2, 3});
    const std::vector<double> kept = values(dy);
    *y.grad = dy;
    tape.backward();
    EXPECT(values(dy) == kept);
    std::vector<double> expected = values(matmul(dy, w.param.data));
    for (size_t i = 0; i < expected.size(); ++i) expected[i] += kept[i];
    EXPECT(distance(*x.grad, expected) <= 1e-6);
    EXPECT(distance(w.param.grad, values(matmul(dy, x.data, Transpose::a))) <= 1e-6);
}

TEST_CASE("accumulate adds in place only into what it alone owns") {
    Tensor slot;
    const Tensor one = tensor({1, 2}, {2});
    accumulate(slot, one);
    EXPECT(slot.same_memory(one));
    accumulate(slot, one);  // held by `one` too: a new buffer
    EXPECT(!slot.same_memory(one));
    EXPECT(values(one) == std::vector<double>{1, 2});
    const float* before = slot.data<float>();
    accumulate(slot, one);  // now its own
    EXPECT(slot.data<float>() == before);
    EXPECT(values(slot) == std::vector<double>{3, 6});
}

TEST_CASE("closures do not pin the results of their ops") {
    OneLinear w(1000, 4, 1), v(5, 1000, 2);
    const int64_t before = activations();
    Tape tape;
    Var y;
    {
        Var x{.data = tensor(randoms(8, 3), {2, 4})};
        y = v.linear(tape, w.linear(tape, x));
    }
    // Kept: x (2, 4), the input of v (2, 1000), and y (2, 5) because we hold it.
    EXPECT(activations() - before == 4 * (8 + 2000 + 10));
    y.data = Tensor();
    EXPECT(activations() - before == 4 * (8 + 2000));
    *y.grad = tensor(randoms(10, 4), {2, 5});
    tape.backward();
    y = Var();
    EXPECT(activations() == before);
    EXPECT(tape.steps.empty());
}

TEST_CASE("a tape that does not record keeps nothing") {
    OneLinear w(6, 4, 1);
    Tape tape{.recording = false};
    const Var y = w.linear(tape, Var{.data = tensor(randoms(8, 3), {2, 4})});
    EXPECT(tape.steps.empty());
}

TEST_CASE("recompute: same gradients bit for bit, only the input kept, the body run twice") {
    OneLinear a(64, 4, 1), b(4, 32, 2);
    int runs = 0;
    const auto body = [&](Tape& tape, const Var& x) {
        ++runs;
        return add(tape, x, b.linear(tape, swiglu(tape, a.linear(tape, x))));
    };
    std::vector<double> dx[2], da[2];
    int64_t kept[2];
    for (int level = 0; level < 2; ++level) {
        fill(a.param.grad, 0);
        Tape tape;
        Var x{.data = tensor(randoms(12, 3), {3, 4})};
        const int64_t before = activations();
        Var y = level ? recompute(tape, x, body) : body(tape, x);
        const auto slot = y.grad;
        y = Var();
        kept[level] = activations() - before;
        *slot = tensor(randoms(12, 5), {3, 4});
        tape.backward();
        dx[level] = values(*x.grad);
        da[level] = values(a.param.grad);
    }
    EXPECT(runs == 3);
    EXPECT(kept[0] == 4 * 3 * (64 + 32));
    EXPECT(kept[1] == 0);
    EXPECT(dx[0] == dx[1]);
    EXPECT(da[0] == da[1]);
}

TEST_CASE("recompute: weight gradients that are deferred stay so in the second run") {
    OneLinear a(4, 4, 1);
    Tape::Steps later;
    Tape tape;
    tape.deferred_wgrads = &later;
    Var y = recompute(tape, Var{.data = tensor(randoms(12, 3), {3, 4})},
                      [&](Tape& t, const Var& x) { return a.linear(t, x); });
    *y.grad = tensor(randoms(12, 5), {3, 4});
    tape.backward();
    EXPECT(later.size() == 1);
    EXPECT(values(a.param.grad) == std::vector<double>(16));
    for (const auto& step : later) step();
    EXPECT(values(a.param.grad) != std::vector<double>(16));
}

TEST_CASE("Lazy: made once, on first use, dropped with its last holder") {
    int made = 0;
    const int64_t before = activations();
    {
        const Lazy<Tensor> lazy([&] {
            ++made;
            return tensor({1, 2, 3}, {3});
        });
        const Lazy<Tensor> copy = lazy;
        EXPECT(made == 0);
        EXPECT(copy.get().same_memory(lazy.get()));
        EXPECT(made == 1);
        EXPECT(activations() - before == 12);
    }
    EXPECT(activations() == before);
}

TEST_CASE("the order of the tape is the hook system") {
    std::string order;
    const auto say = [&](char c) { return [&order, c] { order += c; }; };
    Tape tape;
    tape.record(say('d'));  // recorded before the body: runs after its backward
    tape.record(say('c'));
    tape.record(say('b'));
    tape.record(say('a'));  // recorded after the body: runs before its backward
    tape.backward();
    EXPECT(order == "abcd");
}
