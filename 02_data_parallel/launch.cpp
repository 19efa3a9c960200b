#include "02_data_parallel/launch.h"

#include <mpi.h>

#include "01_single_gpu/cpu_setup.h"
#include "01_single_gpu/report.h"
#include "02_data_parallel/watchdog.h"

namespace train70b {

namespace {

std::unique_ptr<Watchdog> watchdog;

int world_size() {
    int size = 1;
    MPI_Comm_size(MPI_COMM_WORLD, &size);
    return size;
}

struct Node {
    int rank = 0, size = 1;  // of this process among those that share its memory
};
Node this_node() {
    MPI_Comm shared = MPI_COMM_NULL;
    MPI_Comm_split_type(MPI_COMM_WORLD, MPI_COMM_TYPE_SHARED, this_rank, MPI_INFO_NULL, &shared);
    Node node;
    MPI_Comm_rank(shared, &node.rank);
    MPI_Comm_size(shared, &node.size);
    MPI_Comm_free(&shared);
    return node;
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

#ifdef TRAIN70B_CUDA
// Ranks that share a GPU: NCCL takes one rank per GPU. With NCCL_HOSTID set its check is fooled on purpose, which is for
// testing only.
bool shares_gpus(const Node& node) { return node.size > cuda_device_count(); }

std::unique_ptr<Transport> cuda_transport(const std::string& name, const Node& node) {
    const int gpus = cuda_device_count();
    std::string choice = name;
    if (name == "auto") choice = shares_gpus(node) ? "staged" : "nccl";
    if (name == "auto" && choice == "staged" && world_size() > 1)
        say("comm: staged through host memory, because {} ranks share {} GPU{}; nccl takes one GPU per rank\n",
            node.size, gpus, gpus == 1 ? "" : "s");
    if (choice == "nccl" && shares_gpus(node) && !std::getenv("NCCL_HOSTID"))
        usage_error("--comm nccl: {} ranks share {} GPU(s), and NCCL takes one GPU per rank; --comm staged works",
                    node.size, gpus);
    return choice == "nccl" ? make_nccl_transport() : make_staged_transport();
}
#endif

}  // namespace

void add_comm_flags(CLI::App& app, CommOptions& o) {
    const auto add = [&app](const char* name, auto& value, const char* text, const CLI::Validator& check) {
        return app.add_option(name, value, text)->check(check)->capture_default_str()->group("Communication");
    };
    add("--comm", o.transport, "transport; auto: nccl, staged or mpi",
        one_of({"auto", "mpi", "nccl", "staged", "fake"}));
    add("--fake-world", o.fake_world, "ranks of the world that --comm fake pretends", whole_number_from(1));
    add("--fake-rank", o.fake_rank, "which of them this process is", whole_number_from(0));
    add("--comm-timeout", o.timeout, "seconds after which a collective is given up", real_number(0, 1e6, false));
    add_switch(app, "--comm-check", o.check, "compare what the ranks are about to do")->group("Communication");
    add("--all-reduce", o.all_reduce, "algorithm of the sums",
        one_of({"ring", "pipelined", "halving", "naive", "library"}))
        ->default_str("ring; with nccl: library");
}

int run_ranks(int argc, char** argv, const std::function<void(int, char**)>& body) {
    restart_with_cpu_settings(argv);
    block_sigterm();  // before MPI creates its threads
    int thread_level = 0;
    MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &thread_level);
    MPI_Comm_rank(MPI_COMM_WORLD, &this_rank);
    end_all_ranks = [](int exit_code) {
        MPI_Abort(MPI_COMM_WORLD, exit_code);
        std::_Exit(exit_code);
    };
    watchdog = std::make_unique<Watchdog>();
    const int exit_code = run_program(argc, argv, [&](int count, char** words) {
        try {
            body(count, words);
        } catch (const UsageError& error) {
            if (all_arrive()) throw;  // rank 0 will say it
            fmt::print(stderr, "rank {}: {}\n", this_rank, error.what());
            end_all_ranks(2);
        }
    });
    watchdog.reset();
    MPI_Finalize();
    return exit_code;
}

Comm connect(const CommOptions& options, Device device) {
    const Node node = this_node();
    set_cpu_threads(node.size);
    watchdog->set_timeout(options.timeout);
    CommSettings settings{AllReduce::ring, options.check};
    if (!options.all_reduce.empty()) settings.all_reduce = all_reduce_of(options.all_reduce);
    const std::string& name = options.transport;
    const int ranks = world_size();
#ifdef TRAIN70B_CUDA
    if (device == Device::cuda) cuda_use_device(node.rank % cuda_device_count());
#endif
    if (name != "fake" && options.fake_world > 0)
        usage_error("--fake-world {}: belongs to --comm fake", options.fake_world);
    if (name == "fake") {
        if (options.fake_world == 0) usage_error("--comm fake: how many ranks? add --fake-world N");
        if (options.fake_rank >= options.fake_world)
            usage_error("--fake-rank {} of --fake-world {}: ranks count from 0 to {}", options.fake_rank,
                        options.fake_world, options.fake_world - 1);
        if (ranks > 1)
            usage_error("--comm fake: one process stands for one rank; start it without mpirun -np {}", ranks);
        return make_comm(make_fake_transport(int(options.fake_rank), int(options.fake_world)), settings);
    }
    if (device == Device::cpu) {
        if (name == "nccl" || name == "staged")
            usage_error("--comm {}: moves tensors of a GPU, and {}; --comm mpi works here", name,
                        why_no_cuda().empty() ? "--device is cpu" : why_no_cuda());
        return make_comm(make_mpi_transport(), settings);
    }
    if (name == "mpi") usage_error("--comm mpi: moves tensors of the host; with --device cuda: --comm nccl or staged");
#ifdef TRAIN70B_CUDA
    std::unique_ptr<Transport> transport = cuda_transport(name, node);
    if (options.all_reduce.empty() && transport->on_stream()) settings.all_reduce = AllReduce::library;
    return make_comm(std::move(transport), settings);
#endif
    CHECK(false, "no transport for {}", name_of(device));
    return {};
}

int64_t ranks_on_this_node() { return this_node().size; }

void together(const std::function<void()>& setup) {
    std::string error;
    try {
        setup();
    } catch (const UsageError& e) { error = e.what(); }
    const int ranks = world_size();
    const int mine = error.empty() ? ranks : this_rank;
    int first = ranks;
    MPI_Allreduce(&mine, &first, 1, MPI_INT, MPI_MIN, MPI_COMM_WORLD);
    if (first == ranks) return;
    int length = int(error.size());
    MPI_Bcast(&length, 1, MPI_INT, first, MPI_COMM_WORLD);
    error.resize(size_t(length));
    MPI_Bcast(error.data(), length, MPI_CHAR, first, MPI_COMM_WORLD);
    throw UsageError(error);
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

void report_communication(Trainer& trainer, const Comm& world) {
    trainer.ranks = world.size();
    trainer.finish_report = [world](StepReport& report) {
        for (const auto& [name, entry] : world.take_stats().operations) {
            report.comm_bytes[name] = entry.bytes;
            report.comm_s += entry.seconds;
        }
    };
    trainer.memory_per_rank = [world](const MemoryPeak& peak) {
        auto list = nlohmann::ordered_json::array();
        if (std::string_view(world.transport()) == "fake") {
            list.push_back(to_json(peak));
            list.back()["rank"] = world.rank();
            return list;
        }
        std::vector<double> mine(peak.kind.begin(), peak.kind.end());  // whole numbers, exact up to 2^53 bytes
        mine.push_back(double(peak.total));
        const std::vector<double> all = world.gather(mine);
        for (int rank = 0; rank < world.size(); ++rank) {
            MemoryPeak other;
            const auto begin = all.begin() + rank * int64_t(mine.size());
            for (int i = 0; i < kMemoryKinds; ++i) other.kind[i] = int64_t(begin[i]);
            other.total = int64_t(begin[kMemoryKinds]);
            list.push_back(to_json(other));
        }
        return list;
    };
}

}  // namespace train70b
