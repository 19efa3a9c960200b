#include "01_single_gpu/complete/run/evaluate.h"

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>

namespace train70b {

std::vector<std::optional<double>> evaluate_sources(Trainer& trainer) {
    const Batches& batches = trainer.batches;
    const Groups& groups = trainer.groups;
    std::vector<std::optional<double>> losses(trainer.data.parts().size());
    for (size_t part = 0; part < losses.size(); ++part) {
        Tensor total;
        int64_t targets = 0;
        for (int64_t round = 0; round < batches.validation_rounds(*groups.dp, part); ++round)
            accumulate(total, trainer.loop->forward_only(batches.validation_batch(*groups.dp, part, round, targets)));
        if (!total) continue;
        std::vector<double> sums = read(total);
        sums.resize(1);  // without the z-loss
        if (batches.ignores_targets()) sums.push_back(double(targets));
        sums = groups.sum_loss(sums);
        const double tokens = batches.validation_tokens(part);
        // A stage of a pipeline counts the same targets as any other.
        const double all = sums.size() > 1 ? sums[1] / double(groups.pp->size()) : tokens;
        if (all > 0) losses[part] = sums[0] * (tokens / all);
    }
    return losses;
}

static double mean_of_sources(const std::vector<Dataset::Part>& parts,
                              const std::vector<std::optional<double>>& losses) {
    if (losses.size() == 1 && losses[0]) return *losses[0];
    double sum = 0, weights = 0, by_samples = 0, samples = 0;
    for (size_t i = 0; i < losses.size(); ++i) {
        if (!losses[i]) continue;
        sum += parts[i].weight * *losses[i];
        weights += parts[i].weight;
        by_samples += double(parts[i].source->validation_samples()) * *losses[i];
        samples += double(parts[i].source->validation_samples());
    }
    if (samples == 0) return std::numeric_limits<double>::quiet_NaN();  // no source has a target
    return weights > 0 ? sum / weights : by_samples / samples;
}

double evaluate(Trainer& trainer) { return mean_of_sources(trainer.data.parts(), evaluate_sources(trainer)); }

void check_evaluation(const TrainOptions& o, const Dataset& data) {
    if (o.eval_every > 0 && data.validation_samples() == 0)
        usage_error("--eval-every {}: --data {} has no validation split; set --val-fraction, or use {}", o.eval_every,
                    o.data,
                    data.is_text() ? fmt::format("at least {} tokens", 20 * (o.seq_len + 1))
                                   : "a held-out source (PATH:1,HELD_OUT:0)");
}

void report_evaluation(Trainer& trainer, int64_t step) {
    const Dataset& data = trainer.data;
    const std::vector<std::optional<double>> losses = evaluate_sources(trainer);
    const double loss = mean_of_sources(data.parts(), losses);
    const DType dtype = trainer.model.options.dtype;
    nlohmann::ordered_json event = {{"event", "eval"}, {"step", step}, {"loss", significant_digits(loss, dtype)}};
    std::string text;
    for (size_t i = 0; data.is_mixture() && i < losses.size(); ++i) {
        const std::string& name = data.parts()[i].name;
        if (!losses[i] && data.parts()[i].source->validation_samples() > 0) {
            text += fmt::format("{} {} no targets", text.empty() ? ":" : ",", name);
            event["sources"][name] = nullptr;
        }
        if (!losses[i]) continue;
        text += fmt::format("{} {} {:.4f}", text.empty() ? ":" : ",", name, *losses[i]);
        event["sources"][name] = significant_digits(*losses[i], dtype);
    }
    const bool known = std::any_of(losses.begin(), losses.end(), [](const auto& of_source) { return bool(of_source); });
    const int64_t sequences = data.validation_samples();
    trainer.note(
        known ? fmt::format("          validation loss {:.4f} over {} sequences{}", loss, sequences, text)
              : fmt::format("          no validation loss: all targets of the {} sequences are ignored", sequences),
        event);
}

}  // namespace train70b
