#pragma once
// The pipeline's options: their flags, the schedule, and the layers that a rank holds.
#include "01_single_gpu/complete/config.h"
#include "05_pipeline/complete/schedule.h"

namespace train70b {

class Flags;

struct PipelineOptions {
    std::string schedule = "1f1b";      // its name, or file:PATH (schedule_file.h)
    int64_t virtual_stages = 0;         // model chunks per rank, where the schedule lets one choose; 0: the default
    std::vector<int64_t> stage_layers;  // by stage index; empty: the same number on each
};
void add_pipeline_flags(Flags& flags, int64_t& pp, PipelineOptions& options);

// The layers of a rank of `stages`. Usage error where the layers cannot be divided over the stages.
Stage pipeline_stage(const LlamaConfig& config, int64_t stages, int64_t rank, const PipelineOptions& options);
// Usage error where the schedule does not allow this number of micro-batches, or a file's does not train.
Schedule pipeline_schedule(const PipelineOptions& options, int64_t stages, int64_t micro_batches);
bool from_file(const PipelineOptions& options);  // --pipeline file:SCHEDULE

}  // namespace train70b
