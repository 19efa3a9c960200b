// The whole model against a Llama written once more, in double and loop by loop: every parameter's gradient by finite
// differences, and four steps of clipped AdamW. The reference shares nothing with the model but its weights.
#include "tests/reference_model.h"

using namespace train70b;
using namespace train70b::test;
using Doubles = std::vector<double>;

// On each commit one of the first two families goes through two steps, with all elements of the gradients.
TEST_CASE("every parameter's gradient, the loss and the norm of four AdamW steps, in fp32 and fp64, against double") {
    int64_t number = 0;
    for (auto [family, config] : families()) {
        const bool whole = number < 2 ? in_half(number) : all_slices();
        ++number;
        INFO(std::string(family));
        config.norm_eps = 0.01;  // of a size that its last bits can be seen
        const Tokens data;
        const AdamW::Hyper hyper{.eps = 1e-3, .weight_decay = 0.1};
        const double lr = 0.01, clip = 0.3;
        struct Run {
            double gradient, bound;  // the first: for what is held to finite differences
            std::unique_ptr<Llama> model;
            std::unique_ptr<AdamW> adamw;
        };
        std::vector<Run> runs;
        for (const auto& [dtype, gradient, bound] : {std::tuple(DType::f32, 5e-6, 5e-6), {DType::f64, 1e-10, 1e-11}}) {
            // Initial values large enough for attention to be far from uniform; the same for both.
            auto model =
                std::make_unique<Llama>(config, Llama::Options{.dtype = dtype, .grad_dtype = dtype, .init_std = 0.3});
            model->materialize(3);
            draw_vectors(*model);
            auto adamw = std::make_unique<AdamW>(full_segments(model->params()), hyper);
            runs.push_back({gradient, bound, std::move(model), std::move(adamw)});
        }

        Weights w = weights_of(*runs[1].model), m, v;
        const bool one_step =
            config.qkv_bias || config.head_size > 0 || config.latent.kv_rank > 0 || !kThorough || !whole;
        for (int step = 1; step <= (one_step ? 1 : all_slices() ? 4 : 2); ++step) {
            INFO("step " << step);
            const double expected_loss = reference_loss(config, w, data);
            const Weights expected = reference_gradient(config, w, data, whole);
            double squares_expected = 0;
            for (const auto& [name, gradient] : expected) squares_expected += dot(gradient, gradient);
            const double expected_norm = std::sqrt(squares_expected);
            EXPECT((!whole || expected_norm > clip));  // or clipping is not tested
            for (Run& run : runs) {
                INFO(std::string(name_of(run.model->options.dtype)));
                const double loss = run_model(*run.model, data);
                double squares = 0;
                for (Param* param : run.model->params()) {
                    const Doubles got = values(param->grad);
                    squares += dot(got, got);
                    if (step > 1) continue;  // later steps' gradients drift by AdamW's own amplification
                    INFO(param->name);
                    const double inexact =
                        family == std::string("llama") ? 1 : 4;  // finite differences are, by the shape
                    EXPECT(distance(chosen(got, whole), expected.at(param->name)) <= inexact * run.gradient);
                }
                const double norm = std::sqrt(squares);
                EXPECT(std::abs(loss / expected_loss - 1) <= run.bound);
                if (!whole) continue;
                EXPECT(std::abs(norm / expected_norm - 1) <= run.bound);
                run.adamw->update(step, lr, clip / norm);
            }
            if (one_step) break;
            for (auto& [name, weight] : w) {
                const double decay =
                    name.find("norm") == name.npos && !name.ends_with("bias") && !name.ends_with("sinks") ? 0.1 : 0;
                m[name].resize(weight.size());
                v[name].resize(weight.size());
                for (size_t i = 0; i < weight.size(); ++i) {
                    const double g = expected.at(name)[i] * clip / expected_norm;
                    m[name][i] = 0.9 * m[name][i] + 0.1 * g;
                    v[name][i] = 0.95 * v[name][i] + 0.05 * g * g;
                    const double update = m[name][i] / (1 - std::pow(0.9, step)) /
                                          (std::sqrt(v[name][i] / (1 - std::pow(0.95, step))) + hyper.eps);
                    weight[i] -= lr * (update + decay * weight[i]);
                }
            }
        }
    }
}

TEST_CASE("scattered positions: a permuted batch with its positions has the same rows of hidden states") {
    // Without attention between tokens nothing but RoPE looks at positions: one token alone, at any place, and the
    // place matters.
    Llama model(make_config(), {.init_std = 0.3});
    model.materialize(3);
    const auto logits = [&](std::vector<int32_t> positions) {
        Batch batch{.sequences = 1, .seq_len = 2};
        batch.tokens = upload({4, 9}, {2}, Device::cpu);
        batch.positions = upload(positions, {2}, Device::cpu);
        Tape tape{.recording = false};
        return values(model.logits(tape, batch).data);
    };
    EXPECT(distance(logits({0, 1}), logits({5, 6})) <= 1e-6);  // RoPE is relative
    EXPECT(distance(logits({0, 1}), logits({0, 3})) > 1e-4);
}

