// Every layout of tensor parallelism against one rank: losses, norms, gathered gradients; what is copied stays the same
// bit for bit; what each rank keeps, to the byte; what it sends.
#include "02_data_parallel/data_parallel.h"
#include "03_zero/zero.h"
#include "04_tensor_parallel/flags.h"
#include "04_tensor_parallel/overlap.h"
#include "04_tensor_parallel/report.h"
#include "04_tensor_parallel/vocabulary.h"
#include "tests/ranks.h"
#include "tests/training.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// Heads and ffn of 8 divide by 8, the vocabulary of 131 by nothing; two key/value heads on 4 and 8 ranks are copied.
TrainOptions shape(const Text& text, int64_t kv_heads) {
    TrainOptions o = tiny(text);
    o.model = {.name = "test", .layers = 2, .hidden = 64, .heads = 8, .kv_heads = kv_heads, .ffn = 88, .vocab = 131};
    o.seq_len = 24;
    o.lr = o.min_lr = 1e-3;
    return o;
}

struct Layout {
    int64_t tp = 1;
    TensorParallelOptions options;
    int64_t micro_batches = 1;

    std::string text() const {
        return fmt::format("tp {}, sequence {}, overlap {}, m {}", tp, options.sequence_parallel, options.overlap,
                           micro_batches);
    }
};

// All ranks of `all`, tp to a copy of the model.
struct Divided {
    Comm tensor, data;
    std::unique_ptr<TensorParallel> tensor_parallel;
    std::unique_ptr<DataParallel> data_parallel;
    StepStats stats;
    Session session;

    Divided(const TrainOptions& o, const Comm& all, const Layout& layout)
        : tensor(all.split([tp = layout.tp](int rank) { return int(rank / tp); }, "tp")),
          data(all.split([tp = layout.tp](int rank) { return int(rank % tp); }, "dp")),
          stats(tensor),
          session(with_micro_batch(o, all.size() / layout.tp, layout.micro_batches), [&](Session& s) {
              tensor_parallel = std::make_unique<TensorParallel>(s.model, tensor, layout.options);
              data_parallel =
                  std::make_unique<DataParallel>(s.model, data, DataParallelOptions{}, AdamW::maker(s.options.adamw()));
              use_store(s.trainer, *data_parallel, data);
              s.trainer.groups.tp = group_of(tensor);
              s.trainer.runtime = &stats;
          }) {}
    static TrainOptions with_micro_batch(TrainOptions o, int64_t data_ranks, int64_t accumulation) {
        o.micro_batch = o.global_batch / data_ranks / accumulation;
        return o;
    }
};

std::vector<Layout> layouts() {
    std::vector<Layout> list;
    for (const int64_t tp : {2, 4, 8})
        for (const bool sequence : {false, true})
            for (const bool overlap : {false, true}) list.push_back({tp, {sequence, overlap}});
    return list;
}

bool on_rank_0(bool good) { return world().rank() > 0 || good; }

}  // namespace

TEST_CASE("tp 2, 4, 8, sequence parallel or not, overlapped or not, with data parallelism: one rank's run") {
    const Text text;
    REQUIRE(world().size() == 8);
    int64_t pair = 0;
    for (const Parity& parity : kParity)
        for (const int64_t kv_heads : {8, 2, 1})
            for (const char* recompute : {"none", "pointwise", "selective", "full"}) {
                if (!kThorough && (kv_heads == 2) != (recompute == std::string("none"))) continue;
                TrainOptions o = shape(text, kv_heads);
                o.dtype = parity.dtype;
                o.recompute = recompute;
                // Every layout with this pair; of the other pairs an eighth on each commit.
                const bool in_full = kv_heads == 2 && recompute == std::string("none");
                std::unique_ptr<Session> one;
                int64_t number = 0;
                for (Layout layout : layouts())
                    for (const int64_t m : {1, 2}) {
                        layout.micro_batches = m;
                        if (m > 1 && !in_full) continue;
                        if (parity.skips(number++)) continue;
                        if (!in_full && !in_slice(pair++)) continue;
                        if (!one) {
                            one = std::make_unique<Session>(o);
                            one->run();
                        }
                        Divided run(o, world(), layout);
                        run.session.run();
                        const Farthest deviation =
                            world().rank() == 0 ? worst_deviation(run.session, *one) : Farthest();
                        INFO(o.dtype, ", ", layout.text(), ", kv heads ", kv_heads, ", recompute ",
                             std::string(recompute), ": ", deviation);
                        EXPECT_EVERYWHERE(on_rank_0(deviation <= parity.bound));
                    }
            }
}

