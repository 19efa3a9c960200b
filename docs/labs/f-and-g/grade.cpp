// Grades the lab f-and-g.
#include "04_tensor_parallel/complete/tensor_parallel.h"
#include "tests/labs.h"
#include "tests/ranks.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr int64_t kRows = 16, kCols = 6;  // R, E

using Operator = Var (*)(Tape&, const Var&, const Comm&);

Tensor whole(uint64_t key) { return tensor(randoms(kRows * kCols, key), {kRows, kCols}); }
// The sum of whole(key + rank) over the ranks.
std::vector<double> sum(uint64_t key) {
    std::vector<double> total(size_t(kRows * kCols));
    for (int rank = 0; rank < world().size(); ++rank) {
        const std::vector<double> part = values(whole(key + uint64_t(rank)));
        for (size_t i = 0; i < total.size(); ++i) total[i] += part[i];
    }
    return total;
}
std::vector<double> own_rows(const std::vector<double>& all) {
    const size_t each = all.size() / size_t(world().size()), begin = each * size_t(world().rank());
    return {all.begin() + int64_t(begin), all.begin() + int64_t(begin + each)};
}
Tensor rows_of(uint64_t key) { return tensor(own_rows(values(whole(key))), {kRows / world().size(), kCols}); }
uint64_t mine(uint64_t key) { return key + uint64_t(world().rank()); }

int64_t sent() {  // since the last call
    int64_t bytes = 0;
    for (const auto& [name, entry] : world().take_stats().operations)
        if (!name.ends_with("scalar")) bytes += entry.bytes;
    return bytes;
}

struct Passes {
    std::vector<double> y, dx;
    bool kept_x = true, kept_dy = true;  // what others hold is as it was
    int64_t forward = 0, backward = 0;   // bytes
};
// dx: what the operator adds to a gradient that is `before` already.
Passes passes(Operator op, const Tensor& x, const Tensor& dy, bool before = false) {
    const std::vector<double> x_was = values(x), dy_was = values(dy);
    Passes result;
    Tape tape;
    sent();
    const Var in{.data = x};
    Var out = op(tape, in, world());
    REQUIRE(out.data);
    result.y = values(out.data);
    result.forward = sent();
    *out.grad = dy;
    if (before && in.grad != out.grad) *in.grad = tensor(std::vector<double>(size_t(x.size()), 1), x.shape());
    tape.backward();
    result.backward = sent();
    result.dx = *in.grad ? values(*in.grad) : std::vector<double>(size_t(x.size()));
    if (before && in.grad != out.grad)
        for (double& g : result.dx) g -= 1;
    result.kept_x = values(x) == x_was;
    result.kept_dy = values(dy) == dy_was;
    return result;
}

bool near(double a, double b) { return std::abs(a - b) <= 1e-5 * std::abs(b); }
// A norm over what all ranks hold, so that every rank has the same figure.
double all_norm(const std::vector<double>& x) { return std::sqrt(world().sum(dot(x, x))); }

void check(const std::string& what, const std::vector<double>& got, const std::vector<double>& expected,
           const std::string& formula, const std::vector<double>& part) {
    const bool same_size = everywhere(got.size() == expected.size());
    const double n = same_size ? all_norm(got) : 0, e = all_norm(expected), N = world().size(), p = all_norm(part);
    figure(what + ", its norm", n, e, "", formula,
           !same_size       ? "The shape is wrong."
           : near(n, e)     ? ""
           : n == 0         ? "There is none."
           : near(n, N * e) ? "N times too large: the sum of N equal parts. What is whole on every rank is not summed."
           : near(n, p)     ? "This is this rank's part alone: the ranks' parts are to be summed."
                            : "",
           1e-5);
    Failures failures;
    failures.expect(same_size && distance(got, expected) <= 1e-5,
                    what + ": wrong numbers, or right ones in wrong places");
    EXPECT_NONE(failures);
}

}  // namespace

TEST_CASE("lab: copy_to_ranks") {
    const Tensor dy = whole(mine(10));
    const Passes p = passes(copy_to_ranks, whole(1), dy, true);
    check("f(x)", p.y, values(whole(1)), "x", {});
    check("dX", p.dx, sum(10), "sum over ranks of dY", values(dy));
    figure("gradients of others overwritten", int64_t(!p.kept_dy), int64_t(0), "", "none",
           "dY has another owner: take(*dy) copies it then.");
}

TEST_CASE("lab: reduce_from_ranks") {
    const Tensor y = whole(mine(20));
    const Passes p = passes(reduce_from_ranks, y, whole(2), false);
    check("g(y)", p.y, sum(20), "sum over ranks of y", values(y));
    check("dY", p.dx, values(whole(2)), "dZ", {});
    figure("inputs overwritten", int64_t(!p.kept_x), int64_t(0), "", "none",
           "g overwrites its input, which has another owner: unshared(y.data) copies it then.");
}

