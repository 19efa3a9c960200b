// Attention on a GPU by cuDNN's fused kernels: bf16, head sizes 64, 96 and 128, one document per sequence. cuDNN is
// given a graph: one node, which the headers of its C++ frontend write as the dozen that the library knows; a plan is
// the kernel that its heuristics choose for that graph. Graphs read q, k and v and write out where they are: a tensor's
// strides are free. Three things are not as elsewhere in this program:
//   - the statistics (lse) must be packed as (B, H, T): pack_lse() in attention_cuda.cu;
//   - gradients are bf16, where the caller wants fp32 by way of a copy;
//   - a gradient with the same bits in every run is an option. On Hopper it stores dP, B*H*Tq*Tk numbers in bf16: so a
//     call is divided among key/value heads with their query heads, into as few as keep that below kMostWorkspace.
// libcudnn is loaded when it is first asked for, so that a machine without it runs this program, too. Compiled where
// CMake finds the headers (TRAIN70B_CUDNN), by the host compiler; no test on the emulated GPU reaches it.
#include <cudnn.h>
#include <dlfcn.h>

#define NV_CUDNN_FRONTEND_USE_DYNAMIC_LOADING
#define CUDNN_FRONTEND_SKIP_JSON_LIB
#include <cudnn_frontend.h>

#include <array>
#include <cmath>
#include <map>
#include <memory>

#include "01_single_gpu/core/bf16.h"
#include "01_single_gpu/core/cuda_device.h"
#include "01_single_gpu/core/say.h"
#include "01_single_gpu/ops/attention_cudnn.h"
#include "01_single_gpu/ops/elementwise.h"

void* cudnn_frontend::cudnn_dlhandle = nullptr;  // where the frontend looks for cuDNN's functions