TEST_CASE("with ZeRO in the place of data parallelism, every stage, parameters copied or not: one rank's run") {
    const Text text;
    for (const Parity& parity : kParity)
        for (const int64_t kv_heads : {2, 1}) {
            TrainOptions o = shape(text, kv_heads);
            o.dtype = parity.dtype;
            int64_t number = 0;
            Session one(o);
            one.run();
            o.micro_batch = o.global_batch / 2;
            const Comm tensor = world().split([](int rank) { return rank / 4; }, "tp");
            const Comm data = world().split([](int rank) { return rank % 4; }, "dp");
            for (const bool sequence : {false, true})
                for (const ZeroOptions& options : std::vector<ZeroOptions>{{.stage = 0},
                                                                           {.stage = 1},
                                                                           {.stage = 2},
                                                                           {.stage = 3},
                                                                           {.stage = 3, .offload = Offload::optimizer},
                                                                           {.stage = 3, .offload = Offload::all}}) {
                    if (parity.skips(number++)) continue;
                    std::unique_ptr<TensorParallel> tensor_parallel;
                    std::unique_ptr<Zero> zero;
                    Session session(o, [&](Session& s) {
                        tensor_parallel =
                            std::make_unique<TensorParallel>(s.model, tensor, TensorParallelOptions{sequence, false});
                        zero = std::make_unique<Zero>(s.model, data, options, AdamW::maker(s.options.adamw()));
                        use_store(s.trainer, *zero, data);
                        s.trainer.groups.tp = group_of(tensor);
                    });
                    session.run();
                    const Farthest deviation = world().rank() == 0 ? worst_deviation(session, one) : Farthest();
                    INFO(o.dtype, ", kv heads ", kv_heads, ", sequence ", sequence, ", stage ", options.stage,
                         ", offload ", int(options.offload), ": ", deviation);
                    EXPECT_EVERYWHERE(deviation <= parity.bound);
                }
        }
}

TEST_CASE("bf16: one rank's run up to its rounding, and no farther from it than a rounding of other sums is") {
    const Text text;
    for (const char* recompute : {"none", "full"}) {
        TrainOptions o = shape(text, 2);
        o.dtype = "bf16";
        o.recompute = recompute;
        Session one(o);
        one.run();
        for (const Layout& layout : layouts()) {
            Divided run(o, world(), layout);
            run.session.run();
            double worst = 0;  // of a gradient at step 1, of a loss
            if (world().rank() == 0) {
                for (size_t i = 0; i < one.gradients.size(); ++i)
                    worst = std::max(worst, distance(run.session.gradients[i], one.gradients[i]));
                for (size_t i = 0; i < one.reports.size(); ++i)
                    worst = std::max(worst, std::abs(run.session.reports[i].loss / one.reports[i].loss - 1));
            }
            INFO(layout.text(), ", recompute ", std::string(recompute), ": ", worst);
            EXPECT_EVERYWHERE(worst <= 0.03);
        }
    }
}