TEST_CASE("lab: gather_sequence") {
    const Tensor dy = whole(mine(30));
    const Passes p = passes(gather_sequence, rows_of(3), dy, true);
    check("f(x)", p.y, values(whole(3)), "all ranks' rows", {});
    check("dX", p.dx, own_rows(sum(30)), "own rows of the sum over ranks of dY", own_rows(values(dy)));
    figure("gradients of others overwritten", int64_t(!p.kept_dy), int64_t(0), "", "none",
           "dY has another owner, and a reduce-scatter uses it as scratch memory: take(*dy) copies it then.");
}

TEST_CASE("lab: reduce_scatter_sequence") {
    const Tensor y = whole(mine(40));
    const Passes p = passes(reduce_scatter_sequence, y, rows_of(4), true);
    check("g(y)", p.y, own_rows(sum(40)), "own rows of the sum over ranks of y", own_rows(values(y)));
    check("dY", p.dx, values(whole(4)), "all ranks' rows of dZ", {});
    figure("inputs overwritten", int64_t(!p.kept_x), int64_t(0), "", "none",
           "y has another owner, and a reduce-scatter uses it as scratch memory: unshared(y.data) copies it then.");
}

TEST_CASE("lab: what each operator sends") {
    const int64_t N = world().size(), n = 4 * kRows * kCols, half = n * (N - 1) / N;
    struct Line {
        const char* name;
        Operator op;
        bool part_in, part_out;
        int64_t forward, backward;  // of half an all-reduce
    };
    for (const Line& line :
         {Line{"f", copy_to_ranks, false, false, 0, 2}, Line{"g", reduce_from_ranks, false, false, 2, 0},
          Line{"f, sequence", gather_sequence, true, false, 1, 1},
          Line{"g, sequence", reduce_scatter_sequence, false, true, 1, 1}}) {
        const Passes p = passes(line.op, line.part_in ? rows_of(5) : whole(5), line.part_out ? rows_of(6) : whole(6));
        const auto expect = [&](const char* pass, int64_t got, int64_t halves) {
            const char* formulas[] = {"nothing", "n (N-1)/N", "2 n (N-1)/N"};
            figure(fmt::format("{}, {}", line.name, pass), got, halves * half, "B", formulas[halves],
                   got == 2 * half && halves == 1 ? "An all-reduce, of which 1/N is used: a reduce-scatter sends half."
                   : got > halves * half          ? "Here nothing needs to be summed or gathered."
                   : got < halves * half          ? "A collective is missing."
                                                  : "");
        };
        expect("forward", p.forward, line.forward);
        expect("backward", p.backward, line.backward);
    }
}

TEST_CASE("lab: what the operators keep") {
    const auto held = [] { return ledger().now()[int(Memory::activations)] + ledger().now()[int(Memory::comm)]; };
    Tensor some = whole(9);
    world().all_reduce(some).wait();  // what the backend keeps from then on
    struct Line {
        const char* name;
        Operator op;
    };
    for (const Line& line :
         {Line{"f", copy_to_ranks}, Line{"g", reduce_from_ranks}, Line{"g, sequence", reduce_scatter_sequence}}) {
        const int64_t before = held();
        Tape tape;
        line.op(tape, Var{.data = whole(9)}, world());
        figure(fmt::format("{} keeps until its backward pass", line.name), held() - before, int64_t(0), "B", "nothing",
               "A sum has no use for its input in the backward pass: capture the gradients only.");
    }
    Tape tape;
    Var x{.data = whole(9)};
    x.recomputed = Lazy<Tensor>([] { return whole(9); });
    figure("inputs of f that are recomputed, kept by it", int64_t(!copy_to_ranks(tape, x, world()).recomputed),
           int64_t(0), "", "none", "What x.recomputed says is true of y as well: without it y is kept.");
}

TEST_CASE("lab: what f keeps under sequence parallelism") {
    const auto held = [] { return ledger().now()[int(Memory::activations)] + ledger().now()[int(Memory::comm)]; };
    const int64_t N = world().size(), n = 4 * kRows * kCols;
    const int64_t before = held();
    Tape tape;
    Failures failures;
    std::shared_ptr<Tensor> slot;
    {
        Var x{.data = rows_of(7)};
        const Var y = gather_sequence(tape, x, world());
        tape.record([x = Saved(y), &failures] {  // the weight gradient
            failures.expect(x.get().size() == kRows * kCols && values(x.get()) == values(whole(7)),
                            "what the weight gradient reads in the backward pass is not all ranks' rows");
        });
        slot = y.grad;
    }
    const int64_t kept = held() - before;
    figure("kept until the weight gradient", kept, n / N, "B", "n / N: this rank's rows",
           kept >= n ? "All ranks' rows are kept: set y.recomputed to a Lazy that gathers them again." : "");
    *slot = whole(mine(8));
    sent();
    tape.backward();
    figure("bytes of its backward pass", sent(), 2 * n * (N - 1) / N, "B", "reduce-scatter + a second all-gather");
    EXPECT_NONE(failures);
}
