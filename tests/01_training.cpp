// Training as a whole: what one run owes another - the same loss to the last bit, or to the stated tolerance.
#include "01_single_gpu/complete/run/generate.h"
#include "tests/training.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("equal flags repeat a run to the last bit; another seed does not") {
    const Text text;
    TrainOptions options = tiny(text);
    Session first(options), second(options);
    EXPECT(first.run().history() == second.run().history());
    EXPECT(first.weights() == second.weights());
    EXPECT(std::abs(first.history()[0] - std::log(256.0)) < 0.5);  // as good as guessing
    options.seed = 2;
    Session other(options);
    other.run();
    for (size_t i = 0; i < first.history().size(); ++i) EXPECT(other.history()[i] != first.history()[i]);
}

TEST_CASE("a step's tokens are the stream's, whichever micro-batch and rank they fall to") {
    const Text text;
    TrainOptions options = tiny(text);
    options.micro_batch = 2;
    Session session(options);
    for (int64_t part = 0; part < 4; ++part) {
        session.trainer.groups.dp = std::make_shared<Coordinate>(part % 2, 2);
        REQUIRE(session.trainer.micro_batches(1) == 2);
        const Batch batch = session.trainer.micro_batch(3, part / 2);
        std::vector<int32_t> tokens, targets;
        for (int64_t i = 0; i < 2; ++i) {  // two steps of 8 samples came before
            const std::vector<int32_t> sample = session.data.sample(options.seed, 16 + 2 * part + i).tokens;
            tokens.insert(tokens.end(), sample.begin(), sample.end() - 1);
            targets.insert(targets.end(), sample.begin() + 1, sample.end());
        }
        EXPECT(std::equal(tokens.begin(), tokens.end(), batch.tokens.data<int32_t>()));
        EXPECT(std::equal(targets.begin(), targets.end(), batch.targets.data<int32_t>()));
        EXPECT(batch.loss_scale == 1.0 / 128);  // all target tokens of the global batch
    }
}

// Later chapters compare layouts with one rank. What is narrowed on all of them alike cancels there, and shows here.
TEST_CASE("fp64: four steps of the trainer are those of the loop and of AdamW written once more, to the last digits") {
    const Text text;
    TrainOptions options = tiny(text);
    options.dtype = "fp64";
    options.seq_len = 13;  // 1 / 104 is no number of float, nor are the rates and factors below
    options.micro_batch = 4;
    options.lr = 3e-3;
    options.clip = 0.3;
    options.eps = 1e-3;
    options.weight_decay = 0.3;
    Session trained(options), other(options);
    trained.run();

    const std::vector<Param*> params = other.model.params();
    std::vector<std::vector<double>> m(params.size()), v(params.size());
    for (int step = 1; step <= 4; ++step) {
        INFO("step " << step);
        other.model.zero_grads();
        double loss = 0;  // the mean over all tokens of -log softmax(logits)[target]
        for (int64_t i = 0; i < other.trainer.micro_batches(1); ++i) {
            const Batch batch = other.trainer.micro_batch(step, i);
            Tape silent{.recording = false}, tape;
            const std::vector<double> logits = values(other.model.logits(silent, batch).data);
            const int64_t V = options.model.vocab;
            for (int64_t row = 0; row < batch.targets.size(); ++row) {
                double sum = 0;
                for (int64_t c = 0; c < V; ++c) sum += std::exp(logits[row * V + c]);
                loss += (std::log(sum) - logits[row * V + batch.targets.data<int32_t>()[row]]) / 104;
            }
            other.model.forward(tape, batch);
            tape.backward();
        }
        double squares = 0;
        for (const Param* param : params) squares += dot(values(param->grad), values(param->grad));
        const double norm = std::sqrt(squares), clip = 0.3 / (norm + 1e-6);
        REQUIRE(clip < 1);
        const double lr = step <= 2 ? 3e-3 * step / 2 : options.schedule().at(step);
        EXPECT(std::abs(trained.reports[step - 1].loss / loss - 1) <= 1e-13);
        EXPECT(std::abs(trained.reports[step - 1].grad_norm / norm - 1) <= 1e-13);
        for (size_t p = 0; p < params.size(); ++p) {
            std::vector<double> w = values(params[p]->data);
            const std::vector<double> g = values(params[p]->grad);
            m[p].resize(w.size());
            v[p].resize(w.size());
            for (size_t i = 0; i < w.size(); ++i) {
                m[p][i] = 0.9 * m[p][i] + 0.1 * clip * g[i];
                v[p][i] = 0.95 * v[p][i] + 0.05 * std::pow(clip * g[i], 2);
                const double update =
                    m[p][i] / (1 - std::pow(0.9, step)) / (std::sqrt(v[p][i] / (1 - std::pow(0.95, step))) + 1e-3);
                w[i] -= lr * (update + (params[p]->is_matrix() ? 0.3 * w[i] : 0));
            }
            copy(params[p]->data, tensor(w, params[p]->data.shape(), DType::f64));
        }
    }
    EXPECT(distance(trained.weights(), other.weights()) <= 1e-13);
}