TEST_CASE("what several ranks hold stays the same on all of them, bit for bit: norm weights, copied key/value heads") {
    const Text text;
    for (const char* dtype : {"fp32", "bf16"})
        for (const std::string algorithm : {"ring", "halving", "library"})
            for (const Layout& layout : layouts()) {
                if (algorithm != "ring" && layout.options.overlap) continue;
                if (!kThorough && algorithm != "library") continue;
                TrainOptions o = shape(text, 2);
                o.dtype = dtype;
                o.lr = o.min_lr = 1e-2;
                const std::string before = world().use(algorithm);
                Divided run(o, world(), layout);
                std::vector<std::vector<double>> start;
                for (const Param* param : run.session.model.params()) start.push_back(read(param->data));
                run.session.run();
                world().use(before);
                const std::vector<Param*> params = run.session.model.params();
                bool same = true, moved = true;
                int copied = 0;
                for (size_t i = 0; i < params.size(); ++i) {
                    const std::vector<double> values = read(params[i]->data);
                    if (dtype == std::string("fp32")) moved = moved && values != start[i];
                    // All data-parallel copies, and the ranks with the same rectangle, in one comparison: by its place.
                    std::vector<double> mine(values.begin(), values.end());
                    mine.push_back(double(params[i]->local.row_begin * 1000 + params[i]->local.col_begin));
                    const std::vector<double> all = world().gather(mine);
                    for (int r = 0; r < world().size(); ++r) {
                        const auto other = all.begin() + r * int64_t(mine.size());
                        if (*(other + int64_t(mine.size()) - 1) != mine.back()) continue;
                        ++copied;
                        same = same && std::equal(mine.begin(), mine.end(), other);
                    }
                }
                INFO(layout.text(), ", ", std::string(dtype), ", all-reduce ", algorithm);
                EXPECT_EVERYWHERE(same);
                EXPECT_EVERYWHERE(moved);
                EXPECT_EVERYWHERE(copied > int(params.size()));
            }
}

TEST_CASE(
    "the ledger: what is divided is divided exactly; activations by the formula, with sequence parallelism by tp") {
    const Text text;
    for (const char* dtype : {"fp32", "bf16", "fp64"})
        for (const char* recompute : {"none", "pointwise", "selective", "full"})
            for (const int64_t kv_heads : {8, 2}) {
                if (dtype == std::string("fp64") && (kv_heads == 8) != (recompute == std::string("none"))) continue;
                if (!kThorough && (kv_heads == 8) != (recompute == std::string("none"))) continue;
                TrainOptions o = shape(text, kv_heads);
                o.dtype = dtype;
                o.recompute = recompute;
                o.seq_len = 64;
                o.model.vocab = 136;
                const Dataset data(o.data, o.model.vocab, o.seq_len, o.val_fraction);
                const int64_t wide = o.dtype == "bf16" ? 2 : o.dtype == "fp64" ? 8 : 4;
                const int64_t grads = o.dtype == "fp64" ? 8 : 4;
                const int64_t states = o.dtype == "bf16" ? 12 : o.dtype == "fp64" ? 16 : 8;
                const int64_t all = run_tensor_parallel(o, data, world(), 1, {}).peak.kind[int(Memory::activations)];
                for (const Layout& layout : layouts()) {
                    const TensorParallelRun run = run_tensor_parallel(o, data, world(), layout.tp, layout.options);
                    const auto& kinds = run.peak.kind;
                    // Norm weights are whole on every rank, key/value heads at least one; the rest is divided.
                    const int64_t kv = 2 * 2 * 64 * o.model.kv_width(), norms = 5 * 64;
                    const int64_t elements =
                        (o.model.parameters() - norms - kv) / layout.tp + norms + kv / std::min(layout.tp, kv_heads);
                    INFO(layout.text(), " ", std::string(dtype), " recompute ", std::string(recompute), " kv heads ",
                         kv_heads, ": ", kinds[int(Memory::activations)], " against ", run.activations.total,
                         ", whole ", all);
                    EXPECT_EVERYWHERE(run.elements == elements);
                    EXPECT_EVERYWHERE(kinds[int(Memory::params)] == wide * elements);
                    EXPECT_EVERYWHERE(kinds[int(Memory::grads)] == grads * elements);
                    EXPECT_EVERYWHERE(kinds[int(Memory::optimizer)] == states * elements);
                    const double activations = double(kinds[int(Memory::activations)]);
                    // 4%: in a model of two layers the head counts, whose input goes before its gradient comes
                    EXPECT_EVERYWHERE(std::abs(activations / double(run.activations.total) - 1) <= 0.04);
                    if (layout.options.sequence_parallel && kv_heads == 8)
                        EXPECT_EVERYWHERE(std::abs(activations * double(layout.tp) / double(all) - 1) <= 0.05);
                }
            }
}

