#pragma once
// The flags of a mixture of experts.
#include "01_single_gpu/complete/config.h"
#include "01_single_gpu/complete/flags/flags.h"

namespace train70b {

class ExpertFlags {
  public:
    static constexpr const char* kCapacity = "--capacity-factor";
    static const std::vector<std::string>& names();  // those of the shape
    void add_shape(Flags& flags);                    // under a heading of their own; this outlives the flags
    void add_balance(Flags& flags);
    // After Flags::parse(); usage errors. model: the preset with its overrides.
    ExpertsConfig shape(const LlamaConfig& model, const Flags& flags) const;
    // Of a model that was loaded from `dir`: a capacity is not in its files.
    void add_capacity(LlamaConfig& model, const Flags& flags, const std::string& dir) const {
        if (flags.given(kCapacity) && !model.is_sparse())
            usage_error("{}: the model of --load-hf {} has no experts", kCapacity, dir);
        model.experts.capacity_factor = experts_.capacity_factor;
    }
    void read_balance(LlamaConfig& model, const Flags& flags) const;

  private:
    ExpertsConfig experts_;
    std::string router_ = "softmax", aux_loss_over_ = "sequence";
};

}  // namespace train70b
