#include "08_3d_full/config.h"

namespace train70b {

Stage stage_of(const ParallelConfig& config, const LlamaConfig& model, int64_t rank) {
    return pipeline_stage(model, config.mesh.pp, config.mesh.coordinate(rank).pp, config.pipeline);
}

}  // namespace train70b
