#include "01_single_gpu/complete/report/reference.h"

#include <nlohmann/json.hpp>

#include "01_single_gpu/core/json.h"

namespace train70b {

using nlohmann::ordered_json;

namespace {
constexpr const char* kFlag = "--save-reference";

std::vector<StoredTensor> entries(const LlamaConfig& config, DType dtype, Which which) {
    std::vector<StoredTensor> list;
    for (const Param& param : which == Which::data ? params_and_buffers(config) : all_params(config))
        for (const HfTensor& part : hf_tensors(param, config))
            list.push_back({part.name, stored_dtype(part.name, dtype), part.shape});
    return list;
}
}  // namespace

ReferenceWriter::ReferenceWriter(const TrainOptions& o, const LlamaConfig& config, const ordered_json& flags)
    : model_(config), dtype_(o.llama().dtype) {
    if (o.steps < 1)
        usage_error("{} {}: --steps must be at least 1, because it saves the gradients of step 1", kFlag,
                    o.save_reference);
    if (this_rank != 0) return;
    folder_.emplace(kFlag, o.save_reference);
    config_file_.emplace(kFlag, folder_->file("config.json"));
    initial_.emplace(kFlag, folder_->file("initial.safetensors"), entries(config, dtype_, Which::data));
    gradients_.emplace(kFlag, folder_->file("gradients.safetensors"),
                       entries(config, o.llama().grad_dtype, Which::grad));
    after_step_1_.emplace(kFlag, folder_->file("after_step_1.safetensors"), entries(config, dtype_, Which::data));
    json_file_.emplace(kFlag, folder_->file("reference.json"));

    const ordered_json model = hf_config(config, dtype_);
    config_file_->write(model.dump(2) + "\n");
    ordered_json head = {
        {"format", kReferenceFormat}, {"version", 2},   {"flags", flags},       {"model", model},
        {"dtype", o.dtype},           {"seed", o.seed}, {"seq_len", o.seq_len}, {"global_batch", o.global_batch}};
    if (o.document_token) head["document_token"] = *o.document_token;
    json_file_->write("{\n");
    for (const auto& [key, value] : head.items())
        json_file_->write(fmt::format("  \"{}\": {},\n", key, json_text(value)));
    json_file_->write("  \"steps\": [");
}

void ReferenceWriter::initial_weights(const GetFullParam& get_full) { write(initial_, get_full, Which::data); }
void ReferenceWriter::gradients(const GetFullParam& get_full) { write(gradients_, get_full, Which::grad); }
void ReferenceWriter::after_step_1(const GetFullParam& get_full) { write(after_step_1_, get_full, Which::data); }

void ReferenceWriter::write(std::optional<SafetensorsWriter>& file, const GetFullParam& get_full, Which which) {
    for_full_tensors(model_, which, get_full, [&](const std::string&, const Tensor& values) { file->write(values); });
}

void ReferenceWriter::step(const StepReport& report, const std::vector<Sample>& samples, bool with_targets) {
    if (!json_file_) return;
    ordered_json line = {{"step", report.step},
                         {"loss", significant_digits(report.loss, dtype_)},
                         {"grad_norm", significant_digits(report.grad_norm, dtype_)},
                         {"lr", report.lr}};
    for (const Sample& sample : samples) line["tokens"].push_back(sample.tokens);
    for (const Sample& sample : samples)
        if (with_targets) line["targets"].push_back(sample.targets);
    json_file_->write((steps_++ ? ",\n    " : "\n    ") + line.dump());
}

void ReferenceWriter::finish() {
    if (!json_file_) return;
    json_file_->write("\n  ]\n}\n");
    initial_->commit();
    gradients_->commit();
    after_step_1_->commit();
    config_file_->commit();
    json_file_->commit();
}

}  // namespace train70b
