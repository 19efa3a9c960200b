// Pipeline parallelism: each of p ranks holds L/p layers, and m micro-batches pass through them one behind another.
//
// Run:   mpirun -np 2 build/bin/05_pipeline --pp 2
//        mpirun --oversubscribe -np 4 build/bin/05_pipeline --pp 4 --pipeline zero-bubble --draw pipeline.png
// Watch: the loss is chapter 01's, whatever the schedule; the bubble falls from 75% to almost nothing; what a rank
//        keeps follows the micro-batches it has in flight: m for gpipe, p - rank for 1f1b.
#include "02_data_parallel/data_parallel.h"
#include "05_pipeline/flags.h"
#include "05_pipeline/report.h"

using namespace train70b;

namespace {

void program(int argc, char** argv) {
    Program p("Chapter 05: pipeline parallelism", "compare all schedules after training");
    DataParallelOptions dp_options;
    PipelineOptions options;
    PipelineReport report;
    int64_t pp = 0;
    bool toy = false;
    add_data_parallel_flags(p.flags, p.dp, dp_options);
    add_pipeline_flags(p.flags, pp, options);
    report.add_flags(p.flags);
    p.flags.add_switch("--toy-deadlock", toy, "demonstrate the deadlock of 1f1b with blocking sends, on two ranks");

    p.connect(argc, argv);
    if (toy) return toy_deadlock(p.world, p.options.device_kind());
    pp = ranks_per_copy(pp, p.dp, p.world);
    if (p.options.micro_batch == 0) p.options.micro_batch = 1;  // many small ones
    p.divide(pp);
    const int64_t micro_batches = p.options.accumulation(p.dp);
    const Stage stage = pipeline_stage(p.options.model, pp, p.world.rank() / p.dp, options);
    const Schedule schedule = pipeline_schedule(options, pp, micro_batches);
    p.prepare([&] { report.open(p, pp); }, [&] { return stage; });

    const Comm stages = p.world.split([dp = p.dp](int rank) { return int(rank % dp); }, "pp");
    const Comm data_ranks = p.world.split([dp = p.dp](int rank) { return int(rank / dp); }, "dp");
    {
        DataParallel store(p.model(), data_ranks, dp_options, AdamW::maker(p.options.adamw()));
        Pipeline pipeline(p.model(), stages, schedule);
        p.use(store, data_ranks);
        p.trainer().loop = &pipeline;
        p.trainer().groups.pp = group_of(stages);
        p.allocate();
        say("{} pipeline stages x {} data-parallel ranks ({}); {}, {} micro-batches{}\n", pp, p.dp, p.world.backend(),
            schedule.name, micro_batches,
            schedule.chunks > 1 ? fmt::format(", {} virtual stages per rank", schedule.chunks) : "");
        p.train();
    }
    p.release();
    report.print(p, stages, options, micro_batches);
    p.finish();
}

}  // namespace

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