namespace train70b::cuda {

decltype(train70b::copy) copy;

namespace {

namespace fe = cudnn_frontend;
using fe::graph::Graph;

constexpr int64_t kMostWorkspace = 9LL << 28;  // bytes: 16,384 tokens of 4 query heads, and a little more

enum Uid : int64_t { kQ = 1, kK, kV, kOut, kLse, kDout, kDq, kDk, kDv };
using Pointers = std::unordered_map<int64_t, void*>;

// One plan: of `kv_heads` key/value heads and their query heads.
struct Plan {
    Graph graph;
    int64_t kv_heads = 0, workspace = 0;
    std::string problem;  // empty: the plan can run
};

cudnnHandle_t handle() {  // of the one device of this process; make_plan() catches what this throws
    static cudnnHandle_t created = [] {
        cudnnHandle_t made = nullptr;
        const cudnnStatus_t status = fe::detail::create_handle(&made);
        if (status != CUDNN_STATUS_SUCCESS) throw std::runtime_error(fe::detail::get_error_string(status));
        return made;
    }();
    return created;
}

// `heads` of the `row_heads` heads of a row, of `tokens` rows.
fe::graph::Tensor_attributes heads_of(Uid uid, const AttentionShape& s, int64_t heads, int64_t row_heads,
                                      int64_t tokens) {
    const int64_t row = row_heads * s.head_dim;
    fe::graph::Tensor_attributes tensor;
    tensor.set_uid(uid).set_dim({s.batch, heads, tokens, s.head_dim}).set_stride({tokens * row, s.head_dim, row, 1});
    return tensor.set_data_type(fe::DataType_t::BFLOAT16);
}

template <class Attributes>
void set_mask(Attributes& attention, const AttentionShape& s) {
    attention.set_attn_scale(float(1 / std::sqrt(double(s.head_dim))));
    if (!s.causal) return;
    attention.set_diagonal_band_right_bound(0).set_diagonal_alignment(
        s.query_len == s.key_len ? fe::DiagonalAlignment_t::TOP_LEFT : fe::DiagonalAlignment_t::BOTTOM_RIGHT);
}

void describe(Graph& graph, const AttentionShape& s, int64_t kv_heads, bool backward) {
    const int64_t heads = kv_heads * (s.heads / s.kv_heads);
    const auto of_queries = [&](Uid uid) { return heads_of(uid, s, heads, s.heads, s.query_len); };
    const auto of_keys = [&](Uid uid) { return heads_of(uid, s, kv_heads, s.kv_heads, s.key_len); };
    const auto written = [](std::shared_ptr<fe::graph::Tensor_attributes> tensor,
                            const fe::graph::Tensor_attributes& as) {
        tensor->set_output(true).set_uid(as.get_uid()).set_dim(as.get_dim()).set_stride(as.get_stride());
        tensor->set_data_type(as.get_data_type());
    };
    fe::graph::Tensor_attributes packed;
    packed.set_uid(kLse).set_dim({s.batch, heads, s.query_len, 1});
    packed.set_stride({heads * s.query_len, s.query_len, 1, 1}).set_data_type(fe::DataType_t::FLOAT);

    graph.set_io_data_type(fe::DataType_t::BFLOAT16);
    graph.set_intermediate_data_type(fe::DataType_t::FLOAT).set_compute_data_type(fe::DataType_t::FLOAT);
    const auto q = graph.tensor(of_queries(kQ)), k = graph.tensor(of_keys(kK)), v = graph.tensor(of_keys(kV));
    if (!backward) {
        fe::graph::SDPA_attributes attention;
        set_mask(attention.set_name("attention").set_generate_stats(true), s);
        const auto [out, lse] = graph.sdpa(q, k, v, attention);
        written(out, of_queries(kOut));
        written(lse, packed);
        return;
    }
    fe::graph::SDPA_backward_attributes attention;
    set_mask(attention.set_name("attention_backward").set_deterministic_algorithm(true), s);
    const auto [dq, dk, dv] = graph.sdpa_backward(q, k, v, graph.tensor(of_queries(kOut)),
                                                  graph.tensor(of_queries(kDout)), graph.tensor(packed), attention);
    written(dq, of_queries(kDq));
    written(dk, of_keys(kDk));
    written(dv, of_keys(kDv));
}

std::unique_ptr<Plan> make_plan(const AttentionShape& s, int64_t kv_heads, bool backward) {
    auto plan = std::make_unique<Plan>();
    plan->kv_heads = kv_heads;
    const auto [major, minor] = cuda_compute_capability();
    plan->graph.set_sm_version(10 * major + minor);
    try {
        describe(plan->graph, s, kv_heads, backward);
        fe::error_t status = plan->graph.build(handle(), {fe::HeurMode_t::A});
        if (status.is_good()) status = plan->graph.get_workspace_size(plan->workspace);
        if (status.is_bad()) plan->problem = status.get_message();
    } catch (const std::exception& error) { plan->problem = error.what(); }
    if (plan->problem.empty() && plan->workspace > kMostWorkspace)
        plan->problem = fmt::format("its workspace is {}", human_bytes(double(plan->workspace)));
    return plan;
}

// As many heads at once as the workspace allows. Made once for each shape, which takes tens of milliseconds.
Plan& plan_of(const AttentionShape& s, bool backward) {
    using Key = std::array<int64_t, 8>;
    static auto& plans = *new std::map<Key, std::unique_ptr<Plan>>();  // never destroyed: CUDA ends before
    std::unique_ptr<Plan>& plan =
        plans[{s.batch, s.query_len, s.key_len, s.heads, s.kv_heads, s.head_dim, s.causal, backward}];
    if (plan) return *plan;
    for (int64_t parts = 1; parts <= s.kv_heads; ++parts) {
        if (s.kv_heads % parts != 0) continue;
        plan = make_plan(s, s.kv_heads / parts, backward);
        if (plan->workspace <= kMostWorkspace) break;  // also where there is no plan
    }
    if (!plan->problem.empty())
        say("attention{}: cuDNN does not compute {} queries and {} keys of {}/{} heads of {}: {}\n",
            backward ? "_backward" : "", s.query_len, s.key_len, s.heads, s.kv_heads, s.head_dim,
            one_line(plan->problem).substr(0, 200));
    return *plan;
}

void execute(const Plan& plan, Pointers pointers) {
    Tensor workspace({std::max<int64_t>(plan.workspace, 1)}, DType::u8, Device::cuda, Memory::workspace);
    const cudnnStatus_t status = fe::detail::set_stream(handle(), static_cast<cudaStream_t>(cuda_compute_stream()));
    CHECK(status == CUDNN_STATUS_SUCCESS, "cuDNN: {}", fe::detail::get_error_string(status));
    for (const auto& [uid, pointer] : pointers)
        CHECK(reinterpret_cast<uintptr_t>(pointer) % 16 == 0, "tensor {} does not begin on 16 bytes", uid);
    fe::error_t result = plan.graph.execute(handle(), pointers, workspace.raw());
    CHECK(result.is_good(), "cuDNN: {}", result.get_message());
}

}  // namespace

std::string why_no_cudnn() {
    static const std::string problem = [] {
        for (const char* name : {"libcudnn.so.9", TRAIN70B_CUDNN_LIBRARY})
            if (!fe::cudnn_dlhandle && *name) fe::cudnn_dlhandle = dlopen(name, RTLD_NOW);
        if (!fe::cudnn_dlhandle) return std::string("libcudnn.so.9 is not found (LD_LIBRARY_PATH)");
        const size_t version = fe::detail::get_backend_version(), oldest = 91600;
        return version >= oldest ? "" : fmt::format("cuDNN {} is older than {}", version, oldest);
    }();
    return problem;
}

std::string cudnn_version() {
    const size_t version = fe::detail::get_backend_version();
    return fmt::format("{}.{}.{}", version / 10000, version / 100 % 100, version % 100);
}

std::string cudnn_lacks(const AttentionShape& s, bool backward) {
    if (s.batch * s.query_len * s.key_len == 0) return "no rows";
    if (s.causal && s.query_len > s.key_len) return "queries that see no key";
    return plan_of(s, backward).problem;
}

void cudnn_attention(Tensor& out, Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                     const AttentionShape& s) {
    Tensor packed({s.batch, s.heads, s.query_len}, DType::f32, Device::cuda, Memory::workspace);
    execute(plan_of(s, false), {{kQ, q.raw()}, {kK, k.raw()}, {kV, v.raw()}, {kOut, out.raw()}, {kLse, packed.raw()}});
    pack_lse(packed, lse, s, 0, PackLse::back);
}

void cudnn_attention_backward(Tensor& dq, Tensor& dk, Tensor& dv, const Tensor& dout, const Tensor& q, const Tensor& k,
                              const Tensor& v, const Tensor& out, const Tensor& lse, const AttentionShape& s) {
    const Plan& plan = plan_of(s, true);
    const int64_t group = s.heads / s.kv_heads, heads = plan.kv_heads * group;
    const bool wide = dq.dtype() != DType::bf16;
    const auto narrow = [&](const Tensor& x) {
        return wide ? Tensor(x.shape(), DType::bf16, Device::cuda, Memory::workspace) : x;
    };
    Tensor dq16 = narrow(dq), dk16 = narrow(dk), dv16 = narrow(dv);
    Tensor packed({s.batch, heads, s.query_len}, DType::f32, Device::cuda, Memory::workspace);
    for (int64_t first = 0; first < s.kv_heads; first += plan.kv_heads) {
        const auto of_query = [&](const Tensor& x) -> void* { return x.data<bf16>() + first * group * s.head_dim; };
        const auto of_key = [&](const Tensor& x) -> void* { return x.data<bf16>() + first * s.head_dim; };
        pack_lse(packed, lse, s, first * group, PackLse::there);
        execute(plan, {{kQ, of_query(q)},
                       {kK, of_key(k)},
                       {kV, of_key(v)},
                       {kOut, of_query(out)},
                       {kDout, of_query(dout)},
                       {kLse, packed.raw()},
                       {kDq, of_query(dq16)},
                       {kDk, of_key(dk16)},
                       {kDv, of_key(dv16)}});
    }
    if (!wide) return;
    cuda::copy(dq, dq16);
    cuda::copy(dk, dk16);
    cuda::copy(dv, dv16);
}

}  // namespace train70b::cuda
