// The planner's estimate of a step, and what it says of days and money.
#include <algorithm>
#include <map>

#include "08_3d_full/experts/expert_parallel.h"
#include "tests/plans.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("the estimate: products at the peak, communication that takes no time, the schedule's bubble") {
    for (const int64_t gpus : {1, 4, 12}) {
        PlanRequest r = small_request(gpus);
        const ClusterModel cluster = ideal(gpus);
        Estimator estimator(r, cluster);
        // 6 FLOPs per parameter and token (without the embedding), and attention over half of the pairs.
        const double tokens = double(r.global_batch * r.seq_len);
        const double flops = tokens * flops_per_token(r.model, double(r.seq_len));
        const double least = flops / double(gpus) / 1e6;
        for (const Layout& layout : enumerate_layouts(r).layouts) {
            const Estimate e = estimator(layout);
            INFO(flags_of(r, layout));
            EXPECT(e.compute >= 0.97 * least);  // norms' weights are no products
            EXPECT(e.tp + e.cp + e.dp + e.pp <= 1e-4 * e.compute);
            if (layout.pp == 1) {
                EXPECT(e.bubble == 0);
                if (r.model.kv_heads % layout.tp == 0 && r.model.vocab % layout.tp == 0)
                    EXPECT(e.compute <= 1.1 * least);  // attention's backward pass: 2.5 forward ones, not 2
            } else {
                const int64_t m = r.global_batch / (layout.dp * layout.micro_batch);
                const double b =
                    schedule_generators()[size_t(layout.schedule)].bubble({layout.pp, m, layout.virtual_stages});
                EXPECT(e.bubble == doctest::Approx((e.compute + e.recompute) * b / (1 - b)).epsilon(1e-4));
            }
            if (layout.recompute == Recompute::none) EXPECT(e.recompute == 0);
            if (layout.recompute == Recompute::full) EXPECT(e.recompute > 0.2 * e.compute);
        }
    }
}

TEST_CASE("the estimate: slower links make exposed communication, of the axis that uses them") {
    PlanRequest r = small_request(8);
    ClusterModel slow = ideal(8, 1e15);
    slow.nvlink = slow.rail = {1e6, 1e-3, "wire"};
    Estimator estimator(r, slow);
    for (const Layout& layout : enumerate_layouts(r).layouts) {
        const Estimate e = estimator(layout);
        INFO(flags_of(r, layout));
        EXPECT((e.tp > 0) == (layout.tp > 1));
        EXPECT((e.cp > 0) == (layout.cp > 1));
        EXPECT((e.pp > 0) == (layout.pp > 1));
        EXPECT((e.dp > 0) == (layout.dp * layout.cp > 1));
    }
}

TEST_CASE("the estimate: the bytes of every axis, over the links between its ranks") {
    // Nodes of two devices that compute and copy in no time, at 1000 bytes/s between nodes.
    constexpr double kRate = 1e3;
    PlanRequest r = small_request(8);
    ClusterModel cluster = ideal(8, 1e15);
    cluster.nodes = 4, cluster.gpus_per_node = cluster.rails = 2;
    cluster.rail = {kRate, 0, "wire"};
    const double E = double(r.model.hidden), layers = double(r.model.layers), kv = double(r.model.kv_width(1));
    const auto about = [](double seconds) { return doctest::Approx(seconds).epsilon(1e-3); };
    Estimator estimator(r, cluster);
    for (const int64_t b : {1, 2}) {  // tp 2 inside a node, dp 4 over the nodes: each on its rail
        const double m = 24.0 / (4 * double(b));
        for (int64_t zero = 0; zero <= 3; ++zero) {
            const Layout layout{.tp = 2, .dp = 4, .zero = zero, .micro_batch = b};
            const Estimate e = estimator(layout);
            const double once = stage_size(workload_of(r, layout), config_of(r, layout), 0).elements * 3 / 4 / kRate;
            INFO(flags_of(r, layout));
            // Gradients of 4 bytes, parameters of 2: gathered after the update, or twice per micro-batch.
            EXPECT(e.dp == about(once * (zero == 0 ? 8 : zero == 1 ? 4 : zero == 2 ? 4 * m : (2 + 2 + 4) * m)));
            EXPECT(e.update == about(zero == 1 || zero == 2 ? 2 * once : 0));
        }
    }
    for (const int64_t v : {1, 2}) {  // dp 2 inside a node, pp 4 over the nodes
        PlanRequest eight = r;
        eight.model.layers = 8;
        int64_t schedule = 0;
        while (schedule_generators()[size_t(schedule)].name != (v == 1 ? "1f1b" : "interleaved")) ++schedule;
        const Estimate e =
            Estimator(eight, cluster)({.dp = 2, .pp = 4, .schedule = schedule, .virtual_stages = v, .micro_batch = 1});
        EXPECT(e.pp == about(2 * (3 + 12 * double(v)) * (48 * E * 2 / kRate)));
    }
    // tp over the nodes: two all-reduces forward, two backward, and two more to recompute.
    const Layout tp{.tp = 4, .dp = 2, .micro_batch = 1};
    Layout again = tp;
    again.recompute = Recompute::full;
    EXPECT(estimator(tp).tp > 0);
    EXPECT(estimator(again).tp == about(1.5 * estimator(tp).tp));
    // cp over the nodes, tp 2 inside: keys and values around a ring, 3 hops forward, and backward with gradients.
    const Layout cp{.tp = 2, .cp = 4, .micro_batch = 1};
    const double part = 2 * 12 * kv / 2 * 2 / kRate;  // K and V of 12 tokens of half of the heads
    EXPECT(estimator(cp).cp == about(24 * layers * 3 * (1 + 2) * part));
    r.cp_algorithm = "gather";
    Estimator gather(r, cluster);
    again = cp;
    again.recompute = Recompute::selective;
    EXPECT(gather(cp).cp == about(24 * layers * 3 * (1 + 1 + 1) * part));
    EXPECT(gather(again).cp == about(24 * layers * 3 * (2 + 1 + 1) * part));
}

