#include "01_single_gpu/complete/experts/expert_balance.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

namespace train70b {

namespace {

// Load of one layer: its largest over the mean; its entropy over that of an even load.
struct Evenness {
    double max_over_mean = 0, entropy = 0, dead = 0;
    explicit Evenness(const std::vector<double>& slots) {
        const double sum = std::accumulate(slots.begin(), slots.end(), 0.0), N = double(slots.size());
        if (sum == 0) return;
        max_over_mean = *std::max_element(slots.begin(), slots.end()) / sum * N;
        for (const double load : slots) {
            if (load > 0) entropy -= load / sum * std::log(load / sum);
            if (load == 0) ++dead;
        }
        entropy = N > 1 ? entropy / std::log(N) : 1;
    }
};

// Biases and fractions are the same on all ranks of a stage; checkpoints keep them.
class ExpertBalance : public StepState {
  public:
    explicit ExpertBalance(Llama& model) : model_(model) {
        for (Block& block : model.blocks)
            if (Experts* experts = experts_of(block)) layers_.push_back(experts);
    }

    void begin_step(int64_t) override {
        if (layers_.empty()) return;
        if (!losses_)
            losses_ = Tensor({int64_t(layers_.size()), 2}, DType::f64, model_.options.device, Memory::workspace);
        fill(losses_, 0);
        const size_t N = size_t(model_.config.experts.count);
        for (size_t i = 0; i < layers_.size(); ++i) {
            layers_[i]->loads = {std::vector<double>(N, 0.0), std::vector<double>(N, 0.0)};
            layers_[i]->losses = losses_.element_slice(int64_t(2 * i), {2});
        }
    }

    Rows rows() const override {
        Rows rows{.kind = "experts/", .names = {}, .width = model_.config.experts.count, .values = {}};
        for (const Experts* experts : layers_)
            for (const auto& [what, values] :
                 {std::pair(".bias", &experts->bias()), std::pair(".fractions", &experts->fractions())}) {
                if (values->empty()) continue;
                rows.names.push_back(experts->router.name + what);
                rows.values.insert(rows.values.end(), values->begin(), values->end());
            }
        return rows;
    }

    void restore(const Rows& rows) override {
        auto row = rows.values.begin();
        const auto take = [&] {
            row += rows.width;
            return std::vector<float>(row - rows.width, row);
        };
        for (Experts* experts : layers_) {
            if (!experts->bias().empty()) experts->set_bias(take());
            if (!experts->fractions().empty()) experts->set_fractions(take());
        }
    }

    // Sums the loads over the ranks that hold the same experts, changes biases and fractions, and adds an ExpertReport.
    void end_step(const Groups& groups, StepReport& report, bool updated) override {
        const size_t N = size_t(model_.config.experts.count);
        std::vector<double> all;  // losses of all layers; then slots and dropped ones of each
        if (!layers_.empty()) {
            all = read(losses_);
            for (const Experts* experts : layers_)
                for (const std::vector<double>* counts : {&experts->loads.slots, &experts->loads.dropped})
                    all.insert(all.end(), counts->begin(), counts->end());
            all = groups.tp->sum(groups.dp_cp->sum(all));  // of tp with sequence parallelism, which divides the rows
        }

        double worst = 0;
        std::vector<double> sums(7);  // layers, entropy, slots, dropped, dead experts, balancing loss, z-loss
        for (size_t i = 0; i < layers_.size(); ++i) {
            const double* layer = &all[2 * layers_.size() + 2 * N * i];
            const std::vector<double> slots(layer, layer + N);
            const double total = std::accumulate(slots.begin(), slots.end(), 0.0);
            const Evenness even(slots);
            worst = std::max(worst, even.max_over_mean);
            const double dropped = std::accumulate(layer + N, layer + 2 * N, 0.0);
            const double of_layer[] = {1, even.entropy, total, dropped, even.dead, all[2 * i], all[2 * i + 1]};
            for (size_t k = 0; k < sums.size(); ++k) sums[k] += of_layer[k];
            if (!updated) continue;
            Experts& experts = *layers_[i];
            if (!experts.bias().empty()) {
                std::vector<float> bias = experts.bias();
                update_bias(bias, slots, model_.config.experts.balance.bias_rate);
                experts.set_bias(std::move(bias));
            }
            if (!model_.config.experts.balance.of_batch) continue;
            std::vector<float> fractions;  // f_i, 1 for an even load
            for (const double load : slots) fractions.push_back(float(total > 0 ? load / total * double(N) : 1));
            experts.set_fractions(std::move(fractions));
        }
        for (const double of_stage : groups.pp->gather({worst})) worst = std::max(worst, of_stage);
        sums = groups.pp->sum(sums);
        auto load = std::make_shared<ExpertReport>();
        load->max_over_mean = worst;
        load->entropy = sums[1] / sums[0];
        load->dropped = sums[3] / sums[2];
        load->dead = int64_t(sums[4]);
        load->aux_loss = sums[5];
        load->z_loss = sums[6];
        report.part = load;
    }

  private:
    Llama& model_;
    std::vector<Experts*> layers_;  // of this stage
    Tensor losses_;                 // (layers, 2): those of each
};

}  // namespace

const ExpertReport* experts_of(const StepReport& report) {
    return dynamic_cast<const ExpertReport*>(report.part.get());
}

void ExpertReport::add_to(nlohmann::ordered_json& step, DType dtype) const {
    step["experts"] = {{"max_over_mean", significant_digits(max_over_mean)},
                       {"entropy", significant_digits(entropy)},
                       {"dropped", significant_digits(dropped)},
                       {"dead", dead},
                       {"aux_loss", significant_digits(aux_loss, dtype)},
                       {"z_loss", significant_digits(z_loss, dtype)}};
}

std::vector<UsualValue> usual_values_of_other_part(const LlamaConfig& config) {
    const ExpertsConfig& experts = config.experts;
    return {{"--aux-loss", experts.balance.aux_loss, 0.01},
            {"--router-z-loss", experts.balance.z_loss, 0.001},
            {"--router-bias-rate", experts.balance.bias_rate, 0.001},
            {"--router-scale", experts.scale, 1}};
}

std::unique_ptr<StepState> step_state_of(Llama& model) {
    if (!model.config.is_sparse()) return nullptr;
    return std::make_unique<ExpertBalance>(model);
}

}  // namespace train70b
