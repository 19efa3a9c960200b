#include "01_single_gpu/complete/non_finite.h"

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <tuple>

#include "01_single_gpu/complete/hf/hf.h"
#include "01_single_gpu/complete/step_report.h"

namespace train70b {

namespace {

constexpr double kWeight = 0, kGradient = 1, kNone = 2;

bool all_finite(const std::vector<Tensor>& tensors) {
    for (const double sum : squares(tensors))
        if (!std::isfinite(sum)) return false;
    return true;
}

// The first of this rank's parameters that is not finite: what (kWeight, ...) and its name.
std::pair<double, std::string> first_of_this_rank(Llama& model, ParamStore& store) {
    const std::vector<Param*> params = model.params();
    std::map<const Param*, std::vector<Tensor>> weights;  // also those of a shard, where Param::data is empty
    for (const Param* param : params) weights[param] = {param->data};
    store.for_each_state(
        [&](const Segment& segment, const char*, Tensor&) { weights[segment.param].push_back(segment.data); });
    for (const Param* param : params)
        if (!all_finite(weights[param])) return {kWeight, param->name};
    for (auto param = params.rbegin(); param != params.rend(); ++param)
        if (!all_finite(store.gradient_parts(**param))) return {kGradient, (*param)->name};
    return {kNone, ""};
}

}  // namespace

NonFinite find_non_finite(Llama& model, ParamStore& store, const Groups& peers, const StepReport& report,
                          double my_loss) {
    const std::vector<Param> whole = all_params(model.config);  // a pipeline stage has a part of them
    const auto [what, name] = first_of_this_rank(model, store);
    double place = -1;
    for (size_t i = 0; i < whole.size(); ++i)
        if (whole[i].name == name) place = double(i);
    const std::vector<double> all =
        gather(peers, {what, std::isfinite(my_loss) ? 1.0 : 0.0, place, report.loss, report.grad_norm});
    NonFinite first{.of = int64_t(all.size() / 5)};
    std::tuple earliest{kNone + 1, 0.0, 0.0};
    for (int64_t rank = 0; rank < first.of; ++rank) {
        const double* of_rank = all.data() + 5 * rank;  // as they were gathered
        const double kind = of_rank[0], first_place = of_rank[2], loss = of_rank[3], grad_norm = of_rank[4];
        const bool has_one = kind != kNone;
        if (!has_one && std::isfinite(loss) && std::isfinite(grad_norm)) continue;
        first.ranks += has_one;
        const std::tuple found{kind, of_rank[1], kind == kWeight ? first_place : -first_place};
        if (!(found < earliest)) continue;
        earliest = found;
        first.loss = loss;
        first.grad_norm = grad_norm;
        first.rank = rank;
        first.weight = kind == kWeight;
        first.parameter = has_one ? whole[size_t(first_place)].name : "";
    }
    return first;
}

std::string NonFinite::text() const {
    std::string what = "none";
    if (!parameter.empty()) what = parameter + (weight ? "" : " (its gradient)");
    if (of > 1)
        what += fmt::format(" on rank {} ({} of {} ranks {} one)", rank, ranks, of, ranks == 1 ? "has" : "have");
    return fmt::format("loss {}, gradient norm {}; first non-finite parameter: {}", loss, grad_norm, what);
}

// Before the first update no learning rate can be the cause.
std::string NonFinite::advice(int64_t step, const TrainOptions& o) const {
    std::vector<UsualValue> values = {{"--init-std", o.load_hf.empty() ? o.init_std : 0, 0.02},
                                      {"--z-loss", o.z_loss, 1e-4},
                                      {"--weight-decay", step > 1 ? o.weight_decay : 0, 0.1},
                                      {"--lr", step > 1 ? o.lr : 0, 0.001}};
    for (const UsualValue& value : usual_values_of_other_part(o.model)) values.insert(values.begin(), value);
    for (const auto& [flag, value, usual] : values)
        if (value > 1000 * usual) return fmt::format("{} {} is extraordinary: usual is about {}", flag, value, usual);
    if (o.loss_scale > 0) return fmt::format("--loss-scale {} may be too large: try 0, a dynamic one", o.loss_scale);
    if (o.eps < 1e-30) return fmt::format("--eps {} is extraordinary: usual is about 1e-8", o.eps);
    if (step > 1) return "try a lower --lr or more --warmup-steps";
    if (!o.load_hf.empty()) return fmt::format("nothing was trained yet: look at the weights in {}", o.load_hf);
    return "nothing was trained yet: --lr is not the cause";
}

nlohmann::ordered_json NonFinite::alarm(int64_t step) const {
    nlohmann::ordered_json json = {{"event", "alarm"},
                                   {"kind", "non_finite"},
                                   {"step", step},
                                   {"loss", significant_digits(loss)},
                                   {"grad_norm", significant_digits(grad_norm)},
                                   {"parameter", nullptr},
                                   {"of", nullptr},
                                   {"rank", rank},
                                   {"ranks", ranks}};
    if (!parameter.empty()) {
        json["parameter"] = parameter;
        json["of"] = weight ? "weight" : "gradient";
    }
    return json;
}

}  // namespace train70b
