#include "05_pipeline/complete/training_report.h"

#include <fmt/ranges.h>

#include <map>
#include <tuple>

#include "01_single_gpu/complete/run/bench.h"
#include "02_data_parallel/runtime/median.h"
#include "05_pipeline/complete/plot_script.h"

namespace train70b {

namespace {

// Half a round trip of x between the first two ranks, over channels as the pipeline's own; the median of some, on all
// ranks.
double hop_seconds(const Comm& ranks, Tensor x) {
    const Comm up = ranks.p2p_channel(0, 1), down = ranks.p2p_channel(1, 0);
    const auto round_trip = [&] {
        ranks.rank() == 0 ? up.send(x, 1).wait() : up.recv(x, 0).wait();
        ranks.rank() == 0 ? down.recv(x, 1).wait() : down.send(x, 0).wait();
    };
    return ranks.gather({ranks.rank() < 2 ? median_seconds(x.device(), 15, round_trip) / 2 : 0})[0];
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

PipelineWatch::PipelineWatch(Trainer& trainer, Pipeline& pipeline, const Comm& stages, Schedule schedule)
    : schedule(std::move(schedule)), trainer_(trainer), pipeline_(pipeline), stages_(stages) {
    trainer.controls.push_back(this);
}

void PipelineWatch::before_step(int64_t step) {
    const int64_t last = trainer_.last_step();
    measures_ = step > last - 4 && (step > 1 || last == 1);
    pipeline_.measure(measures_);
}

bool PipelineWatch::after_step(const StepReport& step) {
    if (!measures_) return true;
    Timeline timeline = pipeline_.measured();
    if (!measured.ranks.empty() && timeline.total() >= measured.total()) return true;
    measured = std::move(timeline);
    memory = gather_peaks(stages_, step.peak);
    return true;
}

void PipelineWatch::finish() {
    if (measured.ranks.empty()) return;
    in_flight.clear();
    for (const double count : stages_.gather({double(pipeline_.most_in_flight())})) in_flight.push_back(int64_t(count));
    const TrainOptions& o = trainer_.options;
    const Llama::Options& types = trainer_.model.options;
    const Tensor message({o.micro_batch * o.seq_len, o.model.hidden}, types.dtype, types.device, Memory::workspace);
    simulated = simulate(schedule, measured_costs(measured, hop_seconds(stages_, message)));
}

void say_layout(const Program& p, const Schedule& schedule) {
    say("{} pipeline stages x {} data-parallel ranks ({}); {}, {} micro-batches{}\n", schedule.stages, p.dp,
        p.world.backend(), schedule.name, schedule.micro_batches,
        schedule.chunks > 1 ? fmt::format(", {} virtual stages per rank", schedule.chunks) : "");
}

PipelineReport::PipelineReport(CommandLine& flags) {
    flags.group("Output");
    flags.add_output(draw_, "FILE.png: draw the schedule, simulated and measured");
    flags.add_output(trace_, "FILE.json: write the schedule as Chrome trace events");
}

void PipelineReport::open(const Program& p, int64_t pp, const PipelineOptions& options) {
    pipeline_stage(p.options.model, pp, p.world.rank() / p.dp, options);
    pipeline_schedule(options, pp, p.options.accumulation(p.dp));
    if (!draw_.given() && !trace_.given()) return;
    if (!p.tables) usage_error("--draw, --pipeline-trace: belong to the tables; leave out --tables off");
    if (p.options.steps == 0) usage_error("--draw, --pipeline-trace: show a step; --steps 1 or more would be one");
    if (pp == 1 || !p.world.has_peers())
        usage_error("--draw, --pipeline-trace: {} is no pipeline to show; two stages or more (mpirun -np 2) would be",
                    pp == 1 ? "one stage" : "one simulated rank");
    if (draw_.given()) python_ = python_with_matplotlib();
    draw_.open();
    trace_.open();
}

void PipelineReport::watch(Program& p, Pipeline& pipeline, const Comm& stages, const Schedule& schedule) {
    if (p.tables && stages.size() > 1 && stages.has_peers()) watch_.emplace(p.trainer(), pipeline, stages, schedule);
}

namespace {

Table measured_table(const PipelineWatch& run) {
    const Schedule& s = run.schedule;
    Table table(fmt::format("{} stages, as run: share of the step in which a rank idles, the mean over ranks; by "
                            "formula (equal stages), by the simulator\nfrom the measured times of F, B, I, W, and as "
                            "measured",
                            s.stages),
                {"", "m", "formula", "simulated", "measured", "step", Column("in flight").left(),
                 Column("activation bytes of rank 0, 1, ...").left()});
    std::vector<int64_t> activations;
    for (const MemoryPeak& peak : run.memory) activations.push_back(peak.kind[int(Memory::activations)]);
    table.row({s.name, s.micro_batches, s.name.starts_with("file:") ? Cell("-") : percent(bubble_formula(s)),
               percent(run.simulated.bubble()), percent(run.measured.bubble()), milliseconds(run.measured.total()),
               fmt::format("{}", fmt::join(run.in_flight, " ")), fmt::format("{}", fmt::join(activations, " "))});
    return table;
}

// For plot_timelines.py and for Perfetto: with equal stages, from measured times, and as measured.
std::vector<std::pair<std::string, Timeline>> timelines(const PipelineWatch& run) {
    const Schedule& s = run.schedule;
    return {{fmt::format("{}, {} stages, {} micro-batches: equal stages, B = 2F", s.name, s.stages, s.micro_batches),
             simulate(s, equal_costs(s))},
            {"simulated from measured times", run.simulated},
            {"measured", run.measured}};
}

}  // namespace

void PipelineReport::print(const Program& p) {
    if (!watch_ || !p.prints_tables()) return;
    say(measured_table(*watch_));
    constexpr int64_t kWidth = 110;
    const Timeline &simulated = watch_->simulated, &measured = watch_->measured;
    say("\n{}, simulated from measured times ({:.1f} ms)\n{}measured ({:.1f} ms)\n{}", watch_->schedule.name,
        1e3 * simulated.total(), ascii_gantt(simulated, kWidth), 1e3 * measured.total(), ascii_gantt(measured, kWidth));
    trace_.write(chrome_trace(timelines(*watch_)));
    if (!draw_.given()) return;
    write_files(p.world, [&] {
        if (this_rank == 0) draw_.write(draw(python_, chrome_trace(timelines(*watch_))));
    });
}

}  // namespace train70b
