// Tensor parallelism in 8 bits: what the ranks send for scales, message by message, and that weights whose amaxes are
// exchanged once are quantized as if that were done for each product.
#include "07_fp8/complete/zero_cast.h"
#include "tests/fp8.h"
#include "tests/parallel.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr int kTp = 2;
constexpr int64_t kMicroBatches = 2;

// told: the recipe hears of new weights. If not, it computes and exchanges an amax whenever it quantizes.
struct ToldRun {
    Comm tensor, data;
    std::unique_ptr<TensorParallel> tensor_parallel;
    Fp8 fp8;
    std::unique_ptr<Zero> zero;
    StepStats stats;
    Session session;
    std::vector<double> weights;  // all, on rank 0
    double validation = 0;

    ToldRun(const TrainOptions& o, int stage, const std::string& recipe, bool told)
        : tensor(world().split([](int rank) { return rank / kTp; }, "tp")),
          data(world().split([](int rank) { return rank % kTp; }, "dp")),
          stats(data),
          session(o, [&](Session& s) {
              tensor_parallel = std::make_unique<TensorParallel>(s.model, tensor);
              fp8 = apply_fp8(s.model, {.recipe = recipe}, o.micro_batch * o.seq_len, tensor);
              zero = std::make_unique<Zero>(s.model, data, ZeroOptions{.stage = stage}, AdamW::maker(o.adamw()),
                                            told ? make_fp8_unsharder(fp8) : nullptr);
              use_store(s.trainer, *zero, data);
              s.trainer.groups.tp = group_of(tensor);
              s.trainer.runtime = &stats;
              if (fp8.recipe) s.trainer.step_states.push_back(fp8.recipe.get());
          }) {
        session.run();
        weights = gathered(session, Which::data);
        validation = evaluate(session.trainer);
    }
    // Of the last step.
    CommStats::Entry sent() const {
        const auto found = stats.sent.find("tp.all_reduce");
        return found == stats.sent.end() ? CommStats::Entry() : found->second;
    }
};

struct Messages {
    int64_t calls = 0, bytes = 0;
    void add(int64_t messages, int64_t numbers) {  // of fp32; on two ranks an all-reduce sends each once
        calls += messages;
        bytes += 4 * messages * numbers;
    }
    bool operator==(const Messages&) const = default;
};
std::string to_string(const Messages& m) { return fmt::format("{} messages, {} bytes", m.calls, m.bytes); }

// What a step sends for scales; told: as above.
Messages expected(const TrainOptions& o, int stage, const std::string& recipe, bool told) {
    const int64_t L = o.model.layers, E = o.model.hidden, rows = o.micro_batch * o.seq_len;
    const bool by_rows = recipe == "rowwise" || recipe == "int8", nvfp4 = recipe == "nvfp4",
               again = o.recompute == "full";
    Messages all;
    if (recipe == "delayed") {
        all.add(1, 3 * 4 * L);
        if (told && stage == 3) all.add(1, 4 * L);  // weights that are gathered in FP8 have current scales
        return all;
    }
    // Inputs of o and down, in each forward pass; gradients of q, k, v and of gate, up. One scale per tensor: also o's
    // input, which the backward pass quantizes again. One per row: there it has scales per column, which are local.
    // nvfp4: one per tensor, and one of its transformed transpose.
    const int64_t forward = again ? 2 : 1;
    all.add(kMicroBatches * L * (2 * forward + (by_rows ? 0 : 1) + 2), by_rows ? rows : nvfp4 ? 2 : 1);
    // Weights: of all four layers each way; or by rows of o and down, by columns of the others.
    if (told && !((by_rows || nvfp4) && stage == 3))
        all.add(1, 4 * L * (by_rows ? E : 1));
    else
        all.add(kMicroBatches * L * (forward + 1) * (by_rows ? 2 : 4), by_rows ? E : 1);
    return all;
}

TrainOptions moving(const Text& text) {
    TrainOptions o = divisible(text);
    o.global_batch = 16;
    o.micro_batch = o.global_batch / (kMicroBatches * 2);
    o.steps = 3;
    o.val_fraction = 0.2;
    o.init_std = 0.04;
    o.lr = o.min_lr = 0.02;  // amaxes that move
    return o;
}

}  // namespace

TEST_CASE("one message has the amaxes of all weights, after an update; every bit is as with an amax for each product") {
    const Text text;
    int64_t number = 0;
    for (const int stage : {0, 1, 2, 3})
        for (const char* recompute : {"none", "full"}) {
            TrainOptions o = moving(text);
            o.recompute = recompute;
            std::optional<CommStats::Entry> others;  // what is sent whatever the precision
            for (const std::string recipe : {"current", "rowwise", "delayed", "nvfp4", "int8"}) {
                if (!in_slice(number++)) continue;
                if (!others) others = ToldRun(o, stage, "off", true).sent();
                const ToldRun run(o, stage, recipe, true), each(o, stage, recipe, false);
                INFO(recipe, ", stage ", stage, ", recompute ", std::string(recompute));
                EXPECT_EVERYWHERE(run.fp8.layers.size() == 8);
                if (recipe != "delayed" || stage < 3) {
                    EXPECT_EVERYWHERE(on_rank_0(run.session.history() == each.session.history()));
                    EXPECT_EVERYWHERE(on_rank_0(run.weights == each.weights && !run.weights.empty()));
                    EXPECT_EVERYWHERE(run.validation == each.validation);
                }
                for (const ToldRun* of : {&run, &each}) {
                    const Messages sent{of->sent().calls - others->calls, of->sent().bytes - others->bytes};
                    const Messages formula = expected(o, stage, recipe, of == &run);
                    INFO(std::string(of == &run ? "told" : "not told"), ": ", to_string(sent),
                         ", formula: ", to_string(formula));
                    EXPECT_EVERYWHERE(sent == formula);
                }
            }
        }
}
