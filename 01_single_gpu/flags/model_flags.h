#pragma once
// The flags that say which model: a preset, and its dimensions one by one.
#include "01_single_gpu/config.h"
#include "01_single_gpu/flags/flags.h"

namespace train70b {

class ModelFlags {
  public:
    void add_to(Flags& flags);                       // under the heading "Model"; this outlives the flags
    LlamaConfig shape(const Flags& flags) const;     // after Flags::parse(); usage error for an invalid shape
    static const std::vector<std::string>& names();  // "--model", ...

  private:
    std::string model_ = "tiny";
    std::optional<int64_t> layers_, hidden_, heads_, kv_heads_, ffn_, vocab_, head_dim_;
    std::optional<bool> qkv_bias_, qk_norm_;
    bool tied_ = false;
};

}  // namespace train70b
