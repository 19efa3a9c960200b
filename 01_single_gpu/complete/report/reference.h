#pragma once
// Reference runs: everything another implementation needs to train on the same tokens from the same weights, and to
// find its first deviation. docs/reference-format.md describes the files.
#include "01_single_gpu/complete/trainer.h"

namespace train70b {

// Writes the folder of --save-reference during training: opens every file now, renames them at the end. Rank 0 writes;
// the other ranks take part in Trainer::full(). Usage error if that is impossible. saved: the model, as config.json
// has it.
std::unique_ptr<RunControl> reference_run(Trainer& trainer, const LlamaConfig& saved,
                                          const nlohmann::ordered_json& flags);

}  // namespace train70b
