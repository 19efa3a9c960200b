#include "02_data_parallel/runtime/launch.h"

#include <mpi.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <utility>

#include "01_single_gpu/core/cpu_setup.h"
#include "02_data_parallel/runtime/watchdog.h"

namespace train70b {

std::unique_ptr<Watchdog> watchdog;

namespace {

// --comm-timeout before the flags are parsed: MPI_Init itself waits for all ranks.
double early_timeout(int argc, char** argv) {
    const std::string_view flag = "--comm-timeout";
    for (int i = 1; i < argc; ++i) {
        const std::string_view word = argv[i];
        const char* value = nullptr;
        if (word == flag && i + 1 < argc) value = argv[i + 1];
        if (word.starts_with(flag) && word.substr(flag.size()).starts_with("=")) value = argv[i] + flag.size() + 1;
        if (value)
            if (const double seconds = std::atof(value); seconds > 0) return seconds;
    }
    return CommOptions().timeout;
}

int world_size() {
    int size = 1;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    return size;
}

// The processes that share this one's memory.
struct Node {
    int rank = 0, size = 1;
    MPI_Comm comm = MPI_COMM_NULL;

    Node() {
        MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, this_rank, MPI_INFO_NULL, &comm);
        MPI_Comm_rank(comm, &rank);
        MPI_Comm_size(comm, &size);
    }
    ~Node() { MPI_Comm_free(&comm); }
    Node(const Node&) = delete;
};

int over_all_ranks(int value, MPI_Op op) {
    int result = 0;
    MPI_Allreduce(&value, &result, 1, MPI_INT, op, MPI_COMM_WORLD);
    return result;
}

// The memory for the beats of this node's ranks (watchdog.h), which its MPI window keeps until MPI_Finalize.
void watch_this_node(const Node& node) {
    static bool watched = false;
    if (std::exchange(watched, true) || node.size == 1) return;
    using Count = std::atomic<uint64_t>;
    static_assert(Count::is_always_lock_free);  // or it would not work between processes
    MPI_Win window = MPI_WIN_NULL;
    void* mine = nullptr;
    MPI_Win_allocate_shared(sizeof(Count), 1, MPI_INFO_NULL, node.comm, &mine, &window);
    new (mine) Count(0);
    std::vector<int> ranks(node.size);
    MPI_Allgather(&this_rank, 1, MPI_INT, ranks.data(), 1, MPI_INT, node.comm);  // and all counts are there
    std::vector<Watchdog::Beat> beats;
    for (int i = 0; i < node.size; ++i) {
        MPI_Aint bytes = 0;
        int unit = 0;
        void* place = nullptr;
        MPI_Win_shared_query(window, i, &bytes, &unit, &place);
        beats.push_back({ranks[size_t(i)], static_cast<Count*>(place)});
    }
    watchdog->watch(std::move(beats));
}

// True when every rank comes here within some seconds. A rank that ends with an error of its own may find the others in
// the middle of a collective.
bool all_arrive() {
    MPI_Request request = MPI_REQUEST_NULL;
    MPI_Ibarrier(MPI_COMM_WORLD, &request);
    const double begin = now_seconds();
    for (int done = 0; now_seconds() - begin < 5;) {
        MPI_Test(&request, &done, MPI_STATUS_IGNORE);
        if (done) return true;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return false;
}

// On a mixed cluster: says which ranks run which kernels.
void compare_blas_cores() {
    constexpr int kWidth = 32;
    std::string mine = blas_core();
    mine.resize(kWidth);
    std::string all(size_t(world_size()) * kWidth, '\0');
    MPI_Gather(mine.data(), kWidth, MPI_CHAR, all.data(), kWidth, MPI_CHAR, 0, MPI_COMM_WORLD);
    if (this_rank != 0) return;
    std::vector<std::string> cores;
    for (size_t begin = 0; begin < all.size(); begin += kWidth) cores.push_back(all.substr(begin, kWidth).c_str());
    const std::string mixed = mixed_blas_cores(cores);
    if (!mixed.empty()) say("{}\n", mixed);
}

// Whether any two ranks of a node use the same GPU. NCCL takes one rank per GPU.
bool share_gpus([[maybe_unused]] const Node& node) {
    bool shared = false;
#if TRAIN70B_CUDA
    constexpr int kLength = 64;
    std::string mine = cuda_device_id();
    mine.resize(kLength);
    std::vector<char> all(size_t(kLength) * node.size);
    MPI_Allgather(mine.data(), kLength, MPI_CHAR, all.data(), kLength, MPI_CHAR, node.comm);
    for (int i = 0; i < node.size; ++i)
        shared = shared || (i != node.rank && mine.compare(0, kLength, &all[size_t(kLength) * i], kLength) == 0);
#endif
    return over_all_ranks(shared, MPI_MAX) > 0;
}

// The transport that --comm and the device come to, and the first thing that speaks against it.
std::string choose_transport(const CommOptions& o, Device device, const Node& node) {
    const std::string& name = o.transport;
    if (over_all_ranks(int(device), MPI_MIN) != over_all_ranks(int(device), MPI_MAX))
        usage_error("--device auto: some ranks have a GPU and some have none; --device cpu works");
    const bool shared = device == Device::cuda && share_gpus(node);
    if (name != "fake") {
        if (o.fake_world > 0) usage_error("--fake-world {}: belongs to --comm fake", o.fake_world);
        if (o.fake_rank > 0) usage_error("--fake-rank {}: belongs to --comm fake", o.fake_rank);
    } else {
        if (o.fake_world == 0) usage_error("--comm fake: how many ranks? add --fake-world N");
        constexpr int64_t kMost = 1 << 20;
        if (o.fake_world > kMost) usage_error("--fake-world {}: at most {} ranks", o.fake_world, kMost);
        if (o.fake_rank >= o.fake_world)
            usage_error("--fake-rank {} of --fake-world {}: ranks count from 0 to {}", o.fake_rank, o.fake_world,
                        o.fake_world - 1);
        if (world_size() > 1)
            usage_error("--comm fake: one process stands for one rank; start it without mpirun -np {}", world_size());
        return name;
    }
    if (device == Device::cpu) {
        if (name == "nccl" || name == "staged")
            usage_error("--comm {}: moves tensors of a GPU, and {}; --comm mpi works here", name,
                        why_no_cuda().empty() ? "--device is cpu" : why_no_cuda());
        return "mpi";
    }
    if (name == "mpi") usage_error("--comm mpi: moves tensors of the host; with --device cuda: --comm nccl or staged");
    // With NCCL_HOSTID set NCCL's check is fooled on purpose, which is for testing only.
    if (name == "nccl" && shared && !std::getenv("NCCL_HOSTID"))
        usage_error("--comm nccl: ranks of one node share a GPU, and NCCL takes one GPU per rank; --comm staged works");
    if (name == "auto" && shared)
        say("comm: staged through host memory, because ranks share a GPU; nccl takes one GPU per rank\n");
    return name != "auto" ? name : shared ? "staged" : "nccl";
}

std::unique_ptr<Transport> make_transport(const std::string& name, [[maybe_unused]] const CommOptions& o) {
    if (name == "fake") return make_fake_transport(int(o.fake_rank), int(o.fake_world));
#if TRAIN70B_CUDA
    if (name == "nccl") return make_nccl_transport();
    if (name == "staged") return make_staged_transport();
#endif
    return make_mpi_transport();
}

}  // namespace

void add_comm_flags(Flags& flags, CommOptions& o) {
    flags.group("Communication");
    flags.add("--comm", o.transport, "transport; auto: nccl, staged or mpi",
              one_of({"auto", "mpi", "nccl", "staged", "fake"}));
    flags.add("--fake-world", o.fake_world, "ranks of the world that --comm fake pretends", whole_number_from(1));
    flags.add("--fake-rank", o.fake_rank, "which of them this process is", whole_number_from(0));
    flags.add("--comm-timeout", o.timeout, "seconds after which a collective is given up", real_number(0, 1e6, false));
    flags.add_switch("--comm-check", o.check, "compare what the ranks are about to do");
    flags
        .add("--all-reduce", o.all_reduce, "algorithm of the sums; reduce-scatter: the ring's or the library's",
             one_of({"ring", "pipelined", "halving", "naive", "library"}))
        .default_text("ring; with nccl: library");
}

int run_ranks(int argc, char** argv, const std::function<void(int, char**)>& body) {
    restart_with_cpu_settings(argv);
    block_sigterm();  // before MPI creates its threads
    if (const char* rank = std::getenv("OMPI_COMM_WORLD_RANK")) this_rank = std::atoi(rank);
    watchdog = std::make_unique<Watchdog>();
    constexpr double kStart = 4;  // seconds more: a loaded machine is slow to start processes
    watchdog->set_timeout(early_timeout(argc, argv) + kStart);
    const uint64_t start = collective_log().add("MPI_Init", std::source_location::current());
    collective_log().set(start, CollectiveLog::State::running);
    int thread_level = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &thread_level);
    MPI_Comm_rank(MPI_COMM_WORLD, &this_rank);
    end_all_ranks = [](int exit_code) {
        MPI_Abort(MPI_COMM_WORLD, exit_code);
        std::_Exit(exit_code);
    };
    collective_log().set(start, CollectiveLog::State::done);
    watchdog->set_timeout(0);  // until connect() knows it
    const int exit_code = run_program(argc, argv, [&](int count, char** words) {
        try {
            body(count, words);
        } catch (const UsageError& error) {
            if (all_arrive()) throw;  // rank 0 will say it
            fmt::print(stderr, "rank {}: {}\n", this_rank, error.what());
            end_all_ranks(2);
        }
    });
    const uint64_t record = collective_log().add("MPI_Finalize", std::source_location::current());
    collective_log().set(record, CollectiveLog::State::running);
    watchdog->unwatch();
    MPI_Finalize();
    watchdog.reset();
    return exit_code;
}