TEST_CASE("fp64 begins with fp32's weights and agrees with it to fp32's precision") {
    const Text text;
    TrainOptions options = tiny(text);
    Session narrow(options);
    options.dtype = "fp64";
    Session wide(options);
    EXPECT(wide.weights() == narrow.weights());
    narrow.run(), wide.run();
    EXPECT(worst_deviation(narrow, wide) <= 5e-6);
    EXPECT(worst_deviation(narrow, wide) > 1e-9);  // or one of them is not what it says
}

namespace {
// One step's forward and backward pass, without an update.
double loss_and_gradients(Session& session, int64_t step) {
    session.trainer.store->begin_step(session.trainer.micro_batches(1));
    const auto batch = [&](int64_t i) { return session.trainer.micro_batch(step, i); };
    return read(session.trainer.loop->forward_backward({session.trainer.micro_batches(1), batch}))[0];
}
}  // namespace

TEST_CASE("a step's gradients are its own: nothing is left of the step before") {
    const Text text;
    struct WithoutUpdate : LocalStore {  // so that step 2 sees the initial weights, as `alone` does
        using LocalStore::LocalStore;
        void update(int64_t, double, double) override {}
    };
    std::unique_ptr<WithoutUpdate> store;
    Session run(tiny(text), [&](Session& s) {
        store = std::make_unique<WithoutUpdate>(s.model, AdamW::maker(s.options.adamw()));
        s.trainer.store = store.get();
    });
    Session alone(tiny(text));
    run.run();
    EXPECT(run.reports[1].loss == loss_and_gradients(alone, 2));
    EXPECT(run.reports[1].grad_norm == alone.trainer.norm(Which::grad));
}

TEST_CASE("micro-batches of 8, 4 and 1 give the loss and gradient norm of the global batch of 8") {
    const Text text;
    TrainOptions options = tiny(text);
    Session whole(options);
    const std::vector<double> expected = whole.run().history();
    for (int64_t micro_batch : {4, 1}) {
        options.micro_batch = micro_batch;
        Session split(options);
        const std::vector<double> history = split.run().history();
        for (size_t i = 0; i < expected.size(); ++i) EXPECT(std::abs(history[i] / expected[i] - 1) <= 5e-6);
    }
}

