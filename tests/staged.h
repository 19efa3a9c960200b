#pragma once
// A run whose layers are in pipeline stages.
#include "01_single_gpu/core/registry.h"
#include "02_data_parallel/complete/data_parallel.h"
#include "03_zero/complete/zero.h"
#include "05_pipeline/complete/schedule_file.h"
#include "05_pipeline/complete/training_report.h"
#include "tests/parallel.h"

namespace train70b::test {

inline TrainOptions shape(const Text& text) {
    return of_model(tiny(text), {.layers = 8, .hidden = 32, .heads = 4, .kv_heads = 2, .ffn = 48, .vocab = 131}, 13,
                    16);
}

// All ranks of `all`, pp stages to a copy of the model.
struct Staged {
    Comm stages, data;
    std::unique_ptr<DataParallel> data_parallel;
    std::unique_ptr<Pipeline> pipeline;
    Session session;

    Staged(const TrainOptions& o, const Comm& all, int64_t pp, const PipelineOptions& options, int64_t micro_batches)
        : stages(all.split([n = all.size() / int(pp)](int rank) { return rank % n; }, "pp")),
          data(all.split([n = all.size() / int(pp)](int rank) { return rank / n; }, "dp")),
          session(
              with_micro_batch(o, data.size(), micro_batches),
              [&](Session& s) {
                  data_parallel =
                      std::make_unique<DataParallel>(s.model, data, DataParallelOptions{}, AdamW::maker(o.adamw()));
                  pipeline = std::make_unique<Pipeline>(s.model, stages, pipeline_schedule(options, pp, micro_batches));
                  use_store(s.trainer, *data_parallel, data);
                  s.trainer.loop = pipeline.get();
                  s.trainer.groups.pp = group_of(stages);
              },
              pipeline_stage(o.model, pp, stages.rank(), options)) {}
    static TrainOptions with_micro_batch(TrainOptions o, int64_t data_ranks, int64_t micro_batches) {
        o.micro_batch = o.global_batch / data_ranks / micro_batches;
        return o;
    }
};

// Five steps of one model copy on these stages, the quickest of the last four measured. micro_batches of one sequence.
struct Watched {
    CommRuntime runtime;
    Staged staged;
    PipelineWatch watch;

    Watched(TrainOptions o, const Comm& ranks, const PipelineOptions& options, int64_t micro_batches)
        : runtime(ranks),
          staged(in_five_steps(o, micro_batches), ranks, ranks.size(), options, micro_batches),
          watch(staged.session.trainer, *staged.pipeline, staged.stages,
                pipeline_schedule(options, ranks.size(), micro_batches)) {
        staged.session.trainer.runtime = &runtime;
        staged.session.run();
    }
    static TrainOptions in_five_steps(TrainOptions o, int64_t micro_batches) {
        o.steps = 5;
        o.global_batch = micro_batches;
        return o;
    }
    int64_t sent() const { return sent_bytes(staged.session.reports.back(), "", ".send"); }
    const MemoryBytes& memory(int64_t rank) const { return watch.memory[size_t(rank)].kind; }
};

const std::vector<std::string> kSchedules = names_of(schedule_generators());

inline bool has_chunks(const std::string& schedule) { return find_schedule(schedule).default_chunks() > 1; }
inline bool in_v(const std::string& schedule) { return find_schedule(schedule).chunks == ScheduleGenerator::Chunks::v; }
inline bool works(const std::string& schedule, int64_t pp, int64_t m) {
    return find_schedule(schedule).problem(pp, m).empty();
}

}  // namespace train70b::test
