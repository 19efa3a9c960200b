// 08_3d_full/minimal.cpp: the techniques on a mesh.
#define main minimal_main
#include "08_3d_full/minimal.cpp"
#undef main
#include "tests/minimal_ranks.h"

using namespace train70b;
using namespace train70b::test;

namespace {
struct OwnShard {
    const minimal::Training& training;
    std::pair<Tensor, int64_t> operator()(size_t unit) const {
        const Tensor& grad = training.grad_shard[unit];
        return {grad, training.groups.dp_cp.rank() * grad.size()};
    }
};

void check(Failures& failures, const minimal::Sizes& s, const Session& complete, const minimal::Mesh& mesh,
           const Comm& ranks) {
    minimal::Training training(s, ranks, mesh);
    const Comparison result = compare(training, complete, OwnShard{training});
    expect_equal(failures, result, s.dtype, fmt::format("tp {} cp {} dp {} pp {}", mesh.tp, mesh.cp, mesh.dp, mesh.pp));
    const LlamaConfig c = options_of(s, 1).model;  // norms are on every tp rank
    const double vectors = double(c.layers * c.block_vectors() + c.hidden), all = double(c.parameters());
    failures.expect(ranks.sum(result.elements) == all + vectors * double(mesh.tp - 1), "elements left out");
}
}  // namespace

TEST_CASE("8 and 16 ranks, and meshes with other axes: the complete program's losses, norms and gradients, to 1e-10") {
    if (kEmulated) return;
    const minimal::Sizes s = small_sizes(Device::cpu, 4);
    const auto whole_program = complete(s);
    Failures failures;
    for (const minimal::Mesh& mesh :
         {minimal::mesh_of(8), minimal::mesh_of(16), minimal::Mesh{.tp = 1, .cp = 4, .dp = 2, .pp = 1},
          minimal::Mesh{.tp = 4, .cp = 1, .dp = 1, .pp = 4}})
        on_first_ranks(int(mesh.size()), [&](const Comm& ranks) { check(failures, s, *whole_program, mesh, ranks); });
    EXPECT_NONE(failures);
}

TEST_CASE("on a GPU, to 5e-6") {
    if (!has_gpu()) return;
    const minimal::Sizes s = small_sizes(Device::cuda);
    const auto whole_program = complete(s, 2);
    on_gpus(1, [&](Failures& failures, int64_t, const Comm& ranks) {
        if (ranks.size() <= 8) check(failures, s, *whole_program, minimal::mesh_of(ranks.size()), ranks);
    });
}