Comm connect(const CommOptions& options, Device device) {
    watchdog->set_timeout(options.timeout);
    const uint64_t record = collective_log().add("connect", std::source_location::current());
    collective_log().set(record, CollectiveLog::State::running);
    const Node node;
    watch_this_node(node);
    set_cpu_threads(node.size);
#if TRAIN70B_CUDA
    if (device == Device::cuda) cuda_use_device(node.rank % cuda_device_count());
#endif
    if (device == Device::cpu) compare_blas_cores();
    CommSettings settings{AllReduce::ring, options.check};
    std::unique_ptr<Transport> transport = make_transport(choose_transport(options, device, node), options);
    if (!options.all_reduce.empty())
        settings.all_reduce = all_reduce_of(options.all_reduce);
    else if (transport->on_stream())
        settings.all_reduce = AllReduce::library;
    collective_log().set(record, CollectiveLog::State::done);
    return make_comm(std::move(transport), settings);
}

Comm connect(const CommOptions& options, const TrainOptions& training) {
    if (options.transport == "fake")
        for (const auto& [flag, path] :
             {std::pair("--save-hf", training.save_hf), {"--save-reference", training.save_reference}})
            if (!path.empty())
                usage_error("{} {}: with --comm fake there is one rank's part of the model; leave it out", flag, path);
    return connect(options, training.device_kind());
}

