#pragma once
// The time of a step in closed form: what the planner ranks layouts by before it simulates the best of them.
//
//     step = max over the stages of  m (F + B)             computation, with tp and cp where they are exposed
//          + bubble                                        the schedule's share: busy b / (1 - b)
//          + messages                                      of the pipeline, where nothing hides them
//          + what the reduction of gradients exceeds the backward pass that hides it by
//          + update                                        the optimizer, and ZeRO-1's and 2's all-gather
//
// Communication of tp is exposed as a whole, or, with --tp-overlap, where a piece of the ring takes longer than the
// product of the piece before it. Experts have the same load; their rows' way there and back is exposed, but for what
// the shared experts' products hide. m: micro-batches. F, B: the forward and the backward pass of a micro-batch on a
// stage: every product by its shape (op_seconds), every collective by its group's place in the cluster (Network), alone
// on its links. What this leaves out, the simulation has: contention, buckets, ranks that wait for each other.
#include <map>

#include "08_3d_full/plan/enumerate.h"
#include "08_3d_full/plan/memory_formula.h"
#include "08_3d_full/plan/network.h"

namespace train70b {

struct Estimate {
    // Seconds of the slowest stage. Their sum is the step.
    double compute = 0;                     // each product, attention and pointwise op once
    double recompute = 0;                   // what the backward pass computes again
    double tp = 0, cp = 0, pp = 0, dp = 0;  // exposed communication; dp: with experts over edp, too
    double bubble = 0;
    double update = 0;
    double ep = 0;

    double seconds() const { return compute + recompute + tp + cp + pp + dp + bubble + update + ep; }
};
std::vector<std::pair<const char*, double>> parts_of(const Estimate& estimate);

class Estimator {
  public:
    // Both outlive this.
    Estimator(const PlanRequest& request, const ClusterModel& cluster);
    Estimate operator()(const Layout& layout);
    // One rank's share of the bytes, on the wire, of a micro-batch in one layer's collectives over tp.
    double tp_bytes_per_layer(const Layout& layout) const;

  private:
    struct PassSeconds {
        double forward = 0, backward = 0, again = 0;
        double total() const { return forward + backward; }
    };
    struct Layer {
        PassSeconds compute, tp, cp, ep;
        double attention = 0;  // and shared experts: forward, of a sparse layer
    };
    double op(const std::string& name, std::vector<int64_t> shape, double flops, double bytes, DType dtype);
    double product(int64_t m, int64_t n, int64_t k, bool fp8);
    double memory_bound(double bytes) { return op("pointwise", {}, 0, bytes, request_.dtype); }
    // Of a collective, a message on a channel ("send") or a shift ("send_recv") of the ranks 0, stride, 2 stride, ...
    double seconds_of(const std::string& operation, double bytes, int64_t stride, int64_t count);
    PassSeconds attention(const Layout& layout, double n);
    // Of a dense or a sparse layer. tp_of: exposed; add_experts: to the rest of a sparse one.
    PassSeconds tp_of(const Layout& layout, bool sparse);
    Layer layer_of(const Layout& layout, bool sparse);
    void add_experts(Layer& layer, const Layout& layout);
    // Columns of a rank's products: of the first of each half, which is divided by columns, and of the second's input.
    std::vector<std::pair<int64_t, int64_t>> halves(const Layout& layout, bool sparse) const;
    PassSeconds head_of(const Layout& layout);
    double gathered_experts(const Layout& layout, const StageSize& stage, const Layer& layer);
    double reduction(const Layout& layout, double elements, double ep_elements, const char* operation,
                     double bytes_per_element);

    const PlanRequest& request_;
    const ClusterModel& cluster_;
    Network network_;
    int64_t element_;               // bytes of an activation
    double orthogonalization_ = 0;  // seconds of Muon's, for a layer on one rank
    std::map<std::tuple<int64_t, int64_t, int64_t, bool, bool, Recompute, int64_t, bool>, Layer> layers_;
    std::map<std::tuple<int64_t, int64_t, int64_t, bool>, PassSeconds> heads_;
    std::map<std::tuple<std::string, double, int64_t, int64_t>, double> seconds_;
};

}  // namespace train70b
