#include "01_single_gpu/run/expert_balance.h"

#include <algorithm>
#include <cmath>
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

}  // namespace

ExpertBalance::ExpertBalance(Llama& model) : model_(model) {
    for (Block& block : model.blocks)
        if (block.experts) layers_.push_back(block.experts.get());
}

void ExpertBalance::begin_step() {
    for (Experts* experts : layers_) experts->clear(model_.options.device);
}

ExpertReport ExpertBalance::end_step(const Groups& groups) {
    const size_t N = size_t(model_.config.experts.count);
    std::vector<double> mine;
    for (const Experts* experts : layers_) {
        mine.insert(mine.end(), experts->loads.slots.begin(), experts->loads.slots.end());
        mine.insert(mine.end(), experts->loads.dropped.begin(), experts->loads.dropped.end());
        const std::vector<double> losses = read(experts->losses);
        mine.insert(mine.end(), losses.begin(), losses.end());
    }
    const std::vector<double> all = mine.empty() ? mine : groups.dp_cp->sum(mine);

    double most = 0;
    std::vector<double> sums(7);  // layers, entropy, slots, dropped, dead experts, balancing loss, z-loss
    for (size_t i = 0; i < layers_.size(); ++i) {
        const auto layer = all.begin() + std::ptrdiff_t(i * (2 * N + 2));
        const std::vector<double> slots(layer, layer + std::ptrdiff_t(N));
        const double total = std::accumulate(slots.begin(), slots.end(), 0.0);
        const Evenness even(slots);
        most = std::max(most, even.max_over_mean);
        const double dropped = std::accumulate(layer + std::ptrdiff_t(N), layer + std::ptrdiff_t(2 * N), 0.0);
        const double of_layer[] = {
            1, even.entropy, total, dropped, even.dead, layer[std::ptrdiff_t(2 * N)], layer[std::ptrdiff_t(2 * N + 1)]};
        for (size_t k = 0; k < sums.size(); ++k) sums[k] += of_layer[k];
        Experts& experts = *layers_[i];
        if (!experts.bias().empty()) {
            std::vector<float> bias = experts.bias();
            update_bias(bias, slots, model_.options.balance.bias_rate);
            experts.set_bias(std::move(bias));
        }
        std::vector<float> fractions;  // f_i, 1 for an even load
        for (const double load : slots) fractions.push_back(float(total > 0 ? load / total * double(N) : 1));
        if (model_.options.balance.of_batch) experts.set_fractions(std::move(fractions));
    }
    for (const double of_stage : groups.pp->gather({most})) most = std::max(most, of_stage);
    sums = groups.pp->sum(sums);
    return {.max_over_mean = most,
            .entropy = sums[1] / sums[0],
            .dropped = sums[3] / sums[2],
            .dead = int64_t(sums[4]),
            .aux_loss = sums[5],
            .z_loss = sums[6]};
}

}  // namespace train70b