int64_t ranks_on_this_node() { return Node().size; }

void together(const std::function<void()>& setup) {
    const Watchdog::Pause pause(*watchdog);
    std::string error;
    try {
        setup();
    } catch (const UsageError& e) { error = e.what(); }
    const int ranks = world_size(), first = over_all_ranks(error.empty() ? ranks : this_rank, MPI_MIN);
    if (first == ranks) return;
    int length = int(error.size());
    MPI_Bcast(&length, 1, MPI_INT, first, MPI_COMM_WORLD);
    error.resize(size_t(length));
    MPI_Bcast(error.data(), length, MPI_CHAR, first, MPI_COMM_WORLD);
    throw UsageError(error);
}

int64_t ranks_per_copy(int64_t given, int64_t dp, const Comm& world) {
    if (given > 0) return given;
    if (dp > 0 && world.size() % dp != 0) usage_error("--dp {}: does not divide {} ranks", dp, world.size());
    return world.size() / std::max<int64_t>(dp, 1);
}

int64_t data_parallel_ranks(int64_t dp, const Comm& world, int64_t ranks_per_copy) {
    const int64_t ranks = world.size();
    if (ranks % ranks_per_copy != 0)
        usage_error("{} ranks cannot hold model copies of {} ranks each; {} can", ranks, ranks_per_copy,
                    (ranks / ranks_per_copy + 1) * ranks_per_copy);
    const int64_t left = ranks / ranks_per_copy;
    if (dp != 0 && dp != left)
        usage_error(
            "--dp {}: there are {} ranks{}, which makes --dp {}; start {} ranks (mpirun -np {}) or leave --dp out", dp,
            ranks, ranks_per_copy > 1 ? fmt::format(", {} to a model copy", ranks_per_copy) : "", left,
            dp * ranks_per_copy, dp * ranks_per_copy);
    return left;
}

}  // namespace train70b
