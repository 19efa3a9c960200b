#include "08_3d_full/complete/main_flags.h"

namespace train70b {

MainFlags::MainFlags(Program& p) {
    add_parallel_flags(p.flags, config);
    add_ramp_flags(p.flags, ramps);
    add_watch_flags(p.flags, watch);
    add_dry_run_flag(p.flags, p.options);
    add_simulate_flags(p.flags, simulate);
    add_probe_flag(p.flags, probing, links);
    add_checkpoint_flags(p.flags, checkpoint);
    add_inject_flag(p.flags, faults_);
    add_replica_check_flag(p.flags, replica_check);
}

void MainFlags::check(Program& p) {
    TrainOptions& o = p.options;
    check_simulate(simulate, config, p);
    check_probe(probing, links, p.comm);
    config.mesh = mesh_of(config.mesh, p.world.size());
    p.dp = config.mesh.dp;
    // Many small micro-batches fill a pipeline.
    p.divide(config.mesh.size() / p.dp, config.mesh.pp > 1 ? 1 : ramp_micro_batch(ramps, p.dp));
    together([&] {
        validate(config, o, p.world.size());
        check_ramps(ramps, o, config);
        if (ramps.batch || ramps.seq) o.step_sizes = std::make_shared<RampedSizes>(o.global_batch, o.seq_len, ramps);
        check_watch(watch, o);
        faults = parse_faults(faults_, p.comm, o, config.mesh);
        check_replica_check(replica_check, o.model, config, p.comm);
        check_checkpoint_flags(checkpoint, o, p.world);
    });
}

}  // namespace train70b
