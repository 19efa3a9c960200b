#pragma once
// A run whose sequences are spread over ranks.
#include "01_single_gpu/core/profile.h"
#include "01_single_gpu/core/registry.h"
#include "02_data_parallel/complete/data_parallel.h"
#include "04_tensor_parallel/complete/tensor_parallel.h"
#include "06_context_parallel/complete/training_report.h"
#include "tests/attention_error.h"
#include "tests/documents.h"
#include "tests/parallel.h"

namespace train70b::test {

inline TrainOptions shape(const Text& text, int64_t kv_heads, int64_t global_batch) {
    return of_model(tiny(text), {.layers = 2, .hidden = 64, .heads = 8, .kv_heads = kv_heads, .ffn = 72, .vocab = 131},
                    48, global_batch);
}

// All ranks of `all`, cp to a copy of the model.
struct Context {
    ContextLayout layout;
    Comm context;
    CommRuntime runtime;
    std::unique_ptr<DataParallel> data_parallel;
    Session session;

    Context(TrainOptions o, const Comm& all, int64_t cp, const ContextParallelOptions& options)
        : layout(context_layout(o.model, o.seq_len, cp, options)),
          context(all.split([cp](int rank) { return int(rank / cp); }, "cp")),
          runtime(all),
          session(with_micro_batch(o, all.size() / cp), [&](Session& s) {
              apply_context_parallel(s.model, context, layout);
              const Comm copies = all.split([](int) { return 0; }, "dp_cp");
              data_parallel =
                  std::make_unique<DataParallel>(s.model, copies, DataParallelOptions{}, AdamW::maker(o.adamw()));
              use_store(s.trainer, *data_parallel, copies);
              s.trainer.runtime = &runtime;
              s.trainer.groups.dp = std::make_shared<Coordinate>(all.rank() / cp, all.size() / cp);
              s.trainer.batches.of_rank = layout.of_rank(context.rank());
          }) {}
    static TrainOptions with_micro_batch(TrainOptions o, int64_t data_ranks) {
        o.micro_batch = o.global_batch / data_ranks;
        return o;
    }
};

// Two steps of one model copy on these ranks: what the second has computed, sent and kept.
struct SecondStep : ContextStep {
    ContextLayout layout;
    MemoryBytes peak;
    std::vector<double> flops;

    SecondStep(TrainOptions o, const Comm& ranks, const ContextParallelOptions& options) {
        o.steps = 2;
        const MemoryBytes before = ledger().now();
        const std::string algorithm = ranks.use("library");  // whose sum of the gradients books no buffer
        Context run(o, ranks, ranks.size(), options);
        const AttentionWork work(run.session.trainer, run.context);
        run.session.run();
        ranks.use(algorithm);
        const StepReport& step = run.session.reports.back();
        static_cast<ContextStep&>(*this) =
            context_step(run.session.options, run.session.model.options, run.layout, run.context, step, 1);
        layout = run.layout;
        peak = step.peak.above(before).kind;
        flops = work.flops;
    }
};

inline std::vector<ContextParallelOptions> algorithms(int64_t cp) {
    std::vector<ContextParallelOptions> list;
    for (const std::string& name : names_of(context_algorithms())) list.push_back({name});
    if (cp == 8) list.push_back({"hybrid", 4});
    if (cp > 2) list.push_back({"hybrid", cp});
    return list;
}

// Half of them, the others on other commits.
inline std::vector<ContextParallelOptions> algorithms_in_turn(int64_t cp) {
    std::vector<ContextParallelOptions> list;
    int64_t number = cp / 2;
    for (const ContextParallelOptions& options : algorithms(cp))
        if (in_half(number++)) list.push_back(options);
    return list;
}

inline std::string options_text(const ContextParallelOptions& options) {
    return options.algorithm + (options.ulysses_size > 0 ? fmt::format(" {}", options.ulysses_size) : "");
}

}  // namespace train70b::test
