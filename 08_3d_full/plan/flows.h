#pragma once
// Fluid flows over shared links with max-min fairness.
//
// A flow passes `bytes` at a rate; on a link it takes `share` of it. All rates rise together until a link is full; the
// flows on that link keep their rate and the others rise further (progressive filling). With one link and equal shares:
// each of n flows has 1/n of it.
#include <cstddef>
#include <cstdint>
#include <queue>
#include <vector>

namespace train70b {

struct FlowLoad {
    int32_t link = 0;
    double share = 0;  // of the flow's rate; more than 1 where a flow stands for several equal ones
};

class Flows {
  public:
    explicit Flows(std::vector<double> bytes_per_s);

    // loads: at least one; they outlive the flow. Returns its number; those of flows that have ended are used again.
    int32_t add(double now, double bytes, const std::vector<FlowLoad>& loads);
    double next() const;  // when the first flow of all ends, if none is added; infinity: there is none
    int32_t pop();        // ends that flow; its number

  private:
    struct Flow {
        const std::vector<FlowLoad>* loads = nullptr;
        double bytes = 0, rate = 0, since = 0;  // bytes left at `since`
        uint32_t version = 0;                   // of its rate
        bool visited = false, frozen = false;
    };
    struct Link {
        double bytes_per_s = 0;
        std::vector<int32_t> flows;
        bool visited = false;
        double left = 0, wanted = 0;
    };
    struct End {
        double time;
        int32_t flow;
        uint32_t version;
        uint64_t order;
        bool operator>(const End& other) const { return time != other.time ? time > other.time : order > other.order; }
    };

    bool alone(const std::vector<FlowLoad>& loads, size_t flows) const;  // no more than so many on any of its links
    void share_links(double now, const std::vector<FlowLoad>& loads);    // new rates of all flows that meet these links
    void set_rate(double now, int32_t flow, double rate);
    void drop_stale();

    std::vector<Link> links_;
    std::vector<Flow> flows_;
    std::vector<int32_t> free_, some_flows_, some_links_;
    std::priority_queue<End, std::vector<End>, std::greater<>> ends_;
    uint64_t order_ = 0;
};

}  // namespace train70b
