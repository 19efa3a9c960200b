// Grades the lab dispatch.
#include <fmt/format.h>

#include "01_single_gpu/complete/data/data.h"
#include "08_3d_full/experts/expert_parallel.h"
#include "tests/composed.h"
#include "tests/labs.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr int64_t kExperts = 8, kCols = 3;

// Rows that a rank has for an expert: rank 2 has none at all, and nobody any for expert 5.
int64_t rows_for(int64_t rank, int64_t expert) {
    return rank == 2 || expert == 5 ? 0 : (3 * rank + 2 * expert + rank * expert) % 4;
}

// A row says where it comes from.
double code(int64_t rank, int64_t expert, int64_t i) { return double(10000 * (rank + 1) + 100 * expert + i); }
std::string text_of(double code) {
    const int64_t number = int64_t(std::abs(code));
    return number < 10000 || double(number) != std::abs(code)
               ? fmt::format("{:.6g}", code)
               : fmt::format("row {} of rank {} for expert {}", number % 100, number / 10000 - 1, number / 100 % 100);
}
Tensor rows_of(const std::vector<double>& codes, double factor = 1) {
    std::vector<double> elements;
    for (const double each : codes)
        for (int64_t c = 0; c < kCols; ++c) elements.push_back(factor * (c == 1 ? -each : each));
    return tensor(elements, {int64_t(codes.size()), kCols});
}

// Eight experts on groups of 2 or 4 ranks of the four, or four on four: one for each.
struct Layer {
    LlamaConfig config;
    Comm own, ep;
    std::unique_ptr<Llama> model;
    std::unique_ptr<ExpertParallel> parallel;
    Routing routing;
    int64_t experts, here, rank;
    std::vector<int64_t> members;            // of ep: ranks of the world
    std::vector<double> mine, expected;      // rows of this rank, sorted; those of its experts, sorted
    std::vector<int64_t> rows_here;          // of each of its experts
    double bytes_there = 0, bytes_back = 0;  // rows of mine for others, of others for mine

    Layer(int64_t experts, int64_t ranks)
        : own(world().split([](int rank) { return rank; }, "tp")),
          ep(world().split([ranks](int rank) { return rank / int(ranks); }, "ep")),
          experts(experts),
          here(experts / ranks),
          rank(ep.rank()) {
        config.layers = 1, config.hidden = 8, config.heads = 2, config.kv_heads = 2, config.ffn = 8, config.vocab = 16;
        config.experts = {.count = experts, .top_k = 2, .ffn = 4};
        model = std::make_unique<Llama>(config, Llama::Options{});
        parallel = std::make_unique<ExpertParallel>(*model, ExpertComms{own, own, ep}, ContextLayout{});
        const int64_t first = world().rank() / ranks * ranks;
        for (int64_t r = first; r < first + ranks; ++r) members.push_back(r);
        for (int64_t e = 0; e < experts; ++e) {
            const int64_t count = rows_for(world().rank(), e);
            routing.sent.push_back(count);
            for (int64_t i = 0; i < count; ++i) mine.push_back(code(world().rank(), e, i));
            if (e / here != rank) bytes_there += double(count) * kCols * 4;
        }
        for (int64_t e = rank * here; e < (rank + 1) * here; ++e) {
            int64_t all = 0;
            for (const int64_t r : members) {
                const int64_t count = rows_for(r, e);
                all += count;
                for (int64_t i = 0; i < count; ++i) expected.push_back(code(r, e, i));
                if (r != world().rank()) bytes_back += double(count) * kCols * 4;
            }
            rows_here.push_back(all);
        }
        parallel->plan(routing, tensor({0}, {1, 1}));
    }
    std::string text() const { return fmt::format("{} experts on {} ranks", experts, members.size()); }
};

// What is wrong with rows; empty: nothing. times: of the expected numbers.
std::string differ(const std::string& what, const Tensor& got, const std::vector<double>& expected, double times = 1) {
    const std::string where = fmt::format("rank {}: {}: ", world().rank(), what);
    if (!got) return where + "nothing";
    if (got.rows() != int64_t(expected.size()) || got.cols() != kCols)
        return fmt::format("{}{} rows, expected {}", where, got.rows(), expected.size());
    const std::vector<double> numbers = values(got);
    for (size_t i = 0; i < expected.size(); ++i)
        for (int64_t c = 0; c < kCols; ++c)
            if (const double x = numbers[i * kCols + size_t(c)] / times * (c == 1 ? -1 : 1); !(x == expected[i]))
                return fmt::format("{}at {} is {}, expected {}", where, i, text_of(x), text_of(expected[i]));
    return "";
}

// All ranks fail, or none, with the first one's line.
void agree(const std::string& wrong) {
    Failures failures;
    failures.expect(wrong.empty(), wrong);
    const std::string all = failures.of_all_ranks();
    const size_t begin = all.find("rank ", all.find(": ") == std::string::npos ? 0 : all.find(": "));
    expect_none_wrong(all.empty() ? "" : all.substr(begin, all.find('\n', begin) - begin));
}

// body(layer) in each division of experts over ranks, the first that says something is wrong ends it.
void in_each(const std::function<std::string(Layer&)>& body) {
    std::string wrong;
    for (const auto& [experts, ranks] : {std::pair<int64_t, int64_t>{8, 4}, {8, 2}, {4, 4}}) {
        Layer layer(experts, ranks);
        const std::string its = body(layer);
        if (wrong.empty()) wrong = its;
    }
    agree(wrong);
}

