// From the flags to a Comm of all ranks: chooses the backend, this rank's GPU and its number of CPU threads.
#include "02_data_parallel/runtime/connect.h"

#include <mpi.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>
#include <optional>
#include <utility>

#include "01_single_gpu/core/blas_core.h"
#include "01_single_gpu/core/cpu_threads.h"
#include "01_single_gpu/core/cuda_device.h"
#include "01_single_gpu/core/environment.h"
#include "01_single_gpu/core/launcher.h"
#include "01_single_gpu/core/say.h"
#include "01_single_gpu/ops/matmul.h"
#include "02_data_parallel/runtime/mpi_group.h"
#include "02_data_parallel/runtime/watchdog.h"

namespace train70b {

namespace {

// The ranks on this machine.
struct Node {
    int rank = 0, size = 1;
    MPI_Comm comm = MPI_COMM_NULL;

    Node() {
        if (!mpi_is_started()) return;
        MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, this_rank, MPI_INFO_NULL, &comm);
        MPI_Comm_rank(comm, &rank);
        MPI_Comm_size(comm, &size);
    }
    ~Node() {
        if (comm != MPI_COMM_NULL) MPI_Comm_free(&comm);
    }
    Node(const Node&) = delete;
};

// Allocates the heartbeat counters of this node's ranks (watchdog.h) in shared memory. The MPI window keeps them until
// MPI_Finalize.
void watch_this_node(const Node& node) {
    static bool watched = false;
    if (std::exchange(watched, true) || node.size == 1) return;
    using Count = std::atomic<uint64_t>;
    static_assert(Count::is_always_lock_free);  // required between processes
    MPI_Win window = MPI_WIN_NULL;
    void* local = nullptr;
    MPI_Win_allocate_shared(sizeof(Count), 1, MPI_INFO_NULL, node.comm, &local, &window);
    new (local) Count(0);
    std::vector<int> ranks(node.size);
    MPI_Allgather(&this_rank, 1, MPI_INT, ranks.data(), 1, MPI_INT, node.comm);  // also: all counters exist now
    std::vector<Watchdog::Beat> beats;
    for (int i = 0; i < node.size; ++i) {
        MPI_Aint bytes = 0;
        int unit = 0;
        void* counter = nullptr;
        MPI_Win_shared_query(window, i, &bytes, &unit, &counter);
        beats.push_back({ranks[size_t(i)], static_cast<Count*>(counter)});
    }
    watchdog->watch(std::move(beats));
}

// The cores of the node are divided among its ranks, as far as the launcher has not done it.
void divide_cores(const Node& node) {
    const CoreSet own = cores_at_start();
    std::vector<CoreSet> cores(size_t(node.size), own);
    if (node.size > 1) MPI_Allgather(&own, sizeof own, MPI_BYTE, cores.data(), sizeof own, MPI_BYTE, node.comm);
    use_cpu_threads(ranks_that_share(cores, node.rank));
    const std::string idle = idle_cores(cores, cores_within_reach());
    if (!idle.empty()) say("{}\n", idle);
}

// On a mixed cluster, prints which ranks compute products with which kernels.
void compare_kernels() {
    const std::string fp32 = cpu::product_kernels(DType::f32), fp64 = cpu::product_kernels(DType::f64);
    const std::string mixed = mixed_kernels(gather_words(fp32 == fp64 ? fp32 : fp32 + " and " + fp64));
    if (!mixed.empty()) say("{}\n", mixed);
}

void select_gpu([[maybe_unused]] const Node& node) {
#if TRAIN70B_CUDA
    cuda_use_device(node.rank % cuda_device_count());
    cuda_compute_stream();  // creates the device's context and loads the kernels
#endif
}

// Whether any two ranks of a node use the same GPU. NCCL requires one GPU per rank, and needs to see the others.
bool share_gpus([[maybe_unused]] const Node& node) {
    bool shared = false;
#if TRAIN70B_CUDA
    if (node.size == 1) return over_all_ranks(0, MPI_MAX) > 0;
    const std::vector<std::string> all = gather_text(node.comm, cuda_device_id());
    shared = std::count(all.begin(), all.end(), all[size_t(node.rank)]) > 1;
    if (!shared && cuda_device_count() == 1)
        say("comm: each rank sees only its own GPU, which can keep NCCL from NVLink ({})\n",
            "try srun --gpus-per-node instead of --gpus-per-task or --gpu-bind");
#endif
    return over_all_ranks(shared, MPI_MAX) > 0;
}

// Resolves --comm auto, or explains why the choice is invalid.
std::string choose_backend(const CommOptions& o, Device device, const Node& node) {
    const std::string& name = o.backend;
    if (over_all_ranks(int(device), MPI_MIN) != over_all_ranks(int(device), MPI_MAX))
        usage_error("--device auto: some ranks have a GPU and others do not; use --device cpu");
    const bool shared = device == Device::cuda && share_gpus(node);
    if (name != "fake") {
        if (o.fake_world > 0) usage_error("--fake-world {} requires --comm fake", o.fake_world);
        if (o.fake_rank > 0) usage_error("--fake-rank {} requires --comm fake", o.fake_rank);
    } else {
        if (o.fake_world == 0) usage_error("--comm fake requires --fake-world N, the number of simulated ranks");
        constexpr int64_t kMost = 1 << 20;
        if (o.fake_world > kMost) usage_error("--fake-world {}: at most {} ranks", o.fake_world, kMost);
        if (o.fake_rank >= o.fake_world)
            usage_error("--fake-rank {} of --fake-world {}: valid ranks are 0 to {}", o.fake_rank, o.fake_world,
                        o.fake_world - 1);
        if (const Launch started = launch(); started.ranks > 1)
            usage_error("--comm fake runs one simulated rank in one process, and {} started {}: start it without",
                        started.launcher, started.ranks);
        return name;
    }
    if (device != Device::cuda) {
        if (name == "nccl" || name == "staged")
            usage_error("--comm {} requires device tensors, but {}; use --comm mpi", name,
                        why_no_cuda().empty() ? "--device is cpu" : why_no_cuda());
        return "mpi";
    }
    if (name == "mpi") usage_error("--comm mpi requires host tensors; with --device cuda use --comm nccl or staged");
    // NCCL_HOSTID makes NCCL accept ranks that share a GPU, which is for testing only.
    if (name == "nccl" && shared && !std::getenv("NCCL_HOSTID"))
        usage_error("--comm nccl requires one GPU per rank, and ranks of a node share one; use --comm staged");
    if (name == "auto" && shared)
        say("comm: staged through host memory, because ranks share a GPU; nccl requires one GPU per rank\n");
    return name != "auto" ? name : shared ? "staged" : "nccl";
}

std::unique_ptr<Backend> make_backend(const std::string& name, [[maybe_unused]] const CommOptions& o) {
    if (name == "fake") return make_fake_backend(int(o.fake_rank), int(o.fake_world));
#if TRAIN70B_CUDA
    if (name == "nccl") {
        CommStreams streams = o.streams == "group" ? CommStreams::group : CommStreams::one;
        say("{}", nccl_text(streams));
        return make_nccl_backend(streams);
    }
    if (name == "staged") return make_staged_backend();
#endif
    return make_mpi_backend();
}

}  // namespace

