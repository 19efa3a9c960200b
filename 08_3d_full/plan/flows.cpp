#include "08_3d_full/plan/flows.h"

#include <algorithm>
#include <limits>

#include "01_single_gpu/core/check.h"

namespace train70b {

Flows::Flows(std::vector<double> bytes_per_s) {
    for (const double rate : bytes_per_s) links_.push_back({.bytes_per_s = rate});
}

int32_t Flows::add(double now, double bytes, const std::vector<FlowLoad>& loads) {
    CHECK(!loads.empty() && bytes > 0, "{} bytes over {} links", bytes, loads.size());
    if (free_.empty()) {
        free_.push_back(int32_t(flows_.size()));
        flows_.emplace_back();
    }
    const int32_t id = free_.back();
    free_.pop_back();
    Flow& flow = flows_[size_t(id)];
    flow = {.loads = &loads, .bytes = bytes, .since = now, .version = flow.version + 1};
    for (const FlowLoad& load : loads) {
        Link& link = links_[size_t(load.link)];
        CHECK(link.bytes_per_s > 0, "a link of {} bytes/s", link.bytes_per_s);
        link.flows.push_back(id);
    }
    double rate = std::numeric_limits<double>::infinity();
    for (const FlowLoad& load : loads) rate = std::min(rate, links_[size_t(load.link)].bytes_per_s / load.share);
    if (alone(loads, 1))
        set_rate(now, id, rate);
    else
        share_links(now, loads);
    return id;
}

bool Flows::alone(const std::vector<FlowLoad>& loads, size_t flows) const {
    return std::ranges::all_of(
        loads, [&](int32_t link) { return links_[size_t(link)].flows.size() <= flows; }, &FlowLoad::link);
}

void Flows::drop_stale() {
    while (!ends_.empty() && flows_[size_t(ends_.top().flow)].version != ends_.top().version) ends_.pop();
}

double Flows::next() const { return ends_.empty() ? std::numeric_limits<double>::infinity() : ends_.top().time; }

int32_t Flows::pop() {
    const End end = ends_.top();
    Flow& flow = flows_[size_t(end.flow)];
    const std::vector<FlowLoad>& loads = *flow.loads;
    ++flow.version;
    for (const FlowLoad& load : loads) std::erase(links_[size_t(load.link)].flows, end.flow);
    free_.push_back(end.flow);
    if (!alone(loads, 0)) share_links(end.time, loads);
    drop_stale();
    return end.flow;
}

void Flows::set_rate(double now, int32_t id, double rate) {
    Flow& flow = flows_[size_t(id)];
    if (rate == flow.rate) return;
    flow.bytes = std::max(0.0, flow.bytes - flow.rate * (now - flow.since));
    flow.since = now;
    flow.rate = rate;
    ends_.push({now + flow.bytes / rate, id, ++flow.version, ++order_});
    drop_stale();
}

// Progressive filling, of the flows that are connected to these links through shared ones.
void Flows::share_links(double now, const std::vector<FlowLoad>& loads) {
    some_flows_.clear();
    some_links_.clear();
    const auto visit = [this](int32_t id) {
        Link& link = links_[size_t(id)];
        if (link.visited) return;
        link.visited = true;
        some_links_.push_back(id);
    };
    for (const FlowLoad& load : loads) visit(load.link);
    for (size_t i = 0; i < some_links_.size(); ++i) {
        Link& link = links_[size_t(some_links_[i])];
        link.left = link.bytes_per_s;
        link.wanted = 0;
        for (const int32_t id : link.flows) {
            Flow& flow = flows_[size_t(id)];
            if (flow.visited) continue;
            flow.visited = true;
            flow.frozen = false;
            some_flows_.push_back(id);
            for (const FlowLoad& load : *flow.loads) visit(load.link);
        }
    }
    for (const int32_t id : some_flows_)
        for (const FlowLoad& load : *flows_[size_t(id)].loads) links_[size_t(load.link)].wanted += load.share;
    double level = 0;  // the rate that all flows have which can still rise; rounding must not lower it
    for (size_t left = some_flows_.size(); left > 0;) {
        // The next link to be full, and at which rate.
        double rate = std::numeric_limits<double>::infinity();
        int32_t full = -1;
        for (const int32_t id : some_links_) {
            const Link& link = links_[size_t(id)];
            const bool wanted = std::any_of(link.flows.begin(), link.flows.end(),
                                            [this](int32_t flow) { return !flows_[size_t(flow)].frozen; });
            if (!wanted || !(link.left / link.wanted < rate)) continue;
            rate = link.left / link.wanted;
            full = id;
        }
        level = rate = std::max(rate, level);
        CHECK(full >= 0 && rate > 0, "{} flows without a rate, of {}", left, some_flows_.size());
        for (const int32_t id : links_[size_t(full)].flows) {
            Flow& flow = flows_[size_t(id)];
            if (flow.frozen) continue;
            flow.frozen = true;
            --left;
            for (const FlowLoad& load : *flow.loads) {
                links_[size_t(load.link)].left -= rate * load.share;
                links_[size_t(load.link)].wanted -= load.share;
            }
            set_rate(now, id, rate);
        }
    }
    for (const int32_t id : some_links_) links_[size_t(id)].visited = false;
    for (const int32_t id : some_flows_) flows_[size_t(id)].visited = false;
}

}  // namespace train70b
