#include "01_single_gpu/core/launcher.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdlib>

#include "01_single_gpu/core/check.h"

namespace train70b {

static int number_in(const char* variable, int least) {
    const char* text = std::getenv(variable);
    return text ? std::max(std::atoi(text), least) : least;
}

Launch launch() {
    for (const auto& [name, ranks, rank, local_rank] : kLaunchers)
        if (std::getenv(ranks) && std::getenv(rank)) return {name, ranks, number_in(ranks, 1), number_in(rank, 0)};
    for (const char* rank : {"PMIX_RANK", "PMI_RANK"})
        if (std::getenv(rank)) return {"a launcher", nullptr, 0, number_in(rank, 0)};
    return {};
}

bool is_under_mpirun() { return std::getenv(kLaunchers[0].ranks); }

// Alone, Open MPI starts a daemon beside the process, for ranks that it might spawn, and folders under /tmp for both,
// which two programs that start at once may delete for each other; and inside a step of Slurm it ends the program if it
// cannot find the others. Other MPIs do not know these variables.
void stay_alone() {
    if (is_under_mpirun() || std::getenv("PMIX_RANK")) return;
    setenv("OMPI_MCA_ess_singleton_isolated", "1", 0);
    setenv("OMPI_MCA_orte_create_session_dirs", "0", 0);
    unsetenv("SLURM_STEP_ID");
}

void check_launch(int ranks) {
    const Launch started = launch();
    if (started.ranks <= ranks) return;
    this_rank = started.rank;  // one of them says it
    const auto loaded = [](const char* symbol) { return ::dlsym(RTLD_DEFAULT, symbol) != nullptr; };
    const bool open_mpi = loaded("ompi_mpi_comm_world");
    const std::string srun = fmt::format("srun --mpi={} -n {} or ", open_mpi ? "pmix" : "pmi2", started.ranks);
    usage_error("{} started {} processes ({}={}), and each would train alone: {}; for one process: env -u {}",
                started.launcher, started.ranks, started.variable, started.ranks,
                loaded("MPI_Init")
                    ? fmt::format("type {}{} -np {} of {}, with which it is built",
                                  std::getenv("SLURM_JOB_ID") ? srun : "", open_mpi ? "mpirun" : "mpiexec.hydra",
                                  started.ranks, open_mpi ? "Open MPI" : "MPICH or a relative")
                    : fmt::format("this program is one process, start it without {}", started.launcher),
                started.variable);
}

}  // namespace train70b