Comm connect(const CommOptions& options, Device device) {
    if (options.backend != "fake") start_mpi(options.timeout);
    watchdog->set_timeout(options.timeout);
    struct Logged {  // until the end of this function: a usage error ends it, too
        const uint64_t record = collective_log().add("connect", std::source_location::current());
        Logged() { collective_log().set(record, CollectiveLog::State::running); }
        ~Logged() { collective_log().set(record, CollectiveLog::State::done); }
    };
    const Logged logged;
    const Node node;
    watch_this_node(node);
    divide_cores(node);
    std::shared_ptr<void> starts;  // a cold file system, or a driver that compiles, may take minutes
    if (device == Device::cuda) starts = watchdog->pause();
    if (device == Device::cuda) select_gpu(node);
    if (device == Device::cpu) compare_kernels();
    const std::string name = choose_backend(options, device, node);  // waits for all ranks
    starts.reset();
    std::unique_ptr<Backend> backend = make_backend(name, options);
    CommSettings settings{options.all_reduce, options.check, options.ranks_per_node};
    if (settings.all_reduce.empty()) settings.all_reduce = backend->on_stream() ? "library" : "ring";
    return make_comm(std::move(backend), settings);
}

Comm connect(Device device) { return connect(CommOptions(), device); }

int64_t ranks_on_this_node() { return Node().size; }

std::vector<std::string> gather_words(const std::string& local) {
    return mpi_is_started() ? gather_text(MPI_COMM_WORLD, local) : std::vector{local};
}

std::vector<std::string> hosts_of_ranks() {
    char name[MPI_MAX_PROCESSOR_NAME] = {};
    ::gethostname(name, sizeof name - 1);
    return gather_words(name);
}

void select_gpu() { select_gpu(Node()); }

}  // namespace train70b