TEST_CASE("wire: the collectives of a block and of a step are the formula's, in number and in bytes") {
    const Text text;
    for (const char* dtype : {"fp32", "bf16", "fp64"})
        for (const char* recompute : {"none", "pointwise", "selective", "full"})
            for (const int64_t kv_heads : {8, 2}) {
                if (dtype == std::string("fp64") && (kv_heads == 8) != (recompute == std::string("none"))) continue;
                if (!kThorough && (kv_heads == 8) != (recompute == std::string("none"))) continue;
                TrainOptions o = shape(text, kv_heads);
                o.dtype = dtype;
                o.recompute = recompute;
                const Dataset data(o.data, o.model.vocab, o.seq_len, o.val_fraction);
                for (const Layout& layout : layouts()) {
                    const TensorParallelRun run = run_tensor_parallel(o, data, world(), layout.tp, layout.options);
                    INFO(layout.text(), " ", std::string(dtype), " recompute ", std::string(recompute), " kv heads ",
                         kv_heads, ": ", run.layer.text(), " in a block, ", run.step.bytes(), " against ",
                         run.step_formula.bytes());
                    EXPECT_EVERYWHERE(run.layer.operations == run.layer_formula.operations);
                    EXPECT_EVERYWHERE(run.step.operations == run.step_formula.operations);
                    if (recompute != std::string("none") || dtype != std::string("fp32")) continue;
                    // The formulas, once more by hand: n bytes of one tensor of activations.
                    const int64_t n = o.micro_batch * o.seq_len * 64 * 4, share = n * (layout.tp - 1) / layout.tp;
                    EXPECT(run.layer.bytes() == (layout.options.sequence_parallel ? 10 : 8) * share);
                    if (!layout.options.overlap)
                        EXPECT(run.layer.calls() == (layout.options.sequence_parallel ? 10 : 4));
                }
            }
    // and with accumulation and data parallelism, by the trainer's own books
    for (Layout layout : layouts()) {
        layout.micro_batches = 2;
        TrainOptions o = shape(text, 2);
        o.steps = 2;
        Divided run(o, world(), layout);
        run.session.run();
        const LlamaConfig& c = o.model;
        const TrafficShape each{run.session.options.micro_batch * o.seq_len, layout.tp, DType::f32, DType::f32,
                                layout.options};
        Traffic tensor_only;
        CommStats sent{.operations = run.stats.sent};
        std::erase_if(sent.operations, [](const auto& entry) { return entry.first.starts_with("dp."); });
        tensor_only.add(sent);
        INFO(layout.text());
        EXPECT_EVERYWHERE(tensor_only.operations == step_traffic(c, each, 2).operations);
        const int64_t copies = 8 / layout.tp, gradients = 4 * tensor_parallel_elements(c, layout.tp);
        if (copies > 1)
            EXPECT_EVERYWHERE(run.stats.sent["dp.all_reduce"].bytes == 2 * gradients * (copies - 1) / copies);
    }
}

