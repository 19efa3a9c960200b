#include "01_single_gpu/complete/report/reference.h"

#include <nlohmann/json.hpp>

#include "01_single_gpu/complete/hf/hf.h"
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

class ReferenceRun : public RunControl {
  public:
    ReferenceRun(Trainer& trainer, const LlamaConfig& saved, const ordered_json& flags)
        : trainer_(trainer), model_(saved), dtype_(trainer.options.llama().dtype) {
        const TrainOptions& o = trainer.options;
        if (o.steps < 1)
            usage_error("{} {}: --steps must be at least 1, because it saves the gradients of step 1", kFlag,
                        o.save_reference);
        if (this_rank != 0) return;
        folder_.emplace(kFlag, o.save_reference);
        config_file_.emplace(kFlag, folder_->file("config.json"));
        initial_.emplace(kFlag, folder_->file("initial.safetensors"), entries(saved, dtype_, Which::data));
        gradients_.emplace(kFlag, folder_->file("gradients.safetensors"),
                           entries(saved, o.llama().grad_dtype, Which::grad));
        after_step_1_.emplace(kFlag, folder_->file("after_step_1.safetensors"), entries(saved, dtype_, Which::data));
        json_file_.emplace(kFlag, folder_->file("reference.json"));

        const ordered_json model = hf_config(saved, dtype_);
        config_file_->write(model.dump(2) + "\n");
        ordered_json head = {{"format", "train70b reference run"},
                             {"version", 2},
                             {"flags", flags},
                             {"model", model},
                             {"dtype", o.dtype},
                             {"seed", o.seed},
                             {"seq_len", o.seq_len},
                             {"global_batch", o.global_batch}};
        if (o.document_token) head["document_token"] = *o.document_token;
        json_file_->write("{\n");
        for (const auto& [key, value] : head.items())
            json_file_->write(fmt::format("  \"{}\": {},\n", key, json_text(value)));
        json_file_->write("  \"steps\": [");
    }

    int64_t first_step() override {
        write(initial_, Which::data);
        return 1;
    }
    void gradients_ready(int64_t step) override {  // reduced over all ranks, before clipping
        if (step == 1) write(gradients_, Which::grad);
    }
    bool after_step(const StepReport& report) override {
        const std::vector<Sample> samples = trainer_.batches.global_batch(report.step);
        if (json_file_) {
            ordered_json line = {{"step", report.step},
                                 {"loss", significant_digits(report.loss, dtype_)},
                                 {"grad_norm", significant_digits(report.grad_norm, dtype_)},
                                 {"lr", report.lr}};
            for (const Sample& sample : samples) line["tokens"].push_back(sample.tokens);
            for (const Sample& sample : samples)
                if (trainer_.batches.ignores_targets()) line["targets"].push_back(sample.targets);
            json_file_->write((steps_++ ? ",\n    " : "\n    ") + line.dump());
        }
        if (report.step == 1) write(after_step_1_, Which::data);
        return true;
    }
    void finish() override {
        if (!json_file_) return;
        json_file_->write("\n  ]\n}\n");
        for (auto* file : {&initial_, &gradients_, &after_step_1_}) (*file)->commit();
        config_file_->commit();
        json_file_->commit();
    }

  private:
    void write(std::optional<SafetensorsWriter>& file, Which which) {
        trainer_.runtime->write_files([&] {
            for_full_tensors(
                model_, which, [&](const Param& param, Which part) { return trainer_.full(param, part); },
                [&](const std::string&, const Tensor& values) { file->write(values); });
        });
    }

    Trainer& trainer_;
    const LlamaConfig model_;
    const DType dtype_;
    std::optional<OutputFolder> folder_;  // on rank 0 only, like the files
    std::optional<SafetensorsWriter> initial_, gradients_, after_step_1_;
    std::optional<OutputFile> config_file_, json_file_;
    int64_t steps_ = 0;
};
}  // namespace

std::unique_ptr<RunControl> reference_run(Trainer& trainer, const LlamaConfig& saved, const ordered_json& flags) {
    return std::make_unique<ReferenceRun>(trainer, saved, flags);
}

}  // namespace train70b
