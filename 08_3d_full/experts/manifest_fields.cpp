// What a checkpoint has of experts: fields of its manifest, by the names of the flags, and rows of their balance.
#include "01_single_gpu/core/json_object.h"
#include "08_3d_full/checkpoint/format.h"

namespace train70b {

LlamaConfig dense_part(LlamaConfig config) {
    if (config.is_sparse()) config.family = "";
    config.experts = {};
    return config;
}

nlohmann::ordered_json other_part(const LlamaConfig& config) {
    const ExpertsConfig& x = config.experts;
    if (!config.is_sparse()) return {{"experts", {{"experts", 0}}}};
    return {{"experts",
             {{"experts", x.count},
              {"top-k", x.top_k},
              {"expert-ffn", x.ffn},
              {"shared-experts", x.shared},
              {"dense-layers", x.dense_layers},
              {"router", x.sigmoid ? "sigmoid" : "softmax"},
              {"router-normalize", x.normalize ? "on" : "off"},
              {"router-scale", x.scale},
              {"expert-groups", x.groups},
              {"top-groups", x.top_groups},
              {"capacity-factor", x.capacity_factor}}}};
}

void read_other_part(const std::string& path, const nlohmann::json& manifest, LlamaConfig& model) {
    if (!manifest.contains("experts")) return;
    constexpr int64_t kMost = 1 << 16, kMostColumns = 1 << 20;
    const JsonObject read = JsonObject(path, manifest).inner("experts");
    ExpertsConfig& x = model.experts;
    x.count = read.integer("experts", kMost);
    x.top_k = read.integer("top-k", kMost);
    x.ffn = read.integer("expert-ffn", kMostColumns);
    x.shared = read.integer("shared-experts", kMost, 0);
    x.dense_layers = read.integer("dense-layers", kMost, 0);
    x.sigmoid = read.text("router", {"softmax", "sigmoid"}) == "sigmoid";
    x.normalize = read.text("router-normalize", {"on", "off"}) == "on";
    x.scale = read.any_number("router-scale");
    x.groups = read.integer("expert-groups", kMost);
    x.top_groups = read.integer("top-groups", kMost);
    x.capacity_factor = read.any_number("capacity-factor");
    check_config(model, {.where = path + ": "});
}

std::vector<const char*> fixed_flags_of_other_part() {
    return {"aux-loss", "aux-loss-over", "router-z-loss", "router-bias-rate"};
}

bool is_row_of_other_part(const std::string& name) { return name.starts_with("experts/"); }

bool is_of_model(const std::string& name) { return is_row_of_other_part(name) && name.ends_with(".bias"); }

}  // namespace train70b
