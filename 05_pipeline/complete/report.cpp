#include "05_pipeline/complete/report.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "01_single_gpu/core/registry.h"
#include "02_data_parallel/runtime/measure.h"
#include "05_pipeline/complete/flags.h"
#include "05_pipeline/complete/run_draw.h"

namespace train70b {

namespace {
bool of_file(const Schedule& schedule) { return schedule.name.starts_with("file:"); }
std::string list_text(const std::vector<int64_t>& counts) { return fmt::format("{}", fmt::join(counts, " ")); }
}  // namespace

Table promise_table() {
    Table table(
        "equal stages, B = 2F, I = W = F, messages in no time: idle share of the step, of the longest rank's own span; "
        "micro-batches in flight",
        {"", "p", "m", "formula", "simulated", "own span: formula", "simulated",
         Column("in flight on rank 0, 1, ...").left()});
    for (const int64_t p : {2, 4, 8})
        for (const int64_t m : {2 * p, 4 * p})
            for (const ScheduleGenerator& generator : schedule_generators()) {
                const Schedule schedule = make_schedule(generator.name, p, m);
                std::vector<int64_t> counts;
                for (int64_t rank = 0; rank < p; ++rank) counts.push_back(in_flight(schedule, rank));
                const Timeline timeline = simulate(schedule, equal_costs(schedule));
                table.row({schedule.name, p, m, percent(bubble_formula(schedule)), percent(timeline.bubble()),
                           percent(span_bubble_formula(schedule)), percent(timeline.span_bubble()),
                           list_text(counts) + (schedule.chunks > 1 ? " halves" : "")});
            }
    return table;
}

namespace {

// Half a round trip of x between the first two ranks, over channels as the pipeline's own; the median of some, on all
// ranks.
double hop_seconds(const Comm& ranks, Tensor x) {
    const Comm up = ranks.p2p_channel(0, 1), down = ranks.p2p_channel(1, 0);
    std::vector<double> times;
    for (int i = 0; i < 15 && ranks.rank() < 2; ++i) {
        synchronize(x.device());
        const double begin = now_seconds();
        ranks.rank() == 0 ? up.send(x, 1).wait() : up.recv(x, 0).wait();
        ranks.rank() == 0 ? down.recv(x, 1).wait() : down.send(x, 0).wait();
        synchronize(x.device());
        times.push_back((now_seconds() - begin) / 2);
    }
    return ranks.gather({median(times)})[0];
}

// Of each rank, chunk and pass: the median of what was measured.
Costs measured_costs(const Timeline& timeline, double hop) {
    std::map<std::tuple<int64_t, int64_t, Pass>, std::vector<double>> times;
    for (size_t rank = 0; rank < timeline.ranks.size(); ++rank)
        for (const Timeline::Span& span : timeline.ranks[rank])
            times[{int64_t(rank), span.step.chunk, span.step.pass}].push_back(span.end - span.begin);
    return {[times](int64_t rank, const Step& step) { return median(times.at({rank, step.chunk, step.pass})); }, hop};
}

}  // namespace

PipelineRun run_pipeline(const TrainOptions& options, const Dataset& data, const Comm& stages,
                         const PipelineOptions& pipeline_options, int64_t micro_batches) {
    TrainOptions o = options;
    o.global_batch = o.micro_batch * micro_batches;
    PipelineRun run{.schedule = pipeline_schedule(pipeline_options, stages.size(), micro_batches)};
    FreshRun fresh(o, data, pipeline_stage(o.model, stages.size(), stages.rank(), pipeline_options));
    Pipeline pipeline(fresh.model, stages, run.schedule);
    pipeline.measure(true);
    fresh.trainer.loop = &pipeline;
    fresh.trainer.groups.pp = group_of(stages);
    const Llama::Options& of = fresh.model.options;
    run.hop = hop_seconds(stages,
                          Tensor({o.micro_batch * o.seq_len, o.model.hidden}, of.dtype, of.device, Memory::workspace));
    MeasuredStep last;
    for (int step = 1; step <= 5; ++step) {
        last = fresh.measure(stages).front();
        Timeline measured = pipeline.measured();
        if (step == 2 || (step > 2 && measured.total() < run.measured.total())) run.measured = std::move(measured);
    }
    run.wire_bytes = last.wire_bytes(".send");
    run.simulated = simulate(run.schedule, measured_costs(run.measured, run.hop));
    run.memory = gather_peaks(stages, last.report.peak);
    for (const double count : stages.gather({double(pipeline.most_in_flight())}))
        run.in_flight.push_back(int64_t(count));
    return run;
}

Table measured_table(const std::vector<PipelineRun>& runs) {
    Table table(
        fmt::format("{} stages, as run: share of the step in which a rank idles, the mean over ranks; by formula "
                    "(equal stages), by the simulator\nfrom the measured times of F, B, I, W, and as measured",
                    runs.empty() ? 0 : runs[0].schedule.stages),
        {"", "m", "formula", "simulated", "measured", "step", Column("in flight").left(),
         Column("activation bytes of rank 0, 1, ...").left()});
    for (const PipelineRun& run : runs) {
        std::vector<int64_t> activations;
        for (const MemoryPeak& peak : run.memory) activations.push_back(peak.kind[int(Memory::activations)]);
        table.row({run.schedule.name, run.schedule.micro_batches,
                   of_file(run.schedule) ? Cell("-") : percent(bubble_formula(run.schedule)),
                   percent(run.simulated.bubble()), percent(run.measured.bubble()), milliseconds(run.measured.total()),
                   list_text(run.in_flight), list_text(activations)});
    }
    return table;
}

std::string gantt_text(const PipelineRun& run) {
    constexpr int64_t kWidth = 110;
    return fmt::format("{}, simulated from measured times ({:.1f} ms)\n{}measured ({:.1f} ms)\n{}", run.schedule.name,
                       1e3 * run.simulated.total(), ascii_gantt(run.simulated, kWidth), 1e3 * run.measured.total(),
                       ascii_gantt(run.measured, kWidth));
}

std::vector<std::pair<std::string, Timeline>> timelines(const PipelineRun& run) {
    const Schedule& s = run.schedule;
    return {{fmt::format("{}, {} stages, {} micro-batches: equal stages, B = 2F", s.name, s.stages, s.micro_batches),
             simulate(s, equal_costs(s))},
            {"simulated from measured times", run.simulated},
            {"measured", run.measured}};
}

void toy_deadlock(const Comm& world, Device device) {
    if (world.size() != 2 || !world.has_peers())
        usage_error("--toy-deadlock on: is played by two ranks; mpirun -np 2 would do");
    const Schedule schedule = make_schedule("1f1b", 2, 4);
    say("1f1b, every send waits until it is received. The checker: {}\nThe ranks (--comm-timeout ends it):\n",
        deadlock(schedule, Sends::blocking));
    Tensor message({1 << 22}, DType::f32, device, Memory::comm);  // 16 MiB: beyond what is sent without asking
    fill(message, 0);
    const int other = 1 - world.rank();
    for (const Step& step : schedule.ranks[size_t(world.rank())]) {
        const bool forward = step.pass == Pass::forward, sends = forward == (world.rank() == 0);
        std::fputs(fmt::format("rank {}: {}\n", world.rank(), to_string(step)).c_str(), stdout);
        std::fflush(stdout);
        sends ? world.send(message, other).wait() : world.recv(message, other).wait();
        synchronize(device);
    }
}

namespace {

bool one_chunk(const PipelineOptions& o) {
    return !from_file(o) && find_schedule(o.schedule).chunks == ScheduleGenerator::Chunks::one;
}

PipelineRun print_tables(Program& p, const Comm& stages, const PipelineOptions& chosen, int64_t micro_batches) {
    const TrainOptions& options = p.options;
    say("\nall schedules, five steps each, with 4, 8 and 16 micro-batches:\n");
    std::vector<PipelineRun> runs;
    for (const std::string& name : names_of(schedule_generators()))
        for (const int64_t m : {4, 8, 16}) {
            PipelineOptions each{.schedule = name};
            if (name == chosen.schedule || (one_chunk(each) && one_chunk(chosen))) each = chosen;
            each.schedule = name;
            const bool runs_here = possible(fmt::format("{} with {}", name, m), [&] {
                pipeline_stage(options.model, stages.size(), stages.rank(), each);
                pipeline_schedule(each, stages.size(), m);
            });
            if (runs_here) runs.push_back(run_pipeline(options, p.data(), stages, each, m));
        }
    say(promise_table());
    if (!runs.empty()) say(measured_table(runs));
    PipelineRun run = run_pipeline(options, p.data(), stages, chosen, micro_batches);
    if (from_file(chosen)) say(measured_table({run}));
    say("\n{}", gantt_text(run));
    return run;
}

}  // namespace

Schedule schedule_of(const Program& p, int64_t pp, const PipelineOptions& options) {
    return pipeline_schedule(options, pp, p.options.accumulation(p.dp));
}

Stage stage_of(const Program& p, int64_t pp, const PipelineOptions& options) {
    return pipeline_stage(p.options.model, pp, p.world.rank() / p.dp, options);
}

void say_layout(const Program& p, int64_t pp, const PipelineOptions& options) {
    const Schedule schedule = schedule_of(p, pp, options);
    say("{} pipeline stages x {} data-parallel ranks ({}); {}, {} micro-batches{}\n", pp, p.dp, p.world.backend(),
        schedule.name, schedule.micro_batches,
        schedule.chunks > 1 ? fmt::format(", {} virtual stages per rank", schedule.chunks) : "");
}

PipelineReport::PipelineReport(CommandLine& flags) {
    flags.group("Output");
    flags.add_output(draw_, "FILE.png: draw the schedule, simulated and measured");
    flags.add_output(trace_, "FILE.json: write the schedule as Chrome trace events");
    flags.add_switch("--toy-deadlock", toy_, "demonstrate the deadlock of 1f1b with blocking sends, on two ranks");
}

bool PipelineReport::toy_deadlock(const Program& p) const {
    if (toy_) train70b::toy_deadlock(p.world, p.options.device_kind());
    return toy_;
}

void PipelineReport::open(const Program& p, int64_t pp, const PipelineOptions& options) {
    stage_of(p, pp, options);
    schedule_of(p, pp, options);
    if (!draw_.given() && !trace_.given()) return;
    if (!p.tables) usage_error("--draw, --pipeline-trace: belong to the tables; leave out --tables off");
    if (!p.compares(pp))
        usage_error("--draw, --pipeline-trace: {} is no pipeline to show; two stages or more (mpirun -np 2) would be",
                    pp == 1 ? "one stage" : "one simulated rank");
    if (draw_.given()) python_ = python_with_matplotlib();
    draw_.open();
    trace_.open();
}

void PipelineReport::print(Program& p, const Comm& stages, const PipelineOptions& chosen) {
    p.release();
    if (!p.compares(stages.size())) {
        if (p.tables) say(promise_table());
        return;
    }
    const PipelineRun run = print_tables(p, stages, chosen, p.options.accumulation(p.dp));
    trace_.write(chrome_trace(timelines(run)));
    if (!draw_.given()) return;
    write_files(p.world, [&] {
        if (this_rank == 0) draw_.write(draw(python_, timelines_json(timelines(run))));
    });
}

}  // namespace train70b