TEST_CASE("f and g are each other's gradient: <y, f(x)> summed over ranks is <f*(y), x>, and the same for g") {
    on_first_ranks(4, [](const Comm& ranks) {
        const int64_t N = ranks.size(), R = 8, E = 6, r = ranks.rank();
        const auto whole = [&](uint64_t key) { return tensor(randoms(R * E, key), {R, E}); };
        const auto rows = [&](uint64_t key) {  // this rank's of a whole that all know
            const Tensor x = whole(key).row_slice(r * R / N, (r + 1) * R / N);
            Tensor own({R / N, E}, DType::f32, Device::cpu);
            copy(own, x);
            return own;
        };
        const auto sum = [&](double x) { return ranks.sum(x); };
        const auto product = [](const Tensor& a, const Tensor& b) { return dot(values(a), values(b)); };
        // input, output gradient -> output and input gradient
        const auto run = [](const auto& op, const Tensor& x, const Tensor& dy) {
            Tape tape;
            const Var in{.data = x};
            Var out = op(tape, in);
            const Tensor y = out.data;
            *out.grad = dy;
            tape.backward();
            return std::pair(y, *in.grad);
        };
        // The same x on every rank counts once; everything else is a part of what the ranks hold together.
        const auto close = [](double a, double b) { return std::abs(a - b) <= 1e-5 * (1 + std::abs(b)); };
        bool good = true;
        {
            const auto [y, dx] =
                run([&](Tape& t, const Var& x) { return copy_to_ranks(t, x, ranks); }, whole(1), whole(10 + r));
            good = good && close(sum(product(y, whole(10 + r))), product(dx, whole(1)));
        }
        {
            Tensor x = whole(20 + r);
            const auto [y, dx] =
                run([&](Tape& t, const Var& v) { return reduce_from_ranks(t, v, ranks); }, x, whole(2));
            good = good && close(product(y, whole(2)), sum(product(dx, whole(20 + r))));
            good = good && values(x) == values(whole(20 + r));  // x is held here: the sum may not overwrite it
        }
        {
            const auto [y, dx] =
                run([&](Tape& t, const Var& x) { return gather_sequence(t, x, ranks); }, rows(3), whole(30 + r));
            good = good && values(y) == values(whole(3));
            good = good && close(sum(product(y, whole(30 + r))), sum(product(dx, rows(3))));
        }
        {
            const auto [y, dx] = run([&](Tape& t, const Var& x) { return reduce_scatter_sequence(t, x, ranks); },
                                     whole(40 + r), rows(4));
            good = good && values(dx) == values(whole(4));
            good = good && close(sum(product(y, rows(4))), sum(product(dx, whole(40 + r))));
        }
        if (!good) fmt::print(stderr, "rank {}: f or g\n", r);
        const double bad = ranks.sum(good ? 0 : 1);
        EXPECT(bad == 0);
    });
}

TEST_CASE("products in chunks give what products behind collectives give, on any number of ranks") {
    for (const int n : {1, 2, 3, 5, 8})
        on_first_ranks(n, [](const Comm& ranks) {
            const int64_t N = ranks.size(), r = ranks.rank(), each = 3, in = 10, out = 7;
            const Tensor part = tensor(randoms(each * in, 10 + r), {each, in});
            const Tensor weight = tensor(randoms(out * in, 50 + r), {out, in});
            Tensor gathered;
            const Tensor y = all_gather_matmul(ranks, part, weight, Transpose::b, gathered);
            const Tensor rows = gather_rows(ranks, part);
            bool good = values(gathered) == values(rows);
            good = good && distance(y, values(matmul(rows, weight, Transpose::b))) <= 1e-6;
            const Tensor x = tensor(randoms(N * each * in, 90 + r), {N * each, in});
            Tensor sum({each, out}, DType::f32, Device::cpu);
            ranks.reduce_scatter(sum, matmul(x, weight, Transpose::b)).wait();
            good = good && distance(matmul_reduce_scatter(ranks, x, weight), values(sum)) <= 1e-6;
            EXPECT(ranks.sum(good ? 0 : 1) == 0);
        });
}

TEST_CASE("the loss of a divided vocabulary: logits far below and far above the padding's, targets on every rank") {
    for (const int n : {2, 4, 8})
        for (const int64_t V : {64, 61, 9, 5})  // 9 and 5 on 8 ranks: some hold nothing but padding
            on_first_ranks(n, [&](const Comm& ranks) {
                const int64_t R = 24, N = ranks.size(), each = (V + N - 1) / N, first = each * ranks.rank();
                std::vector<int32_t> ids;
                for (int64_t i = 0; i < R; ++i) ids.push_back(int32_t(random_bits(3, i) % V));
                Batch batch{.targets = upload(ids, {R}, Device::cpu), .loss_scale = 0.125};
                bool good = true;
                for (const double level : {-80.0, 0.0, 80.0}) {
                    std::vector<double> logits = randoms(R * V, 4), mine;
                    for (double& x : logits) x = level + 4 * x;
                    for (int64_t row = 0; row < R; ++row)
                        for (int64_t v = first; v < first + each; ++v) mine.push_back(v < V ? logits[row * V + v] : 0);
                    Tape whole_tape, tape;
                    Var whole{.data = tensor(logits, {R, V})}, part{.data = tensor(mine, {R, each})};
                    const Var expected = next_token_loss(whole_tape, whole, batch);
                    const Var loss = vocabulary_parallel_loss(tape, part, batch, ranks, first, V);
                    const double highest = ranks.max(read(loss.data)[0]);
                    good = good && highest == read(loss.data)[0];
                    good = good && std::abs(highest / read(expected.data)[0] - 1) <= 1e-6;
                    whole_tape.backward();
                    tape.backward();
                    const std::vector<double> all = values(*whole.grad), got = values(*part.grad);
                    std::vector<double> wanted;
                    for (int64_t row = 0; row < R; ++row)
                        for (int64_t v = first; v < first + each; ++v) wanted.push_back(v < V ? all[row * V + v] : 0);
                    for (size_t i = 0; i < got.size(); ++i) {
                        // lse near 80 is known to 4e-6 only, and the gradient is at most 0.125
                        good = good && std::abs(got[i] - wanted[i]) <= 2e-6;
                        if (wanted[i] == 0) good = good && got[i] == 0;
                    }
                }
                EXPECT(ranks.sum(good ? 0 : 1) == 0);
            });
}