TEST_CASE("recomputation changes no bit of losses, gradient norms and final weights") {
    const Text text;
    for (const char* dtype : {"fp32", "bf16", "fp64"}) {
        TrainOptions options = tiny(text);
        options.dtype = dtype;
        options.micro_batch = 4;
        Session kept(options);
        kept.run();
        for (const char* recompute : {"pointwise", "selective", "full"}) {
            INFO(dtype << " " << recompute);
            options.recompute = recompute;
            Session again(options);
            EXPECT(again.run().history() == kept.history());
            EXPECT(again.weights() == kept.weights());
            const int activations = static_cast<int>(Memory::activations);  // or nothing was recomputed at all
            EXPECT(again.reports[0].peak.kind[activations] < kept.reports[0].peak.kind[activations]);
            options.recompute_every = 2;  // the first of two blocks
            Session some(options);
            options.recompute_every = 1;
            EXPECT(some.run().history() == kept.history());
            EXPECT(some.weights() == kept.weights());
            EXPECT(some.reports[0].peak.kind[activations] < kept.reports[0].peak.kind[activations]);
            EXPECT(some.reports[0].peak.kind[activations] > again.reports[0].peak.kind[activations]);
        }
    }
}

TEST_CASE("--recompute-every counts the blocks of the whole model, whatever a stage has of them") {
    const Text text;
    TrainOptions options = tiny(text);
    options.model.layers = 7;
    options.recompute = "full";
    options.recompute_every = 3;
    const Llama stage(options.model, options.llama(), {{{2, 4}, {5, 7}}, false, false});
    std::vector<bool> recomputed;
    for (const Block& block : stage.blocks) recomputed.push_back(!block.unit.wrappers.empty());
    EXPECT(recomputed == std::vector<bool>{false, true, false, true});  // 2, 3, 5, 6
}

TEST_CASE("bf16 follows fp32 within 2% over 20 steps of learning, and is not fp32") {
    const Text text;
    TrainOptions options = tiny(text);
    options.steps = 20;
    Session wide(options);
    options.dtype = "bf16";
    Session narrow(options);
    wide.run();
    narrow.run();
    for (int step = 0; step < 20; ++step) {
        EXPECT(std::abs(narrow.reports[step].loss / wide.reports[step].loss - 1) <= 0.02);
        EXPECT(narrow.reports[step].loss != wide.reports[step].loss);
    }
    EXPECT(wide.reports[19].loss < 0.7 * wide.reports[0].loss);
}

TEST_CASE("clipping: the update of gradients scaled to the norm; the reported norm is the unclipped one") {
    const Text text;
    TrainOptions options = tiny(text);
    options.steps = 1;
    options.warmup_steps = 0;
    options.lr_schedule = "constant";
    options.lr = 0.1;
    options.weight_decay = 0;
    options.eps = 0.01;  // AdamW does not see the scale of its gradients unless eps is of their size
    options.clip = 0;
    Session by_hand(options), unclipped(options);
    const std::vector<double> start = by_hand.weights();
    const double loss = loss_and_gradients(by_hand, 1);
    const double norm = by_hand.trainer.norm(Which::grad);
    REQUIRE(norm > 0.1);
    for (Param* param : by_hand.model.params()) scale(param->grad, 1e-2 / norm);
    AdamW(full_segments(by_hand.model.params()), options.adamw()).update(1, 0.1, 1);
    unclipped.run();
    options.clip = 1e-2;
    Session clipped(options);
    clipped.run();
    EXPECT(clipped.reports[0].grad_norm == norm);
    EXPECT(unclipped.reports[0].grad_norm == norm);
    EXPECT(clipped.reports[0].loss == loss);
    const std::vector<double> expected = minus(by_hand.weights(), start);
    EXPECT(distance(minus(clipped.weights(), start), expected) <= 2e-4);  // of the update: weights are rounded to 1e-7
    EXPECT(distance(minus(unclipped.weights(), start), expected) > 1);
    options.clip = 2 * norm;  // not reached: nothing may change
    Session loose(options);
    EXPECT(loose.run().weights() == unclipped.weights());
}

