// The composed trainer: data, ZeRO, tensor, sequence, pipeline and context parallelism and FP8, in any mix.
//
// Run:   mpirun --oversubscribe -np 8 build/bin/08_3d_full --dp 2 --tp 2 --pp 2
//        mpirun --oversubscribe -np 8 build/bin/08_3d_full --tp 2 --sequence-parallel on --cp 2 --pp 2 --pipeline zero-bubble
// Watch: the loss is chapter 01's, whatever the layout; one rank of it, bit for bit.
#include "08_3d_full/compose.h"

using namespace train70b;

namespace {

void program(int argc, char** argv) {
    TrainOptions options;
    CommOptions comm_options;
    Plan plan;
    CommandLine command_line("Chapter 08: everything together", options);
    add_comm_flags(command_line.app, comm_options);
    add_plan_flags(command_line.app, plan);
    command_line.parse(argc, argv);

    const Comm world = connect(comm_options, options);
    plan.mesh = mesh_of(plan.mesh, world.size());
    if (options.micro_batch == 0 && plan.mesh.pp > 1) options.micro_batch = 1;  // many small ones fill a pipeline
    command_line.check_batches(plan.mesh.dp);

    std::optional<TrainingRun> run;
    together([&] {
        settle(plan, options, world.size());
        run.emplace(options, command_line.flags(), stage_of(plan, options.model, world.rank()));
    });
    {
        Composed composed(run->model, run->trainer, options, plan, world);
        report_communication(run->trainer, world);
        run->materialise();
        say("{}", picture(plan.mesh));
        for (const std::string& why : composed.fp8.left_out()) say("stays in {}: {}\n", options.dtype, why);
        run->trainer.run();
    }
    world.finish();
}

}  // namespace

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
