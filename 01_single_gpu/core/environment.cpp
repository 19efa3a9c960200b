#include "01_single_gpu/core/environment.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

#include "01_single_gpu/core/blas_core.h"
#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/launcher.h"
#include "01_single_gpu/core/platform/platform.h"

namespace train70b {
namespace {

// The value of a variable. getenv() does not work before main().
std::string_view value_in(char** environment, std::string_view name, std::string_view otherwise) {
    for (char** variable = environment; *variable; ++variable)
        if (const std::string_view text = *variable; text.substr(0, text.find('=')) == name)
            return text.substr(name.size() + 1);
    return otherwise;
}

CoreSet cores_before_main;

// What the libraries read when they are loaded: OpenBLAS maps a buffer for each thread then, libgomp reports a number
// of threads that is none in lines of its own.
std::string environment_problem(char** environment) {
    const std::string_view openmp = value_in(environment, "OMP_NUM_THREADS", "1024");
    const int of_openmp = thread_count(openmp.substr(0, openmp.find(',')));
    if (of_openmp == 0) return fmt::format("OMP_NUM_THREADS={}: must be an integer from 1 to {}", openmp, kMostThreads);
    cores_before_main = platform::allowed_cores();
    const int cores = std::max(1, int(cores_before_main.count()));
    return no_room_for_blas(std::min({cores, of_openmp, kMostBlasThreads}));
}

constexpr std::pair<const char*, const char*> kSettings[] = {{"GOMP_SPINCOUNT", "1000"},
                                                             {"KMP_BLOCKTIME", "0"},
                                                             {"OMPI_MCA_mpi_yield_when_idle", "1"},
                                                             {"CUDA_DEVICE_MAX_CONNECTIONS", "32"},
                                                             {"NCCL_LAUNCH_ORDER_IMPLICIT", "1"},
                                                             {"NCCL_RUNTIME_CONNECT", "0"}};

}  // namespace

void check_environment(int, char** argv, char** environment) {
    const std::string problem = environment_problem(environment);
    if (problem.empty()) return;
    // The other ranks of this machine would say the same.
    for (const Launcher& launcher : kLaunchers)
        if (value_in(environment, launcher.local_rank, "0") != "0") ::_exit(2);
    const std::string_view program = argv[0];
    const std::string line = one_line(fmt::format("{}: {}", program.substr(program.rfind('/') + 1), problem)) + "\n";
    if (::write(STDERR_FILENO, line.data(), line.size()) < 0) {}
    ::_exit(2);
}

void execute_with_settings(char** argv) {
    bool changed = false;
    const auto set = [&changed](const char* name, const char* value) {
        if (!std::getenv(name)) changed = ::setenv(name, value, 1) == 0 || changed;
    };
    for (const auto& [name, value] : kSettings) set(name, value);
    if (launch().ranks != 1) set("CUDA_MODULE_LOADING", "EAGER");
    const std::string core = better_blas_core(cpu_vectors(), blas_core());
    if (!core.empty()) set("OPENBLAS_CORETYPE", core.c_str());
    stay_alone();
    if (!changed) return;
    platform::allow_cores(cores_before_main);       // none: not changed
    ::execv("/proc/self/exe", argv);                // these return only on failure: continue with the defaults
    if (errno != ENOEXEC) ::execvp(argv[0], argv);  // which would hand another machine's program (qemu) to the shell
}

CoreSet cores_at_start() { return cores_before_main; }

}  // namespace train70b