TEST_CASE("recomputation changes no bit of any gradient, in fp32, bf16 and fp64") {
    const Tokens data;
    for (const auto& [family, config] : families())
        for (DType dtype : {DType::f32, DType::bf16, DType::f64}) {
            INFO(std::string(family));
            std::vector<Doubles> grads[4];
            double loss[4];
            for (Recompute level : {Recompute::none, Recompute::pointwise, Recompute::selective, Recompute::full}) {
                Llama model(config,
                            {.dtype = dtype, .grad_dtype = stats_dtype(dtype), .recompute = level, .init_std = 0.3});
                model.materialize(3);
                draw_vectors(model);
                loss[int(level)] = run_model(model, data);
                for (Param* param : model.params()) grads[int(level)].push_back(values(param->grad));
            }
            for (const Recompute level : {Recompute::pointwise, Recompute::selective, Recompute::full}) {
                EXPECT(loss[0] == loss[int(level)]);
                EXPECT(grads[0] == grads[int(level)]);
            }
        }
}

TEST_CASE("the loss by chunks of rows: loss, z-loss and all gradients as of all rows at once; in evaluation none") {
    for (const bool tied : {false, true}) {
        LlamaConfig config = families()[0].config;
        config.tied = tied;
        const Tokens data;
        std::vector<double> whole;
        for (const int64_t chunk : {0, 1, 3, 100}) {
            INFO("tied " << tied << ", chunks of " << chunk);
            Llama model(config, {.dtype = DType::f64, .grad_dtype = DType::f64, .z_loss = 0.1, .loss_chunk = chunk});
            model.materialize(3);
            Tape silent{.recording = false};
            std::vector<double> got = read(model.forward(silent, data.batch()).data);
            for (const Param* param : model.params()) EXPECT(total_squares({param->grad}) == 0);
            Tape tape;
            for (const double loss : read(model.forward(tape, data.batch()).data)) got.push_back(loss);
            tape.backward();
            for (const Param* param : model.params()) std::ranges::copy(values(param->grad), std::back_inserter(got));
            if (chunk == 0) whole = got;
            EXPECT(distance(got, whole) <= 1e-13);
        }
    }
}

TEST_CASE("what is made again: pointwise runs attention once a block, selective and full twice; products only full") {
    const Tokens data;
    const auto calls = [&](Recompute level) {
        Llama model(make_config(), {.recompute = level});
        model.materialize(3);
        const Profile kept = std::exchange(profile(), Profile{.sums_on = true});
        run_model(model, data);
        const Profile counted = std::exchange(profile(), kept);
        std::map<std::string, int64_t> calls;
        for (const auto& [op, sum] : counted.sums) calls[op] = sum.calls;
        return calls;
    };
    const int64_t L = make_config().layers;
    auto none = calls(Recompute::none), pointwise = calls(Recompute::pointwise);
    auto selective = calls(Recompute::selective), full = calls(Recompute::full);
    EXPECT(none["attention"] == L);
    EXPECT(pointwise["attention"] == L);
    EXPECT(selective["attention"] == 2 * L);
    EXPECT(full["attention"] == 2 * L);
    EXPECT(none["matmul"] > 0);
    EXPECT(pointwise["matmul"] == none["matmul"]);
    EXPECT(selective["matmul"] == none["matmul"]);
    EXPECT(full["matmul"] == none["matmul"] + 4 * L);  // qkv, o, gate_up, down
    for (const char* op : {"split_rope", "swiglu"}) {
        EXPECT(none[op] == L);
        EXPECT(pointwise[op] == 2 * L);
        EXPECT(selective[op] == 2 * L);
    }
}

TEST_CASE("two stages, one after the other, are the whole model") {
    const LlamaConfig config = make_config();
    const Tokens data;
    Llama whole(config, {.init_std = 0.3}), first(config, {.init_std = 0.3}, {{{0, 1}}, true, false}),
        second(config, {.init_std = 0.3}, {{{1, 2}}, false, true});
    for (Llama* model : {&whole, &first, &second}) model->materialize(3);
    const double loss = run_model(whole, data);
    for (Llama* model : {&first, &second})
        for (Param* param : model->params()) fill(param->grad, 0);
    Tape tape1, tape2;
    const Batch batch = data.batch();
    const Var sent = first.forward(tape1, batch);
    const Var received{.data = sent.data};
    const Var result = second.forward(tape2, batch, received);
    EXPECT(read(result.data)[0] == loss);
    tape2.backward();
    *sent.grad = *received.grad;
    tape1.backward();
    std::map<std::string, Doubles> got;
    for (Llama* model : {&first, &second})
        for (Param* param : model->params()) got[param->name] = values(param->grad);
    for (Param* param : whole.params()) EXPECT(got.at(param->name) == values(param->grad));
    EXPECT(got.size() == whole.params().size());
}

