// The parity grid: layouts that mix every technique with every other, held to one rank: losses and
// gradient norms over four steps, every parameter's gradient at step 1, and what each rank books, to the byte.
#include "tests/composed.h"
#include "tests/grid_layouts.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("the mesh: places and ranks are each other's inverse, and groups are those that differ along one axis") {
    const Mesh mesh{.tp = 2, .cp = 3, .dp = 4, .pp = 5};
    for (int64_t rank = 0; rank < mesh.size(); ++rank) EXPECT(mesh.rank(mesh.coordinate(rank)) == rank);
    EXPECT(Mesh{.tp = 4, .dp = 2, .pp = 2}.rank({3, 0, 1, 0}) == 7);
    EXPECT(mesh.coordinate(1) == Mesh::Coordinates{1, 0, 0, 0});
    EXPECT(mesh.coordinate(2) == Mesh::Coordinates{0, 1, 0, 0});
    EXPECT(mesh.coordinate(6) == Mesh::Coordinates{0, 0, 1, 0});
    EXPECT(mesh.coordinate(24) == Mesh::Coordinates{0, 0, 0, 1});
    const Mesh sixteen{.tp = 2, .cp = 2, .dp = 2, .pp = 2};
    const MeshComms comms = split(world(), sixteen);
    const Mesh::Coordinates at = sixteen.coordinate(world().rank());
    EXPECT_EVERYWHERE(comms.tp.size() == 2 && comms.tp.rank() == at.tp);
    EXPECT_EVERYWHERE(comms.cp.size() == 2 && comms.cp.rank() == at.cp);
    EXPECT_EVERYWHERE(comms.pp.size() == 2 && comms.pp.rank() == at.pp);
    EXPECT_EVERYWHERE(comms.dp_cp.size() == 4 && comms.dp_cp.rank() == at.dp * 2 + at.cp);
    EXPECT_USAGE_ERROR(mesh_of({.tp = 3, .dp = 0}, 16),
                       "16 ranks are not divisible by --tp 3 x --cp 1 x --pp 1 = 3 (try mpirun -np 18)");
    EXPECT_USAGE_ERROR(mesh_of({.tp = 2, .dp = 4}, 16), "= 8 ranks, but there are 16 (try mpirun -np 8, or --dp 8)");
    EXPECT(mesh_of({.tp = 2, .dp = 0, .pp = 2}, 16).dp == 4);
}

// bf16: the farthest of all 40 is 1.1e-2 (a gradient), because roundings fall elsewhere; the bound is about twice that.
constexpr Parity kParityOfMixes[] = {kParity[0], kParity[1], {"bf16", 2e-2, 4}};

TEST_CASE("the parity grid: every layout is one rank's run, to 1e-10 in fp64; every fourth to 5e-6 in fp32, and bf16") {
    const Text text;
    REQUIRE(world().size() == 16);
    for (const Parity& parity : kParityOfMixes) {
        std::map<std::tuple<int64_t, std::string, int64_t>, std::unique_ptr<Session>> ones;
        int64_t count = 0, number = 0;
        double worst = 0;
        for (const GridLayout& layout : grid_layouts()) {
            const int64_t at = number++;
            if (parity.skips(at) || !in_slice(at / parity.each) || !in_sanitized_slice(at / 8)) continue;
            TrainOptions o = grid_shape(text);
            if (!all_slices()) o.steps = 3;
            o.dtype = parity.dtype;
            const int64_t family = at / 4 % 3;
            layout.use_family(o.model, family);
            o.recompute = layout.recompute;
            const auto key = std::tuple(layout.kv_heads, std::string(layout.recompute), family);
            if (!ones.contains(key)) ones[key] = run_on_one_rank(o);
            ComposedRun run(o, world(), layout.config());
            run.session.run();
            const Farthest deviation = ones[key] ? worst_deviation(run.session, *ones[key]) : Farthest();
            INFO(o.dtype, ", ", layout.text(), ", family ", family, ": ", deviation);
            EXPECT_EVERYWHERE(deviation <= parity.bound);
            EXPECT_EVERYWHERE(run.books_its_formulas());
            worst = std::max(worst, double(deviation));
            ++count;
        }
        if (world().rank() == 0)
            fmt::print("{}: {} layouts, the farthest from one rank's run by {:.1e}\n", parity.dtype, count, worst);
        if (kThorough) EXPECT(count >= (all_slices() ? 40 : 4) / parity.each);
    }
}

// Several partial_grad_groups on a rank: with sequence parallelism the norms', with one key/value head its copies'.
TEST_CASE("tied embeddings in composed layouts: one rank's run, to 1e-10 in fp64") {
    const Text text;
    TrainOptions o = grid_shape(text);
    if (!all_slices()) o.steps = 3;
    o.dtype = "fp64";
    o.model.tied = true;
    o.model.kv_heads = 1;
    const auto one = run_on_one_rank(o);
    int64_t number = 0;
    for (const GridLayout& layout : std::vector<GridLayout>{
             {.mesh = {.tp = 2, .cp = 2, .dp = 2, .pp = 2}, .pipeline = "interleaved", .zero = 3, .sequence = true},
             {.mesh = {.tp = 2, .cp = 2, .dp = 2, .pp = 2}, .pipeline = "zero-bubble", .zero = 2, .overlap = true},
             {.mesh = {.tp = 4, .cp = 2, .pp = 2}, .pipeline = "gpipe", .zero = 1, .sequence = true},
             {.mesh = {.dp = 4, .pp = 4}, .pipeline = "zero-bubble", .zero = 3, .hybrid_shard = 2},
             {.mesh = {.dp = 4, .pp = 4}, .zero = 3, .offload = Offload::all},
             {.mesh = {.dp = 4, .pp = 4}, .zero = 2, .offload = Offload::nvme},
             {.mesh = {.tp = 4, .dp = 4}, .zero = 3, .sequence = true, .overlap = true},
             {.mesh = {.cp = 4, .dp = 4}, .zero = 2},
             {.mesh = {.tp = 4, .pp = 4}, .sequence = true},
             {.mesh = {.tp = 2, .cp = 2, .dp = 2, .pp = 2}, .pipeline = "zb-v", .zero = 3, .sequence = true},
             {.mesh = {.tp = 2, .dp = 4, .pp = 2}, .pipeline = "dualpipe-v", .zero = 2},
             {.mesh = {.dp = 8, .pp = 2}, .pipeline = "zb-v", .zero = 3, .hybrid_shard = 2},
             {.mesh = {.tp = 4, .dp = 2, .pp = 2}, .pipeline = "dualpipe-v", .zero = 1}}) {
        const int64_t at = number++;
        if (!in_quarter(at) || !in_sanitized_slice(at / 4)) continue;
        ComposedRun run(o, world(), layout.config());
        run.session.run();
        const Farthest deviation = one ? worst_deviation(run.session, *one) : Farthest();
        INFO(layout.text(), ": ", deviation);
        EXPECT_EVERYWHERE(deviation <= 1e-10);
        EXPECT_EVERYWHERE(run.books_its_formulas());
    }
}

TEST_CASE("on one rank: chapter 01's run, bit for bit") {
    const Text text;
    TrainOptions o = grid_shape(text);
    o.global_batch = 2;  // every rank has all of it
    o.steps = 2;
    Session one(o);
    one.run();
    ComposedRun run(o, Comm(), {});
    run.session.run();
    EXPECT_EVERYWHERE(run.session.history() == one.history());
    EXPECT_EVERYWHERE(run.session.weights() == one.weights());
    EXPECT_EVERYWHERE(run.session.gradients == one.gradients);
}
