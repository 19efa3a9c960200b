#include "01_single_gpu/report/facts.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "01_single_gpu/core/check.h"

namespace train70b {

namespace {

bool wrong(const Deviation& d, double bound) { return !(d.relative <= bound); }

// Place in the backward pass: the head first, the embedding last; within a block what its gradient needs. Parameters of
// one product are equal. -1: not a parameter of these models.
double place_in_backward(const std::string& name) {
    if (name == "lm_head.weight") return 0;
    if (name == "model.norm.weight") return 1;
    if (name == "model.embed_tokens.weight") return HUGE_VAL;
    const std::string prefix = "model.layers.";
    if (!name.starts_with(prefix)) return -1;
    const double layer = std::atof(name.c_str() + prefix.size());
    const char* parts[] = {"mlp.down_proj",    "mlp.gate_proj",    "post_attention_layernorm", "self_attn.o_proj",
                           "self_attn.v_proj", "self_attn.q_norm", "self_attn.q_proj",         "input_layernorm"};
    const std::map<std::string, std::string> beside = {{"mlp.up_proj", "mlp.gate_proj"},
                                                       {"self_attn.k_norm", "self_attn.q_norm"},
                                                       {"self_attn.k_proj", "self_attn.q_proj"}};
    std::string part = name.substr(name.find('.', prefix.size()) + 1);
    part = part.substr(0, part.rfind('.'));
    if (const auto same = beside.find(part); same != beside.end()) part = same->second;
    const auto at = std::find(std::begin(parts), std::end(parts), part);
    return at == std::end(parts) ? -1 : 2 + double(at - std::begin(parts)) / 10 - layer + 1e6;
}

std::string list_of(const std::vector<std::string>& names) {
    std::string text = names[0];
    for (size_t i = 1; i < std::min<size_t>(names.size(), 3); ++i) text += ", " + names[i];
    return names.size() > 3 ? text + fmt::format(" and {} more", names.size() - 3) : text;
}

void add_backward(std::vector<std::string>& lines, const Comparison& c, double tolerance) {
    std::vector<std::pair<double, const Deviation*>> order;
    for (const Deviation& d : c.gradients)
        if (const double place = place_in_backward(d.name); place >= 0) order.emplace_back(place, &d);
    std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
    const auto is_wrong = [&](const auto& each) { return wrong(*each.second, tolerance); };
    const auto first = std::find_if(order.begin(), order.end(), is_wrong);
    if (first == order.end()) return;
    std::vector<std::string> names, right;
    for (auto at = first; at != order.end() && at->first == first->first; ++at)
        if (is_wrong(*at)) names.push_back(at->second->name);
    for (auto at = first; at != order.end(); ++at)
        if (!is_wrong(*at)) right.push_back(at->second->name);
    lines.push_back("backward: " +
                    (first == order.begin()
                         ? std::string("wrong from the first gradient on: ")
                         : fmt::format("right down to {}; first wrong: ", std::prev(first)->second->name)) +
                    list_of(names) + (right.empty() ? "" : fmt::format("; right after it: {}", list_of(right))));
}

void add_multiples(std::vector<std::string>& lines, const Comparison& c, double tolerance) {
    int64_t count = 0, multiples = 0;
    double least = HUGE_VAL, most = -HUGE_VAL;
    for (const Deviation& d : c.gradients) {
        if (!wrong(d, tolerance)) continue;
        ++count;
        if (!(d.rest <= tolerance)) continue;
        ++multiples;
        least = std::min(least, d.multiple), most = std::max(most, d.multiple);
    }
    if (multiples == 0 || multiples < count) return;
    const std::string which =
        count == int64_t(c.gradients.size()) ? fmt::format("all {}", count) : fmt::format("the {} wrong ones", count);
    lines.push_back(most - least <= 4 * tolerance * std::abs(most)
                        ? fmt::format("gradients: {} are {:.6g} x the reference's, nothing else", which, most)
                        : fmt::format("gradients: {} are multiples of the reference's, {:.6g} to {:.6g}, nothing else",
                                      which, least, most));
}

// Lists are sorted by deviation; steps are named "step 3".
void add_first(std::vector<std::string>& lines, const char* what, const std::vector<Deviation>& list, double bound) {
    int64_t first = INT64_MAX;
    for (const Deviation& d : list)
        if (wrong(d, bound)) first = std::min<int64_t>(first, std::atoll(d.name.c_str() + 5));
    if (first < INT64_MAX) lines.push_back(fmt::format("first wrong {}: step {}", what, first));
}

}  // namespace

std::vector<std::string> facts(const Comparison& c, double tolerance) {
    std::vector<std::string> lines;
    if (c.within(tolerance)) return lines;
    const auto step_1 =
        std::find_if(c.losses.begin(), c.losses.end(), [](const auto& d) { return d.name == "step 1"; });
    if (step_1 != c.losses.end()) {
        const bool is_wrong = wrong(*step_1, tolerance);
        lines.push_back(is_wrong ? fmt::format("forward: wrong: the loss of step 1, by {:.3g}", step_1->relative)
                                 : "forward: right (the loss of step 1)");
    }
    add_backward(lines, c, tolerance);
    add_multiples(lines, c, tolerance);
    add_first(lines, "loss", c.losses, tolerance);
    add_first(lines, "norm", c.norms, tolerance);
    return lines;
}

}  // namespace train70b
