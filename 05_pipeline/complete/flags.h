#pragma once
// The flags of the pipeline, and the groups of ranks of a stage and of a model copy.
#include "01_single_gpu/complete/flags/flags.h"
#include "05_pipeline/complete/pipeline.h"

namespace train70b {

void add_pipeline_flags(Flags& flags, int64_t& pp, PipelineOptions& options);
// Neighbouring ranks hold the same stage of different model copies. Collective.
struct StageComms {
    Comm stages, data_ranks;
};
StageComms split_stages(const Comm& world, int64_t dp);

}  // namespace train70b
