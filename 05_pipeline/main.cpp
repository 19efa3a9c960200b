// Pipeline parallelism: p ranks hold L/p layers each, and micro-batches follow one another through them.
//
// Run:   mpirun -np 2 build/bin/05_pipeline --pp 2
//        mpirun --oversubscribe -np 4 build/bin/05_pipeline --pp 4 --pipeline zero-bubble --draw pipeline.png
// Watch: the loss is chapter 01's, whatever the schedule; the bubble falls from 75% to almost nothing; what a rank
//        keeps follows the micro-batches it has in flight: m for gpipe, p - rank for 1f1b.
#include "02_data_parallel/data_parallel.h"
#include "02_data_parallel/runtime/launch.h"
#include "05_pipeline/draw.h"
#include "05_pipeline/tables.h"

using namespace train70b;

namespace {

struct Outputs {
    std::string draw, trace;  // --draw, --pipeline-trace
};

PipelineRun print_tables(const TrainOptions& options, const Dataset& data, const Comm& stages,
                         const PipelineOptions& chosen, int64_t micro_batches) {
    say("\nall schedules, five steps each, with 4, 8 and 16 micro-batches:\n");
    std::vector<PipelineRun> runs;
    for (const char* name : {"naive", "gpipe", "1f1b", "interleaved", "zero-bubble"})
        for (const int64_t m : {4, 8, 16}) {
            PipelineOptions each{.schedule = name};
            if (name == chosen.schedule || (each.chunks() == 1 && chosen.chunks() == 1)) each = chosen;
            each.schedule = name;
            try {  // not every schedule is for every number of layers and micro-batches
                pipeline_stage(options.model, stages.size(), stages.rank(), each);
                pipeline_schedule(each, stages.size(), m);
            } catch (const UsageError& error) {
                say("{} with {} left out: {}\n", name, m, error.what());
                continue;
            }
            runs.push_back(run_pipeline(options, data, stages, each, m));
        }
    say("\n{}\n{}", promise_table(), measured_table(runs));
    PipelineRun run = run_pipeline(options, data, stages, chosen, micro_batches);
    say("\n{}", gantt_text(run));
    return run;
}

void program(int argc, char** argv) {
    TrainOptions options;
    CommOptions comm_options;
    DataParallelOptions dp_options;
    PipelineOptions pipeline_options;
    int64_t dp = 0, pp = 0;
    bool tables = true, toy = false;
    Outputs outputs;
    CommandLine command_line("Chapter 05: pipeline parallelism", options);
    add_comm_flags(command_line, comm_options);
    add_data_parallel_flags(command_line, dp, dp_options);
    add_pipeline_flags(command_line, pp, pipeline_options);
    command_line.group("Output");
    command_line.add_switch("--tables", tables, "run all schedules after training, and compare");
    command_line.add_output("--draw", outputs.draw, "FILE.png: the schedule, simulated and as run");
    command_line.add_output("--pipeline-trace", outputs.trace, "FILE.json: the same as Chrome trace events");
    command_line.add_switch("--toy-deadlock", toy, "two ranks, 1f1b with sends that wait: watch it stand still");
    command_line.parse(argc, argv);
    if (!tables && !(outputs.draw.empty() && outputs.trace.empty()))
        usage_error("--draw, --pipeline-trace: belong to the tables; leave out --tables off");

    const Comm world = connect(comm_options, options);
    if (toy) return toy_deadlock(world, options.device_kind());
    pp = ranks_per_copy(pp, dp, world);
    dp = data_parallel_ranks(dp, world, pp);
    if (options.micro_batch == 0) options.micro_batch = 1;  // many small ones
    command_line.check_batches(dp);
    const int64_t micro_batches = dp_options.micro_batches = options.accumulation(dp);
    const Stage stage = pipeline_stage(options.model, pp, world.rank() / dp, pipeline_options);
    const Schedule schedule = pipeline_schedule(pipeline_options, pp, micro_batches);
    const bool shows = tables && pp > 1 && comm_options.backend != "fake";
    if (!shows && !(outputs.draw.empty() && outputs.trace.empty()))
        usage_error("--draw, --pipeline-trace: {} is no pipeline to show; two stages or more (mpirun -np 2) would be",
                    pp == 1 ? "one stage" : "one rank of a world that is not there");

    std::optional<TrainingRun> run;
    std::optional<OutputFile> draw_file, trace_file;
    std::string python;
    together([&] {
        if (!outputs.draw.empty()) python = python_with_matplotlib();
        if (this_rank == 0 && !outputs.draw.empty()) draw_file.emplace("--draw", outputs.draw);
        if (this_rank == 0 && !outputs.trace.empty()) trace_file.emplace("--pipeline-trace", outputs.trace);
        run.emplace(options, command_line.values(), stage);
    });
    const Comm stages = world.split([dp](int rank) { return int(rank % dp); }, "pp");
    const Comm data_ranks = world.split([dp](int rank) { return int(rank / dp); }, "dp");
    {
        DataParallel data_parallel(run->model, data_ranks, dp_options);
        Pipeline pipeline(run->model, stages, schedule);
        data_parallel.attach(run->trainer);
        pipeline.attach(run->trainer);
        report_communication(run->trainer, world);
        run->materialise();
        say("{} pipeline stages x {} data-parallel ranks ({}); {}, {} micro-batches{}\n", pp, dp, world.backend(),
            schedule.name, micro_batches,
            schedule.chunks > 1 ? fmt::format(", {} chunks per rank", schedule.chunks) : "");
        run->trainer.run();
    }
    run.reset();
    if (shows) {
        const Dataset data(options.data, options.model.vocab, options.seq_len, options.val_fraction);
        const PipelineRun chosen = print_tables(options, data, stages, pipeline_options, micro_batches);
        if (trace_file) {
            trace_file->write(chrome_trace(timelines(chosen)));
            trace_file->commit();
        }
        if (!outputs.draw.empty())
            write_files(world, [&] {
                if (!draw_file) return;
                draw_file->write(draw(python, timelines_json(timelines(chosen))));
                draw_file->commit();
            });
    } else if (tables) {
        say("\n{}", promise_table());
    }
    world.finish();
}

}  // namespace

int main(int argc, char** argv) { return run_ranks(argc, argv, program); }
