#pragma once
// The flags of the composed trainer beside those of all chapters.
#include "02_data_parallel/runtime/program.h"
#include "08_3d_full/checkpoint/checkpoint.h"
#include "08_3d_full/plan/dry_run.h"
#include "08_3d_full/watch/inject.h"
#include "08_3d_full/watch/probe.h"
#include "08_3d_full/watch/ramps.h"
#include "08_3d_full/watch/replica_check.h"
#include "08_3d_full/watch/watch.h"

namespace train70b {

struct MainFlags {
    explicit MainFlags(Program& program);  // adds them; this outlives the program's flags
    void check(Program& program);          // after Program::connect(): fills the mesh; usage errors on all ranks

    ParallelConfig config;
    Ramps ramps;
    WatchOptions watch;
    SimulateOptions simulate;
    Probing probing = Probing::off;
    OptionalOutput links{"--probe-file"};
    CheckpointOptions checkpoint;
    int64_t replica_check = 0;
    std::vector<Fault> faults;

  private:
    std::string faults_;
};

}  // namespace train70b
