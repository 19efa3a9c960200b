#pragma once
// Reading a checkpoint into any layout: every rank picks from all rectangles what its own segments hold.
#include "01_single_gpu/roles.h"
#include "08_3d_full/checkpoint/format.h"

namespace train70b {

// Writes the states of the store, and the step states, from a full checkpoint of this model and optimizer; then the
// parameters follow. own_file: the name of the file that this rank wrote if the layout is the same, empty otherwise:
// then FP8 histories are merged over all ranks. Collective, through ParamStore::states_changed.
void restore(const Manifest& manifest, ParamStore& store, const std::vector<StepState*>& step_states,
             const std::string& own_file);

}  // namespace train70b
