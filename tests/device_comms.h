#pragma once
// The backends of device tensors that can work on this machine. Without a GPU nothing is tested, and the output says
// so.
#include "01_single_gpu/core/cuda_device.h"
#include "tests/parallel.h"

namespace train70b::test {

// Collective. The first call selects this rank's GPU: a test case asks before it creates anything there.
inline bool has_gpu() {
    static const bool has = [] {
        if (why_no_cuda().empty())
            select_gpu();
        else if (this_rank == 0)
            fmt::print("NOT TESTED: {}\n", why_no_cuda());
        return why_no_cuda().empty();
    }();
    return has;
}

#if TRAIN70B_CUDA
// The ranks are on two nodes, for the algorithms that know them.
inline Comm on_two_nodes(std::unique_ptr<Backend> backend) {
    backend->ranks_per_node = (world().size() + 1) / 2;
    return make_comm(std::move(backend), {.check = true});
}
inline bool nccl_works() { return std::getenv("NCCL_HOSTID") || world().size() <= cuda_device_count(); }
inline Comm nccl_comm(CommStreams streams) { return on_two_nodes(make_nccl_backend(streams)); }
#endif

// The backends that can work here, each with a name for reports.
inline std::vector<Comm> device_comms() {
    std::vector<Comm> list;
#if TRAIN70B_CUDA
    list.push_back(on_two_nodes(make_staged_backend()));
    if (nccl_works())
        list.push_back(nccl_comm(CommStreams::group));
    else if (this_rank == 0)
        fmt::print("NOT TESTED: nccl ({} ranks, {} GPU, no NCCL_HOSTID)\n", world().size(), cuda_device_count());
#endif
    return list;
}

// Two sequences per rank, of a shape whose products begin aligned. A slice on the emulated GPU compares with a run on
// the CPU, which chapter 01's tests hold equal.
inline TrainOptions tiny_on_gpu(const Text& text) {
    TrainOptions o = tiny(text);
    o.device = "cuda";
    o.lr = o.min_lr = 1e-3;
    if (kEmulated) o.steps = 2;
    o.model.hidden = 64;
    o.model.ffn = 96;
    o.global_batch = o.micro_batch = 2 * world().size();
    if (kSmall) {
        o.model.layers = 1;
        o.model.hidden = 32;
        o.model.ffn = 64;
        o.model.vocab = 128;
        o.seq_len = 8;
    }
    return o;
}
inline TrainOptions reference_of(TrainOptions o) {
    if (kSmall) o.device = "cpu";
    return o;
}

}  // namespace train70b::test
