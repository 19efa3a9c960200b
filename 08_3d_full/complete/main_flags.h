#pragma once
// The flags of the composed trainer beside those of all chapters.
#include "08_3d_full/checkpoint/checkpoint.h"
#include "08_3d_full/checkpoint/elastic.h"
#include "08_3d_full/plan/dry_run.h"
#include "08_3d_full/watch/inject.h"
#include "08_3d_full/watch/probe.h"
#include "08_3d_full/watch/ramps.h"
#include "08_3d_full/watch/replica_check.h"
#include "08_3d_full/watch/watch.h"

namespace train70b {

struct MainFlags {
    ParallelConfig config;
    Ramps ramps;
    WatchOptions watch;
    SimulateOptions simulate;
    std::string probing = "off";
    OptionalOutput links{"--probe-file"};
    CheckpointOptions checkpoint;
    ElasticOptions elastic;
    int64_t replica_check = 0;
    std::vector<Fault> faults;

    explicit MainFlags(Program& p) {  // outlives the program's flags
        add_parallel_flags(p.flags, config);
        add_ramp_flags(p.flags, ramps);
        add_watch_flags(p.flags, watch);
        add_simulate_flags(p.flags, p.options, simulate);
        add_probe_flag(p.flags, probing, links);
        add_checkpoint_flags(p.flags, checkpoint);
        add_elastic_flags(p.flags, elastic);
        add_inject_flag(p.flags, faults_);
        add_replica_check_flag(p.flags, replica_check);
    }

    void check(Program& p) {  // after Program::connect(): fills the mesh; usage errors on all ranks
        TrainOptions& o = p.options;
        check_simulate(simulate, config, p);
        check_probe(probing, links, p.comm);
        if (o.dry_run && !p.tables) usage_error("--tables off: a dry run prints nothing else; leave one of them out");
        config.mesh = mesh_of(config.mesh, p.world.size());
        p.dp = config.mesh.dp;
        // Many small micro-batches fill a pipeline.
        p.divide(config.mesh.size() / p.dp, config.mesh.pp > 1 ? 1 : ramp_micro_batch(ramps, p.dp));
        together([&] {
            validate(config, o, p.world.size());
            check_ramps(ramps, o, config);
            if (ramps.batch || ramps.seq)
                o.step_sizes = std::make_shared<RampedSizes>(o.global_batch, o.seq_len, ramps);
            check_watch(watch, o);
            faults = parse_faults(faults_, p.comm, o, config.mesh);
            check_replica_check(replica_check, o.model, config, p.comm);
            check_checkpoint_flags(checkpoint, o, p.world);
            check_elastic(elastic, p, config);
        });
    }

  private:
    std::string faults_;
};

}  // namespace train70b
