// The composed trainer: data, ZeRO, tensor, sequence, pipeline and context parallelism and FP8, in any combination.
//
// Run:   mpirun --oversubscribe -np 8 build/bin/08_3d_full --dp 2 --tp 2 --pp 2
//        mpirun --oversubscribe -np 8 build/bin/08_3d_full --tp 2 --cp 2 --pp 2 --sequence-parallel on --zero 3
//        build/bin/08_3d_full --model 70b --comm fake --fake-world 64 --tp 8 --pp 4 --zero 1 --seq-len 4096 --dry-run
// Watch: the loss is chapter 01's, whatever the layout; one rank of it, bit for bit.
#include "08_3d_full/complete/compose.h"
#include "08_3d_full/complete/main_flags.h"

using namespace train70b;

static void program(int argc, char** argv) {
    Program p("Chapter 08: everything together", "print the memory of the run beside its formula");
    MainFlags flags(p);
    p.connect(argc, argv);
    flags.check(p);
    TrainOptions& o = p.options;
    const ParallelConfig& config = flags.config;
    if (o.dry_run) return print_dry_run(p, config, flags.simulate);
    const CheckpointFolder folder(flags.checkpoint, o, config, p.flags.values(), p.world);
    p.prepare({}, [&] { return stage_of(config, o.model, p.world.rank()); });

    const Watch watch(flags.watch, p.trainer());
    Composed composed(p.model(), p.trainer(), o, config, p.world);  // a line for each technique: compose.cpp
    Inject inject(flags.faults, p.trainer());
    ReplicaCheck replicas(flags.replica_check, p.trainer(), p.world, config);
    Checkpoints checkpoints(folder, config, p.flags.values(), p.trainer(), p.world);
    std::vector<RunControl*>& controls = p.trainer().controls;
    std::optional<Elastic> elastic;
    if (flags.elastic.on) {
        elastic.emplace(flags.elastic, p.trainer(), composed.zero, p.world, config, folder.start);
        controls.insert(controls.begin(), &*elastic);
    }
    controls.insert(controls.begin(), &inject);  // its gradients are those that the others see
    controls.insert(controls.end(), {&replicas, &checkpoints});
    p.allocate();
    say_ramps(flags.ramps);
    say_layout(p, composed, config);
    check_machines(p, composed.ranks, flags.probing, flags.links);
    p.train();
    print_memory(p, config, checkpoints.host_bytes());
    p.finish();
}

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