TEST_CASE("the rule of --skip-step: 6 standard deviations above the mean of at most 128 updates, at least 64") {
    SkipStep rule;
    const auto spike = [&](double loss, double norm) { return rule.skips({.loss = loss, .grad_norm = norm}); };
    const auto step = [&](double loss, double norm, bool updated) {
        StepReport report{.loss = loss, .grad_norm = norm, .skipped = !updated};
        rule.end_step({}, report, updated);
    };
    for (int i = 0; i < 64; ++i) {
        EXPECT(!spike(1e9, 1e9));
        step(i % 2 ? 2.5 : 1.5, i % 2 ? 11 : 9, true);
    }
    const double deviation = std::sqrt(64 / 63.0);  // of 1s and -1s
    EXPECT(!spike(2 + 2.999 * deviation, 10 + 5.999 * deviation));
    EXPECT(spike(2 + 3.001 * deviation, 10));
    EXPECT(spike(2, 10 + 6.001 * deviation));
    EXPECT(!spike(-100, 0));  // a fall is none
    step(50, 50, false);      // changes nothing
    EXPECT(spike(2, 10 + 6.001 * deviation));
    SkipStep copy;
    copy.restore(rule.rows());
    EXPECT(copy.rows().values == rule.rows().values);
    EXPECT(copy.skips({.loss = 2, .grad_norm = 10 + 6.001 * deviation}));
    for (int i = 0; i < 128; ++i) step(1, 5 + i % 2, true);
    EXPECT(spike(1, 9));  // what was before is forgotten
    for (int i = 0; i < 127; ++i) step(1, 9, false);
    EXPECT_THROWS_AS(step(1, 9, false), CommonError);
}

TEST_CASE("a skipped step changes no bit of weights and optimizer states, and the next one is as ever") {
    const Text text;
    TrainOptions options = tiny(text);
    options.steps = 70;
    options.skip_step = true;
    Session session(options), plain(options);
    SpikeAt spike(session.trainer, 68);
    std::vector<std::vector<double>> states;
    session.on_step = [&](const StepReport& report) {
        EXPECT(report.skipped == (report.step == 68));
        std::vector<double>& all = states.emplace_back();
        session.trainer.store->for_each_state([&](const Segment&, const char*, Tensor& state) {
            const std::vector<double> part = read(state);
            all.insert(all.end(), part.begin(), part.end());
        });
    };
    session.run();
    EXPECT(states[67] == states[66]);
    EXPECT(states[68] != states[67]);
    plain.run();
    EXPECT(session.reports[67].loss == plain.reports[67].loss);
    EXPECT(session.reports[68].loss != plain.reports[68].loss);
}

TEST_CASE("what is not finite ends the run at its step, with the parameter's name and before any update") {
    const Text text;
    const auto failure = [](Session& session) -> std::string {
        try {
            session.run();
        } catch (const std::runtime_error& error) { return error.what(); }
        return "";
    };
    for (float poison : {NAN, INFINITY}) {
        struct Poisoned : LocalStore {
            using LocalStore::LocalStore;
            void finish_gradients() override {
                if (++steps == 3) model_.lm_head.grad.data<float>()[9] = poison;
            }
            int steps = 0;
            float poison = 0;
        };
        std::unique_ptr<Poisoned> store;
        Session weight(tiny(text)), gradient(tiny(text), [&](Session&s) {
            store = std::make_unique<Poisoned>(s.model, AdamW::maker(s.options.adamw()));
            store->poison = poison;
            s.trainer.store = store.get();
        });
        weight.model.blocks[1].feed_forward->up_proj.data.data<float>()[5] = poison;
        EXPECT(failure(weight).find("step 1: loss") == 0);
        EXPECT(failure(weight).find("parameter: model.layers.1.mlp.up_proj.weight (") != std::string::npos);
        EXPECT(read(weight.model.lm_head.data) == read(gradient.model.lm_head.data));  // no update was made

        const std::string line = failure(gradient);
        EXPECT(line.find("step 3: loss") == 0);
        EXPECT(line.find("parameter: lm_head.weight (its gradient) (try") != std::string::npos);
        EXPECT(gradient.reports.size() == 2);
    }
}