TEST_CASE("the estimate with experts: their products, and the bytes of their rows") {
    for (const bool mixed : {false, true}) {
        PlanRequest r = small_sparse_request(8, mixed);
        const ClusterModel cluster = ideal(8);
        Estimator estimator(r, cluster);
        const double flops = double(r.global_batch * r.seq_len) * flops_per_token(r.model, double(r.seq_len));
        for (const Layout& layout : enumerate_layouts(r).layouts) {
            const Estimate e = estimator(layout);
            INFO(flags_of(r, layout));
            EXPECT(e.compute >= 0.97 * flops / 8 / 1e6);
            if (layout.pp == 1 && r.model.kv_heads % layout.tp == 0) EXPECT(e.compute <= 1.1 * flops / 8 / 1e6);
            EXPECT(e.ep <= 1e-4 * e.compute);
        }
    }
    // One device per node, at 1000 bytes/s between nodes; before the rows, 8 bytes for each expert and rank.
    constexpr double kRate = 1e3;
    PlanRequest r = small_sparse_request(8);
    ClusterModel cluster = ideal(8, 1e15);
    cluster.rail = {kRate, 0, "wire"};
    Estimator estimator(r, cluster);
    const double layers = double(r.model.layers), rows = double(r.seq_len);
    for (const int64_t ep : {1, 2, 4, 8})
        for (const Recompute recompute : {Recompute::none, Recompute::full}) {
            const Layout layout{.dp = 8, .zero = 1, .micro_batch = 1, .recompute = recompute, .ep = ep};
            const double sent = double(expert_traffic(r.model, ep, int64_t(rows), r.dtype, recompute));
            INFO(flags_of(r, layout));
            EXPECT(estimator(layout).ep ==
                   doctest::Approx(3 * layers * (sent + 8 * 8 * double(ep - 1)) / kRate).epsilon(1e-3));
            // Gradients of experts are summed over edp, of the rest over dp.
            const StageSize stage = stage_size(workload_of(r, layout), config_of(r, layout), 0);
            const double edp = 8 / double(ep);
            const double sums = 4 * (stage.elements * 7 / 8 + stage.ep_elements * (edp - 1) / edp) / kRate;
            EXPECT(estimator(layout).dp == doctest::Approx(sums).epsilon(1e-3));
        }
}

TEST_CASE("the estimate: the update reads and writes what the rank owns") {
    for (const bool narrow : {false, true})
        for (int64_t zero = 0; zero <= 3; ++zero) {
            PlanRequest r = small_request(8);
            if (narrow) r.optimizer = "adamw8bit";
            ClusterModel cluster = ideal(8, 1e15);
            cluster.device.measured["pointwise"] = {0, 1e3};
            const Layout layout{.dp = 8, .zero = zero, .micro_batch = 1};
            const double owned =
                stage_size(workload_of(r, layout), config_of(r, layout), 0).elements / (zero > 0 ? 8 : 1);
            // Masters and two moments, both ways; gradients of 4 bytes, weights of 2.
            EXPECT(Estimator(r, cluster)(layout).update ==
                   doctest::Approx(owned * (2 * (narrow ? 6 + 8.0 / 256 : 12) + 4 + 2) / 1e3).epsilon(1e-3));
        }
}

TEST_CASE("days, hours and price") {
    // 86,400 tokens/s: a token per second of the day, so a day is 86,400^2 tokens.
    const RunCost cost = run_cost(86400.0 * 86400.0 * 3, 86400, 8, 2.5);
    EXPECT(cost.days == doctest::Approx(3));
    EXPECT(cost.gpu_hours == doctest::Approx(3 * 24 * 8));
    EXPECT(cost.price == doctest::Approx(3 * 24 * 8 * 2.5));
    PlanRequest r = small_request(8);  // fp32 weights and both moments; moments of a byte, and their blocks' scales
    EXPECT(checkpoint_bytes(r) == doctest::Approx(12 * double(r.model.parameters())));
    r.optimizer = "adamw8bit";
    EXPECT(checkpoint_bytes(r) == doctest::Approx((6 + 8.0 / 256) * double(r.model.parameters())));
}
