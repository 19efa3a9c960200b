#include <mpi.h>

#include <chrono>
#include <thread>

#include "01_single_gpu/core/environment.h"
#include "01_single_gpu/core/files.h"
#include "01_single_gpu/core/launcher.h"
#include "02_data_parallel/runtime/connect.h"
#include "02_data_parallel/runtime/mpi_group.h"
#include "02_data_parallel/runtime/watchdog.h"

namespace train70b {

std::unique_ptr<Watchdog> watchdog;

namespace {

void init_mpi(double timeout) {
    constexpr double kStart = 4;  // additional seconds: a loaded machine is slow to start processes
    watchdog->set_timeout(timeout + kStart);
    const uint64_t start = collective_log().add("MPI_Init", std::source_location::current());
    collective_log().set(start, CollectiveLog::State::running);
    int thread_level = 0;
    MPI_Init_thread(nullptr, nullptr, MPI_THREAD_FUNNELED, &thread_level);
    if (world_size() > 1) MPI_Comm_rank(MPI_COMM_WORLD, &this_rank);
    end_all_ranks = [](int exit_code) {
        MPI_Abort(MPI_COMM_WORLD, exit_code);
        std::_Exit(exit_code);
    };
    collective_log().set(start, CollectiveLog::State::done);
    watchdog->set_timeout(0);  // connect() sets it
}

// Whether every rank arrives here within 5 seconds. When this rank ends with an error, the others may be in the middle
// of a collective.
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

}  // namespace

void start_mpi(double timeout) {
    if (mpi_is_started()) return;
    init_mpi(timeout);
    check_launch(world_size());
}

int run_ranks(int argc, char** argv, const std::function<void(int, char**)>& body) {
    open_standard_streams();
    execute_with_settings(argv);
    block_signals();  // before MPI creates its threads
    this_rank = launch().rank;
    watchdog = std::make_unique<Watchdog>();
    const int exit_code = run_program(argc, argv, [&](int count, char** words) {
        try {
            body(count, words);
        } catch (const UsageError& error) {
            if (!mpi_is_started() && launch().ranks == 1) throw;  // rank 0 prints it
            if (!mpi_is_started()) init_mpi(CommOptions().timeout);
            if (all_arrive()) throw;  // all ranks failed alike
            std::fputs(fmt::format("rank {}: {}\n", this_rank, one_line(error.what())).c_str(), stderr);
            end_all_ranks(2);
        }
    });
    const uint64_t record = collective_log().add("MPI_Finalize", std::source_location::current());
    collective_log().set(record, CollectiveLog::State::running);
    over_all_ranks(0, MPI_MAX);  // who does not come is named by the heartbeats, whose memory MPI_Finalize frees
    watchdog->watch({});
    if (exit_code != 0) watchdog->error_is_printed();
    if (mpi_is_started()) MPI_Finalize();
    watchdog.reset();
    return exit_code;
}

void together(const std::function<void()>& setup) {
    if (!mpi_is_started()) return setup();
    const auto pause = watchdog->pause();
    std::string error;
    try {
        setup();
    } catch (const UsageError& e) { error = e.what(); }
    for (const std::string& of_rank : gather_text(MPI_COMM_WORLD, error))
        if (!of_rank.empty()) throw UsageError(of_rank);
}

}  // namespace train70b
