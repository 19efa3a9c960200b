#pragma once
// The flags of the pipeline, and which layers a rank holds.
#include "01_single_gpu/io/flags.h"
#include "05_pipeline/pipeline.h"

namespace train70b {

void add_pipeline_flags(Flags& flags, int64_t& pp, PipelineOptions& options);
// The layers of a rank of `stages`. Usage error where the layers cannot be divided over the stages.
Stage pipeline_stage(const LlamaConfig& config, int64_t stages, int64_t rank, const PipelineOptions& options);
// Usage error where the schedule does not allow this number of micro-batches, or a file's does not train.
Schedule pipeline_schedule(const PipelineOptions& options, int64_t stages, int64_t micro_batches);
bool from_file(const PipelineOptions& options);  // --pipeline file:SCHEDULE

// Neighbouring ranks hold the same stage of different model copies. Collective.
struct StageComms {
    Comm stages, data_ranks;
};
StageComms split_stages(const Comm& world, int64_t dp);

}  // namespace train70b
