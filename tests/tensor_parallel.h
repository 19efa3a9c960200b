#pragma once
// A run under tensor parallelism, and the layouts that the tests of chapter 04 go through.
#include "02_data_parallel/complete/data_parallel.h"
#include "04_tensor_parallel/complete/tensor_parallel.h"
#include "tests/parallel.h"

namespace train70b::test {

// 8 heads and an ffn of 88 are divisible by 8, the vocabulary of 131 by nothing; two key/value heads are copied on 4
// and 8 ranks.
inline TrainOptions shape(const Text& text, int64_t kv_heads) {
    TrainOptions o = tiny(text);
    if (!all_slices()) o.steps = 3;  // the third has what the moments of the second made
    return of_model(o, {.layers = 2, .hidden = 64, .heads = 8, .kv_heads = kv_heads, .ffn = 88, .vocab = 131}, 24, 8);
}

struct TensorLayout {
    int64_t tp = 1;
    TensorParallelOptions options;
    int64_t micro_batches = 1;

    std::string text() const {
        return fmt::format("tp {}, sequence {}, overlap {}, m {}", tp, options.sequence_parallel, options.overlap,
                           micro_batches);
    }
};

// All ranks of `all`, tp to a copy of the model.
struct Sharded {
    Comm tensor, data;
    std::unique_ptr<TensorParallel> tensor_parallel;
    std::unique_ptr<DataParallel> data_parallel;
    StepStats stats;
    Session session;

    Sharded(const TrainOptions& o, const Comm& all, const TensorLayout& layout)
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

inline std::vector<TensorLayout> layouts() {
    std::vector<TensorLayout> list;
    for (const int64_t tp : {2, 4, 8})
        for (const bool sequence : {false, true})
            for (const bool overlap : {false, true}) list.push_back({tp, {sequence, overlap}});
    return list;
}

}  // namespace train70b::test
