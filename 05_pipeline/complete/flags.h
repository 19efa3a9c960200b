#pragma once
// The flags of the pipeline.
#include "01_single_gpu/complete/flags/flags.h"
#include "05_pipeline/complete/pipeline.h"

namespace train70b {

void add_pipeline_flags(Flags& flags, int64_t& pp, PipelineOptions& options);

}  // namespace train70b
