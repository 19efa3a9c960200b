// Pipeline parallelism: each of p ranks holds L/p layers, and m micro-batches pass through them one behind another.
//
// Run:   mpirun -np 2 build/bin/05_pipeline --pp 2
//        mpirun --oversubscribe -np 4 build/bin/05_pipeline --pp 4 --pipeline zero-bubble --draw pipeline.png
// Watch: the loss is chapter 01's, whatever the schedule; the bubble falls from 75% to almost nothing; what a rank
//        keeps follows the micro-batches it has in flight: m for gpipe, p - rank for 1f1b.
#include "02_data_parallel/complete/data_parallel.h"
#include "05_pipeline/complete/training_report.h"

using namespace train70b;

static void program(int argc, char** argv) {
    Program p("Chapter 05: pipeline parallelism", "print the schedule as run, simulated and measured, after training");
    DataParallelOptions dp_options;
    PipelineOptions options;
    int64_t pp = 0;
    add_data_parallel_flags(p.flags, p.dp, dp_options);
    add_pipeline_flags(p.flags, pp, options);
    PipelineReport report(p.flags);

    p.connect(argc, argv);
    p.divide(pp = ranks_per_copy(pp, p.dp, p.world), 1, "--pp");  // many small micro-batches
    p.prepare([&] { report.open(p, pp, options); },
              [&] { return pipeline_stage(p.options.model, pp, p.world.rank() / p.dp, options); });
    // Neighbouring ranks hold the same stage of different model copies.
    const Comm stages = p.world.split([&](int rank) { return int(rank % p.dp); }, "pp", GroupLoad::light);
    const Comm data_ranks = p.world.split([&](int rank) { return int(rank / p.dp); }, "dp");
    DataParallel store(p.model(), data_ranks, dp_options, AdamW::maker(p.options.adamw()));
    const Schedule schedule = pipeline_schedule(options, pp, p.options.accumulation(p.dp));
    Pipeline pipeline(p.model(), stages, schedule);
    p.use(store, data_ranks);
    p.use(pipeline, stages);
    p.allocate();
    say_layout(p, schedule);
    report.watch(p, pipeline, stages, schedule);
    p.train();
    report.print(p);
    p.finish();
}

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
