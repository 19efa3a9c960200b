// Muon over ranks that hold parts of matrices: parts, owners, and training as on one rank.
#include "03_zero/complete/matrix_owners.h"
#include "03_zero/complete/zero.h"
#include "tests/parallel.h"

using namespace train70b;
using namespace train70b::test;

using Part = MatrixOwners::Part;
using Holders = MatrixOwners::Holders;

TEST_CASE("parts of a shard: cut where a matrix of a stack ends, counted slab by slab of tensor-parallel columns") {
    Param param = make_param("model.layers.0.mlp.experts.down_proj", {12, 6}, 1);
    param.matrices = 3;
    param.local = {.row_begin = 4, .rows = 8, .col_begin = 2, .cols = 2};  // matrices 1 and 2, the second slab of three
    const Tensor values({11}, DType::f64, Device::cpu, Memory::workspace);
    const std::vector<Part> parts = MatrixOwners::parts_of({&param, 3, values, values});
    REQUIRE(parts.size() == 2);
    const uint64_t key = param.key(0) >> 11;
    EXPECT(parts[0] == Part{key, 1, 4, 6, 2, 8 + 3, 5});
    EXPECT(parts[1] == Part{key, 2, 4, 6, 2, 8 + 0, 6});
}

TEST_CASE("owners: one for each matrix, by cost; a part that several ranks hold is theirs together") {
    const Part large{1, 0, 64, 64, 64, 0, 64 * 64}, half{2, 0, 8, 8, 8, 0, 32}, rest{2, 0, 8, 8, 8, 32, 32};
    const Part other{3, 0, 8, 8, 8, 0, 64}, third{4, 0, 8, 8, 8, 0, 64};
    const std::vector<Holders> plan = MatrixOwners::plan({{large, half, other}, {large, rest, other, third}, {}});
    REQUIRE(plan.size() == 5);
    const auto owner = [&](const Part& part) {
        for (const Holders& holders : plan)
            if (holders.part == part) return holders.owner;
        return -1;
    };
    EXPECT(plan[0].ranks == std::vector<int>{0, 1});
    EXPECT(plan[1].ranks == std::vector<int>{0});
    EXPECT((plan[0].from == 0 && plan[1].from == 0 && plan[2].from == 1));
    EXPECT((owner(large) == 0 && owner(half) == 1 && owner(rest) == 1 && owner(other) == 2 && owner(third) == 1));
}

TEST_CASE("Muon: ZeRO 0 to 3, hybrid and whole, and data parallelism are one rank's run in fp64 to 1e-10") {
    const Text text;
    TrainOptions o = tiny(text);
    o.dtype = "fp64";
    o.optimizer = "muon";
    o.steps = 5;
    o.micro_batch = o.global_batch / world().size();
    const auto one = run_on_one_rank(o);
    for (const ZeroOptions& zero : {ZeroOptions{.stage = 0},
                                    {.stage = 1},
                                    {.stage = 2},
                                    {.stage = 3},
                                    {.stage = 2, .hybrid_shard = 2},
                                    {.stage = 3, .hybrid_shard = 2}}) {
        std::unique_ptr<Zero> store;
        Session session(o, [&](Session& s) {
            const auto owners = std::make_shared<MatrixOwners>(world(), s.model);
            store = std::make_unique<Zero>(s.model, world(), zero, Muon::maker(o.adamw(), owners));
            use_store(s.trainer, *store, world());
        });
        session.run();
        const Farthest deviation = one ? worst_deviation(session, *one) : Farthest();
        INFO("stage ", zero.stage, ", hybrid ", zero.hybrid_shard, ": ", deviation);
        EXPECT_EVERYWHERE(deviation <= 1e-10);
    }
}