TEST_CASE("tensor-parallel operators and wrappers are called at their places in a step") {
    Llama model(make_config(), {.init_std = 0.3});
    model.materialize(3);
    std::string order;
    struct Marks : TensorParallelOps {
        Marks(std::string& list, const Block& block) : order(list) {
            name = {{&block.qkv, 'a'},
                    {&block.o, 'b'},
                    {&block.feed_forward->gate_up, 'c'},
                    {&block.feed_forward->down, 'd'}};
        }
        Var f(Tape&, const Var& x, const Linear& linear) const override { return mark(linear), x; }
        Var g(Tape&, const Var& y, const Linear& linear) const override { return mark(linear), y; }
        void mark(const Linear& linear) const {
            if (name.contains(&linear)) order += name.at(&linear);  // the first block's
        }
        std::string& order;
        std::map<const Linear*, char> name;
    };
    const Marks marks(order, model.blocks[0]);
    model.tensor_parallel = &marks;
    for (Unit* unit : model.units())
        for (char level : {'(', '['})
            unit->wrappers.push_back([&order, level](Tape& tape, const Var& x, const Unit::Body& body) {
                order += level;
                Var y = body(tape, x);
                order += level == '(' ? ')' : ']';
                return y;
            });
    run_model(model, Tokens());
    EXPECT(order == "([])([abcd])([])([])");
}

TEST_CASE("tied embeddings: no head of its own in parameters, units, memory and FLOPs; two uses of one unit") {
    LlamaConfig untied = make_config(), tied = untied;
    tied.tied = true;
    const int64_t matrix = tied.vocab * tied.hidden;
    EXPECT(tied.parameters() == untied.parameters() - matrix);
    EXPECT(flops_per_token(tied, 100) == flops_per_token(untied, 100));  // the head's product is still there
    Llama model(tied, {.init_std = 0.3});
    const MemoryBytes before = ledger().now();
    model.materialize(3);
    const MemoryBytes after = ledger().now();
    for (const Memory kind : {Memory::params, Memory::grads})
        EXPECT(after[size_t(kind)] - before[size_t(kind)] == 4 * tied.parameters());
    int64_t elements = 0;
    for (const Param* param : model.params()) {
        EXPECT(param->name != "lm_head.weight");
        elements += param->global_size();
    }
    EXPECT(elements == tied.parameters());
    const auto names = [](const std::vector<Unit*>& units) {
        std::string text;
        for (const Unit* unit : units) text += unit->name + ", ";
        return text;
    };
    EXPECT(names(model.units()) == "embedding, block 0, block 1, head, ");
    EXPECT(names(model.units_run()) == "embedding, block 0, block 1, head, tied head, ");
    EXPECT(model.units_run().back()->owner == model.units_run().front());
    Llama last(tied, {.init_std = 0.3}, {{{1, 2}}, false, true});  // a copy of the matrix, which it does not look up
    EXPECT(names(last.units()) == "block 1, head, embedding, ");
    EXPECT(names(last.units_run()) == "block 1, head, tied head, ");
    Llama first(tied, {}, {{{0, 1}}, true, false});
    EXPECT(names(first.units_run()) == "embedding, block 0, ");
    last.materialize(3);
    EXPECT(values(last.embed_tokens.data) == values(model.embed_tokens.data));
}

TEST_CASE("layers out of range and impossible shapes are refused") {
    LlamaConfig config = make_config();
    config.heads = 3;
    EXPECT_USAGE_ERROR(Llama(config, {}), "--heads");
    config = make_config();
    config.kv_heads = 3;
    EXPECT_USAGE_ERROR(Llama(config, {}), "--kv-heads");
    EXPECT_CHECK_FAILS(Llama(make_config(), {}, {{{1, 5}}, true, true}));
    EXPECT_CHECK_FAILS(Llama(make_config(), {}, {{{1, 2}, {0, 1}}, true, true}));  // in another order than the model's
}

TEST_CASE(
    "weight halves put aside: the backward pass leaves the products' weights alone; run later, the gradients are the "
    "same") {
    const Tokens tokens;
    for (const Recompute level : {Recompute::none, Recompute::pointwise, Recompute::selective, Recompute::full}) {
        Llama together(make_config(), {.recompute = level, .init_std = 0.3});
        Llama apart(make_config(), {.recompute = level, .init_std = 0.3});
        for (Llama* model : {&together, &apart}) model->materialize(1);
        Tape tape;
        together.forward(tape, tokens.batch());
        tape.backward();
        Tape::Steps later;
        Tape split{.deferred_wgrads = &later};
        apart.forward(split, tokens.batch());
        EXPECT(later.empty());
        split.backward();
        EXPECT(later.size() == 4 * 2 + 1);  // qkv, o, gate_up, down of two blocks; the head
        const auto in_product = [](const Param& param) {
            return param.is_matrix() && param.name.find("embed") == std::string::npos;
        };
        for (const Param* param : apart.params()) {
            const Doubles gradient = values(param->grad);
            INFO(param->name);
            EXPECT(std::all_of(gradient.begin(), gradient.end(), [](double x) { return x == 0; }) ==
                   in_product(*param));
        }
        for (auto& half : later) half();
        for (size_t i = 0; i < apart.params().size(); ++i)
            EXPECT(values(apart.params()[i]->grad) == values(together.params()[i]->grad));
    }
}
