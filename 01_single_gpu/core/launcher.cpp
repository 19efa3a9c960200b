#include "01_single_gpu/core/launcher.h"

#include <algorithm>
#include <cstdlib>
#include <string_view>

#include "01_single_gpu/core/check.h"

namespace train70b {

static int number_in(const char* variable, int least) {
    const char* text = std::getenv(variable);
    return text ? std::max(std::atoi(text), least) : least;
}

Launch launch() {
    Launch found;
    for (const char* variable : {"PMIX_RANK", "PMI_RANK", "PMI_FD", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK"})
        found.has_pmi = found.has_pmi || std::getenv(variable);
    for (const auto& [name, ranks, rank, local_rank] : kLaunchers) {
        if (!std::getenv(ranks) || !std::getenv(rank)) continue;
        found.launcher = name;
        found.variable = ranks;
        found.ranks = number_in(ranks, 1);
        found.rank = number_in(rank, 0);
        return found;
    }
    if (found.has_pmi) {
        found.launcher = "a launcher";
        found.ranks = 0;
        found.rank = number_in("PMIX_RANK", number_in("PMI_RANK", 0));
    }
    return found;
}

void check_launch(int ranks) {
    const Launch started = launch();
    if (started.ranks <= ranks) return;
    this_rank = started.rank;  // one of them says it
    const bool slurm = std::string_view(started.variable).starts_with("SLURM");
    usage_error(
        "{} started {} processes ({}={}), and each would train alone: type {}mpirun -np {}, the mpirun of the MPI that "
        "this program is built with (chapter 01 is one process); for one process: env -u {}",
        started.launcher, started.ranks, started.variable, started.ranks,
        slurm ? describe("srun --mpi=pmix -n {} or ", started.ranks) : "", started.ranks, started.variable);
}

}  // namespace train70b
