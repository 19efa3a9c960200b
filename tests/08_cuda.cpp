// Layouts of all techniques on device tensors, on 4 ranks, over every backend that can work here (how to start it:
// tests/02_cuda.cpp).
#include "02_data_parallel/runtime/ctas.h"
#include "08_3d_full/watch/probe.h"
#include "tests/checkpoints.h"
#include "tests/device_comms.h"

using namespace train70b;
using namespace train70b::test;

namespace {

struct Layout {
    Mesh mesh;
    const char* pipeline = "1f1b";
    ZeroOptions zero;
    TensorParallelOptions tensor;
    const char* context = "zigzag";
    const char* recompute = "none";
    bool experts = false;

    ParallelConfig config() const {
        ParallelConfig config;
        config.mesh = mesh;
        config.pipeline.schedule = pipeline;
        config.zero = zero;
        config.tensor = tensor;
        config.context.algorithm = context;
        return config;
    }
};

const Layout kLayouts[] = {
    {.mesh = {.dp = 4}, .zero = {.stage = 3, .offload = Offload::all}},
    {.mesh = {.tp = 2, .dp = 2},
     .zero = {.stage = 3, .prefetch = 1},
     .tensor = {true, false},
     .recompute = "selective"},
    {.mesh = {.tp = 2, .cp = 2}, .zero = {.stage = 1}, .tensor = {true, false}, .context = "ring"},
    {.mesh = {.dp = 2, .pp = 2}, .pipeline = "zero-bubble", .zero = {.stage = 2}},
    {.mesh = {.tp = 2, .pp = 2}, .pipeline = "interleaved", .tensor = {true, true}},
    {.mesh = {.cp = 2, .pp = 2}, .zero = {.stage = 1}, .context = "ulysses", .recompute = "full"},
    {.mesh = {.dp = 4, .ep = 2}, .zero = {.stage = 3}, .experts = true},
    {.mesh = {.tp = 2, .dp = 2, .ep = 4}, .tensor = {true, false}, .recompute = "full", .experts = true},
};

bool can_run() {
    if (!has_gpu() || world().size() == 4) return has_gpu();
    if (this_rank == 0) fmt::print("NOT TESTED: {} ranks, and the layouts are of 4 (mpirun -np 4)\n", world().size());
    return false;
}

}  // namespace

TEST_CASE("eight layouts on a GPU: one rank's losses, gradient norms and gradients") {
    if (!can_run()) return;
    const Text text;
    for (int64_t i = 0; i < std::ssize(kLayouts); ++i) {
        if (!in_gpu_slice(i) && !in_gpu_slice(i + std::ssize(kLayouts))) continue;  // one or two in each slice
        const Layout& layout = kLayouts[i];
        TrainOptions o = tiny_on_gpu(text);
        o.model.layers = !kSmall || layout.pipeline == std::string("interleaved") ? 4 : layout.mesh.pp;
        if (kSmall || layout.experts) o.steps = 1;  // of experts a later choice may differ in fp32
        if (layout.experts) o.model.experts = {.count = 4, .top_k = 2, .ffn = 12, .shared = 2, .capacity_factor = 1};
        o.recompute = layout.recompute;
        const std::unique_ptr<Session> one = run_on_one_rank(reference_of(o));
        o.micro_batch = 1;
        for (const Comm& comm : device_comms()) {
            ComposedRun layout_run(o, comm, layout.config());
            layout_run.session.run();
            const Farthest deviation = this_rank == 0 ? worst_deviation(layout_run.session, *one) : Farthest();
            INFO(comm.backend(), ", ", layout.mesh.text(), ", ", std::string(layout.pipeline), ", ZeRO ",
                 layout.zero.stage, ": ", deviation);
            EXPECT_EVERYWHERE(deviation <= 5e-6);
        }
    }
}

#if TRAIN70B_CUDA
TEST_CASE("the probe's messages go through communicators that are as wide as those of training") {
    if (!can_run() || !kEmulated || !nccl_works()) return;
    const Comm comm = nccl_comm(CommStreams::group);
    const MeshComms ranks = split(comm, {.cp = 2, .pp = 2});
    std::map<int, uint64_t> before;
    const auto sent_by = [&](GroupLoad load) { return emulated_nccl_bytes(ctas_of(load)) - before[int(load)]; };
    for (const GroupLoad load : {GroupLoad::heavy, GroupLoad::light, GroupLoad::channel})
        before[int(load)] = sent_by(load);
    const ProbeResult result = probe(comm, ranks, Device::cuda, DType::f32, {64, 4096});
    cuda_synchronize();
    EXPECT_EVERYWHERE(sent_by(GroupLoad::light) == 0 && sent_by(GroupLoad::heavy) >= 4 * 4096 &&
                      sent_by(GroupLoad::channel) >= 4 * 4096);
}
#endif

TEST_CASE("a checkpoint of device tensors: the resumed steps are the uninterrupted run's, bit for bit") {
    if (!can_run()) return;
    const Text text;
    TrainOptions o = tiny_on_gpu(text);
    o.dtype = "bf16";
    o.micro_batch = 1;
    o.steps = kSmall ? 2 : 4;
    ParallelConfig config{.mesh = {.tp = 2, .dp = 2}};
    config.zero.stage = 1;
    config.optimizer = "adamw8bit";
    for (const Comm& comm : device_comms()) {
        const SharedFolder shared;
        const std::vector<double> all = history_of(o, config, {}, comm);
        history_of(o, config, {.dir = shared / "d", .stop_after = o.steps / 2}, comm);
        const std::vector<double> resumed = history_of(o, config, {.dir = shared / "d", .resume = true}, comm);
        INFO(comm.backend());
        EXPECT_EVERYWHERE(resumed == std::vector<double>(all.begin() + o.steps, all.end()));
    }
}