TEST_CASE("evaluate is the mean over the validation samples and leaves the model alone") {
    const Text text;
    TrainOptions options = tiny(text);
    Session session(options);
    const int64_t samples = session.data.validation_samples();
    REQUIRE(samples > options.micro_batch);
    REQUIRE(samples % options.micro_batch != 0);  // the last batch is a part of one
    const std::vector<double> before = session.weights();
    double sum = 0;
    for (int64_t i = 0; i < samples; ++i) {
        const std::vector<int32_t> sample = session.data.validation_sample(0, i).tokens;
        Batch batch{.sequences = 1, .seq_len = 16, .loss_scale = 1.0 / 16};
        batch.tokens = upload({sample.begin(), sample.end() - 1}, {16}, Device::cpu);
        batch.targets = upload({sample.begin() + 1, sample.end()}, {16}, Device::cpu);
        batch.positions = upload({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {16}, Device::cpu);
        Tape tape{.recording = false};
        sum += read(session.model.forward(tape, batch).data)[0];
    }
    EXPECT(std::abs(evaluate(session.trainer) / (sum / double(samples)) - 1) <= 1e-6);
    EXPECT(session.weights() == before);
    EXPECT(session.trainer.norm(Which::grad) == 0);
}

TEST_CASE("generate continues the prompt by the count asked for; equal for equal seeds") {
    const Text text;
    TrainOptions o = tiny(text);
    Session session(o);
    Trainer& trainer = session.trainer;
    const std::vector<int32_t> prompt = {116, 104, 101, 32};
    const auto tokens = generate(trainer, prompt, 40, 3);  // far beyond the context of 16
    REQUIRE(tokens.size() == 44);
    EXPECT(std::equal(prompt.begin(), prompt.end(), tokens.begin()));
    EXPECT(generate(trainer, prompt, 40, 3) == tokens);
    EXPECT(generate(trainer, prompt, 40, 4) != tokens);
    EXPECT(generate(trainer, prompt, 0, 3) == prompt);
    o.seq_len = 3;
    Session narrow(o);
    const auto last = generate(narrow.trainer, {prompt.begin() + 1, prompt.end()}, 9, 3);  // the context is 3 tokens:
    const auto all = generate(narrow.trainer, prompt, 9, 3);                               // the first one is not seen
    EXPECT(std::equal(last.begin(), last.end(), all.begin() + 1));
}

TEST_CASE("generate draws from softmax(logits / 0.8), of the prompt's last token, and of muP's scaled logits") {
    const Text text;
    TrainOptions o = tiny(text);
    o.model = {.name = "test", .layers = 1, .hidden = 8, .heads = 2, .kv_heads = 1, .ffn = 8, .vocab = 5};
    o.init_std = 1;
    std::ofstream(text.folder / "five.txt") << std::string(400, 1);
    o.data = text.folder / "five.txt";
    const std::vector<int32_t> prompt = {2, 0, 3};
    for (const bool mup : {false, true}) {
        if (mup) o.mup = 2;  // logits times 1/4
        Session session(o);
        Llama& model = session.model;
        Batch batch{.sequences = 1, .seq_len = 3};
        batch.tokens = upload(prompt, {3}, Device::cpu);
        batch.positions = upload({0, 1, 2}, {3}, Device::cpu);
        Tape tape{.recording = false};
        const std::vector<double> logits = values(model.logits(tape, batch).data.row_slice(2, 3));
        std::vector<double> p, seen(5);
        double sum = 0;
        for (const double logit : logits) {
            p.push_back(std::exp((mup ? 0.25 : 1) * logit / 0.8));
            sum += p.back();
        }
        constexpr int kDraws = 2000;
        for (int seed = 0; seed < kDraws; ++seed) ++seen[generate(session.trainer, prompt, 1, seed)[3]];
        for (int i = 0; i < 5; ++i)  // four standard deviations
            EXPECT(std::abs(seen[i] / kDraws - p[i] / sum) <= 4 * std::sqrt(p[i] / sum * (1 - p[i] / sum) / kDraws));
    }
}