TEST_CASE("what does not divide is refused with a line that says what would") {
    const Text text;
    TrainOptions o = shape(text, 2);
    EXPECT_USAGE_ERROR(check_tensor_parallel(o.model, 24, 3, {}),
                       "--tp 3: --heads 8 does not divide by it; --tp 1, 2, 4 or 8");
    o.model.ffn = 90;
    EXPECT_USAGE_ERROR(check_tensor_parallel(o.model, 24, 4, {}),
                       "--tp 4: --ffn 90 does not divide by it; --tp 1 or 2 would");
    o.model.ffn = 96, o.model.heads = 12, o.model.kv_heads = 6, o.model.hidden = 96;
    EXPECT_USAGE_ERROR(check_tensor_parallel(o.model, 24, 4, {}), "--kv-heads 6");
    check_tensor_parallel(o.model, 25, 6, {});
    EXPECT_USAGE_ERROR(check_tensor_parallel(o.model, 25, 6, {.sequence_parallel = true}),
                       "--seq-len 25 does not divide by --tp 6; 30 would");
}

TEST_CASE("evaluates as one rank does; the weights put together are one rank's") {
    const Text text;
    TrainOptions o = shape(text, 2);
    o.val_fraction = 0.3;
    o.micro_batch = 3;  // the last round of the validation part has fewer sequences
    o.global_batch = 24;
    Session one(o);
    one.run();
    const double loss = one.trainer.evaluate();
    for (Layout layout : layouts()) {
        layout.micro_batches = layout.tp;
        Divided run(o, world(), layout);
        run.session.run();
        INFO(layout.text());
        EXPECT_EVERYWHERE(std::abs(run.session.trainer.evaluate() / loss - 1) <= 5e-6);
        // The gathered weights are one rank's, up to what four steps of AdamW make of the last bits.
        std::vector<double> whole;
        for (Param* param : run.session.model.params()) {
            const Tensor x = run.session.trainer.full(*param, Which::data);
            EXPECT_EVERYWHERE(on_rank_0(x.shape() == param->global_shape));
            if (world().rank() > 0) continue;
            const std::vector<double> part = read(x);
            whole.insert(whole.end(), part.begin(), part.end());
        }
        const double off = world().rank() > 0 ? 0 : distance(whole, one.weights());
        EXPECT_EVERYWHERE(off <= 1e-4);
    }
}

TEST_CASE("a fake world of 64: one rank of tp 8 x dp 8, finite losses, its share of the memory") {
    const Text text;
    TrainOptions o = shape(text, 2);
    o.global_batch = 64;
    o.steps = 2;
    const Comm fake = make_comm(make_fake_backend(15, 64), {});  // its tokens are in no text
    for (const bool sequence : {false, true})
        for (const bool overlap : {false, true}) {
            Divided run(o, fake, {8, {sequence, overlap}});
            run.session.run();
            for (const double x : run.session.history()) EXPECT((std::isfinite(x) && x > 0.01));
            EXPECT(run.tensor.rank() == 7);
            const MemoryBytes memory = run.session.reports.back().memory;
            EXPECT(memory[int(Memory::params)] == 4 * tensor_parallel_elements(o.model, 8));
        }
}
