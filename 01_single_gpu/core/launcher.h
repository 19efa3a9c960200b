#pragma once
// What started this process, and how many ranks it says there are: of each launcher, the variables that it sets.
#include <string>

namespace train70b {

struct Launcher {
    const char *name, *ranks, *rank, *local_rank;
};
// The innermost first: srun starts the daemons of Open MPI's mpirun, and torchrun.
inline constexpr Launcher kLaunchers[] = {
    {"Open MPI's mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"},
    {"MVAPICH's mpirun_rsh", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_LOCAL_RANK"},
    {"mpiexec or srun (PMI)", "PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"},
    {"jsrun", "JSM_NAMESPACE_SIZE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_LOCAL_RANK"},
    {"flux run", "FLUX_JOB_SIZE", "FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID"},
    {"torchrun", "WORLD_SIZE", "RANK", "LOCAL_RANK"},
    {"srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID"},
};

struct Launch {
    const char* launcher = nullptr;  // null: a shell
    const char* variable = nullptr;  // that says how many ranks there are
    int ranks = 1, rank = 0;         // ranks 0: it does not say how many
};
Launch launch();
bool is_under_mpirun();  // Open MPI's, which gives ranks a terminal if it has none, and SIGTERM where one has died

// A rank that Open MPI's launchers have not started stays alone: sets what this MPI reads when it starts.
void stay_alone();

// Usage error if a launcher started more processes than the ranks that know of each other: each would train alone.
void check_launch(int ranks);

}  // namespace train70b
