// The composed trainer: data, ZeRO, tensor, sequence, pipeline and context parallelism and FP8, in any combination.
//
// Run:   mpirun --oversubscribe -np 8 build/bin/08_3d_full --dp 2 --tp 2 --pp 2
//        mpirun --oversubscribe -np 8 build/bin/08_3d_full --tp 2 --cp 2 --pp 2 --sequence-parallel on --zero 3
//        build/bin/08_3d_full --model 70b --comm fake --fake-world 64 --tp 8 --pp 4 --zero 1 --seq-len 4096 --dry-run
// Watch: the loss is chapter 01's, whatever the layout; one rank of it, bit for bit.
#include "02_data_parallel/runtime/program.h"
#include "08_3d_full/checkpoint/checkpoint.h"
#include "08_3d_full/complete/compose.h"
#include "08_3d_full/plan/dry_run.h"
#include "08_3d_full/watch/inject.h"
#include "08_3d_full/watch/probe.h"
#include "08_3d_full/watch/ramps.h"
#include "08_3d_full/watch/replica_check.h"
#include "08_3d_full/watch/watch.h"

using namespace train70b;

static void program(int argc, char** argv) {
    Program p("Chapter 08: everything together", "");
    TrainOptions& o = p.options;
    ParallelConfig config;
    Probing probing = Probing::off;
    CheckpointOptions checkpoint;
    add_parallel_flags(p.flags, config);
    Ramps ramps;
    add_ramp_flags(p.flags, ramps);
    WatchOptions watch;
    add_watch_flags(p.flags, watch);
    SimulateOptions simulate;
    add_dry_run_flag(p.flags, o);
    add_simulate_flags(p.flags, simulate);
    OptionalOutput links("--probe-file");
    add_probe_flag(p.flags, probing, links);
    add_checkpoint_flags(p.flags, checkpoint);
    std::string faults;
    int64_t replica_check = 0;
    add_inject_flag(p.flags, faults);
    add_replica_check_flag(p.flags, replica_check);

    p.connect(argc, argv);
    check_simulate(simulate, config, p);
    check_probe(probing, links, p.comm);
    config.mesh = mesh_of(config.mesh, p.world.size());
    p.dp = config.mesh.dp;
    // Many small micro-batches fill a pipeline.
    p.divide(config.mesh.size() / p.dp, config.mesh.pp > 1 ? 1 : ramp_micro_batch(ramps, p.dp));
    std::vector<Fault> planned;
    together([&] {
        validate(config, o, p.world.size());
        check_ramps(ramps, o, config);
        if (ramps.batch || ramps.seq) o.step_sizes = std::make_shared<RampedSizes>(o.global_batch, o.seq_len, ramps);
        check_watch(watch, o);
        planned = parse_faults(faults, p.comm, o, config.mesh);
        check_replica_check(replica_check, p.options.model, config, p.comm);
        check_checkpoint_flags(checkpoint, o, p.world);
    });
    if (o.dry_run) return print_dry_run(p, config, simulate);
    const CheckpointFolder folder(checkpoint, o, config, p.flags.values(), p.world);
    p.prepare({}, [&] { return stage_of(config, o.model, p.world.rank()); });

    const Watch watching(watch, p.trainer(), p.model());
    const Composed composed(p.model(), p.trainer(), o, config, p.world);
    Inject inject(planned, p.trainer(), p.model());
    ReplicaCheck replicas(replica_check, p.trainer(), p.model(), p.world, config);
    Checkpoints checkpoints(folder, o, config, p.flags.values(), p.data(), p.trainer(), p.world);
    std::vector<RunControl*>& controls = p.trainer().controls;
    controls.insert(controls.begin(), &inject);  // its gradients are those that the others see
    controls.insert(controls.end(), {&replicas, &checkpoints});
    p.allocate();
    say_ramps(ramps);
    say_layout(p, composed, config);
    check_machines(p, config, probing, links);
    p.train();
    print_memory(p, config, checkpoints.host_bytes());
    p.finish();
}

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