int64_t sent() {  // since the last call, by all ranks, but for numbers
    int64_t bytes = 0;
    for (const auto& [name, entry] : world().take_stats().operations)
        if (!name.ends_with("scalar")) bytes += entry.bytes;
    return int64_t(world().sum(double(bytes)));
}
int64_t exchanges() {
    const auto operations = world().take_stats().operations;
    const auto found = operations.find("ep.all_to_all");
    return found == operations.end() ? 0 : found->second.calls;
}

}  // namespace

TEST_CASE("lab: rows of each expert") {
    in_each([](Layer& layer) -> std::string {
        if (layer.routing.rows == layer.rows_here) return "";
        const auto list = [](const std::vector<int64_t>& x) { return fmt::format("{}", fmt::join(x, " ")); };
        return fmt::format("rank {}: {}: rows of its experts: {}, expected {}", world().rank(), layer.text(),
                           list(layer.routing.rows), list(layer.rows_here));
    });
}

TEST_CASE("lab: rows arrive sorted by expert") {
    in_each([](Layer& layer) {
        Tape tape;
        const Var x{.data = rows_of(layer.mine)};
        return differ(layer.text(), layer.parallel->dispatch(tape, x, layer.routing, [] {}).data, layer.expected);
    });
}

TEST_CASE("lab: rows come back") {
    in_each([](Layer& layer) {
        Tape tape;
        const Var z{.data = rows_of(layer.expected)};
        return differ(layer.text(), layer.parallel->combine(tape, z, layer.routing).data, layer.mine);
    });
}

TEST_CASE("lab: gradients go back") {
    in_each([](Layer& layer) {
        Tape tape;
        const Var x{.data = rows_of(layer.mine)};
        *x.grad = rows_of(layer.mine);  // of another use of x: gradients are added
        const Var y = layer.parallel->dispatch(tape, x, layer.routing, [] {});
        *y.grad = Tensor::like(y.data);
        copy(*y.grad, y.data);  // in whatever order the rows came, theirs
        tape.backward();
        std::string wrong = differ(layer.text() + ", dispatch", *x.grad, layer.mine, 2);
        Tape other;
        const Var z{.data = rows_of(layer.expected)};
        const Var back = layer.parallel->combine(other, z, layer.routing);
        *back.grad = Tensor::like(back.data);
        copy(*back.grad, back.data);
        other.backward();
        return wrong.empty() ? differ(layer.text() + ", combine", *z.grad, layer.expected) : wrong;
    });
}

TEST_CASE("lab: bytes of both ways") {
    Layer layer(8, 4);
    sent();
    Tape tape;
    const Var x{.data = rows_of(layer.mine)};
    const Var z = layer.parallel->combine(tape, layer.parallel->dispatch(tape, x, layer.routing, [] {}), layer.routing);
    const int64_t forward = sent(), expected = int64_t(world().sum(layer.bytes_there + layer.bytes_back));
    int64_t longest = 0;
    for (int64_t r = 0; r < 4; ++r)
        for (int64_t to = 0; to < 4; ++to) longest = std::max(longest, rows_for(r, 2 * to) + rows_for(r, 2 * to + 1));
    figure("bytes that four ranks send, dispatch and combine", forward, expected, "B",
           "rows for other ranks, both ways",
           forward == 2 * 4 * 3 * longest * kCols * 4
               ? "Every rank gets as many rows as the longest of all slices has: send what there is."
           : forward > expected ? "More than the rows that others need."
                                : "");
    *z.grad = rows_of(layer.mine);
    tape.backward();
    figure("bytes of the gradients", sent(), expected, "B", "the same");
}

TEST_CASE("lab: what is computed meanwhile") {
    Layer layer(8, 4);
    Tape tape;
    const Var x{.data = rows_of(layer.mine)};
    int64_t calls = 0, begun = 0, begun_backward = 0;
    exchanges();
    const Var y = layer.parallel->dispatch(tape, x, layer.routing, [&] {
        ++calls;
        begun = exchanges();
        tape.record([&] { begun_backward = exchanges(); });
    });
    figure("calls of meanwhile()", calls, int64_t(1), "", "1");
    figure("exchanges that have begun when it is called", begun, int64_t(1), "", "1");
    *y.grad = rows_of(layer.expected);
    exchanges();
    tape.backward();
    figure("exchanges of gradients that have begun when its backward part runs", begun_backward, int64_t(1), "", "1");
}

TEST_CASE("lab: a training step on four ranks") {
    const Text text;
    TrainOptions o = tiny(text);
    o.dtype = o.grad_dtype = "fp64";
    o.steps = 1;
    o.model.experts = {.count = 8, .top_k = 2, .ffn = 16, .shared = 1};
    const auto one = run_on_one_rank(o);
    for (const Mesh& mesh : {Mesh{.dp = 4, .ep = 2}, Mesh{.tp = 2, .dp = 2, .ep = 4}}) {
        ParallelConfig config;
        config.mesh = mesh;
        config.tensor.sequence_parallel = mesh.tp > 1;
        TrainOptions its = o;
        its.micro_batch = o.global_batch / mesh.dp;
        ComposedRun run(its, world(), config);
        run.session.run();
        const Farthest deviation = deviation_on_rank_0(run.session, one);
        INFO(mesh.text(), ": ", deviation);
        EXPECT_EVERYWHERE(deviation <= 1e-10);
    }
}
