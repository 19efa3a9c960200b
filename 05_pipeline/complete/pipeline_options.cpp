#include "05_pipeline/complete/pipeline_options.h"

#include <fmt/ranges.h>

#include <numeric>
#include <optional>

#include "01_single_gpu/complete/flags/flags.h"
#include "01_single_gpu/core/registry.h"
#include "05_pipeline/complete/schedule_file.h"

namespace train70b {

namespace {

constexpr std::string_view kScheduleFile = "file:";

Check schedule_name() {
    const Check known = one_of(names_of(schedule_generators()));
    return {[known](const std::string& text) {
                if (text.starts_with(kScheduleFile) && text.size() > kScheduleFile.size()) return std::string();
                const std::string problem = known.problem(text);
                return problem.empty() ? problem : problem + "|file:SCHEDULE";
            },
            known.name + "|file:SCHEDULE"};
}

Schedule schedule_of_file(const PipelineOptions& o, int64_t stages) {
    const std::string what = "--pipeline " + o.schedule;
    if (o.virtual_stages > 0)
        usage_error("--virtual-stages {}: the chunks of {} are in the file; leave it out", o.virtual_stages, what);
    Schedule schedule = read_schedule(what, o.schedule.substr(kScheduleFile.size()));
    if (schedule.stages != stages)
        usage_error("{}: has steps for {} ranks, and --pp is {} (try --pp {})", what, schedule.stages, stages,
                    schedule.stages);
    return schedule;
}

// Of a schedule with a name.
int64_t chunks_of(const PipelineOptions& o, int64_t stages) {
    using enum ScheduleGenerator::Chunks;
    const ScheduleGenerator& generator = find_schedule(o.schedule);
    const int64_t chunks = o.virtual_stages > 0 ? o.virtual_stages : generator.default_chunks();
    if (generator.chunks != loop && chunks != generator.default_chunks())
        usage_error("--virtual-stages {}: --pipeline {} has {} per rank (try --pipeline interleaved)", chunks,
                    o.schedule, generator.chunks == one ? "one model chunk" : "two model chunks");
    if (chunks > 1 && stages == 1)
        usage_error("--pipeline {}: needs at least two pipeline ranks (try --pp 2)", o.schedule);
    return chunks;
}

}  // namespace

void add_pipeline_flags(Flags& flags, int64_t& pp, PipelineOptions& o) {
    flags.group("Communication");
    flags.add("--pp", pp, "pipeline stages [default: all ranks / --dp]", integer_from(1)).default_text("");
    flags.add("--pipeline", o.schedule, "pipeline schedule, by name or from a file", schedule_name());
    flags
        .add("--virtual-stages", o.virtual_stages, "model chunks per rank, with --pipeline interleaved (in a V: 2)",
             integer_from(1))
        .default_text("2; 1 for the others");
    flags.add("--stage-layers", o.stage_layers, "number of layers of each stage [default: equal]", integer_from(0))
        .default_text("");
}

bool from_file(const PipelineOptions& o) { return o.schedule.starts_with(kScheduleFile); }

Stage pipeline_stage(const LlamaConfig& config, int64_t stages, int64_t rank, const PipelineOptions& o) {
    std::optional<Schedule> file;
    if (from_file(o)) file = schedule_of_file(o, stages);
    const int64_t chunks = file ? file->chunks : chunks_of(o, stages), count = stages * chunks, layers = config.layers;
    const bool counted = !file && find_schedule(o.schedule).chunks == ScheduleGenerator::Chunks::loop;
    const std::string times = chunks == 1 ? ""
                              : counted   ? fmt::format(" x --virtual-stages {}", chunks)
                                          : fmt::format(" x {} chunks of --pipeline {}", chunks, o.schedule);
    if (count > layers)
        usage_error("--pp {}{}: more stages than --layers {}; each stage needs at least one layer", stages,
                    chunks > 1 ? fmt::format("{} = {}", times, count) : "", layers);
    std::vector<int64_t> sizes = o.stage_layers;
    for (int64_t i = 0; i < count && o.stage_layers.empty(); ++i)  // the first stages take the remainder
        sizes.push_back(layers / count + (i < layers % count));
    const std::string list = fmt::format("{}", fmt::join(sizes, ","));
    if (o.stage_layers.empty() && layers % count != 0)
        usage_error("--layers {} is not divisible by --pp {}{} (try --layers {} or {}, or --stage-layers {})", layers,
                    stages, times, layers / count * count, (layers / count + 1) * count, list);
    if (int64_t(sizes.size()) != count)
        usage_error("--stage-layers {}: lists {} stages; --pp {}{} makes {}", list, sizes.size(), stages, times, count);
    const int64_t sum = std::accumulate(sizes.begin(), sizes.end(), int64_t(0));
    if (sum != layers) usage_error("--stage-layers {}: {} layers; the model has {}", list, sum, layers);
    for (const int64_t size : sizes)
        if (size < 1) usage_error("--stage-layers {}: each stage needs at least one layer", list);

    const Placement placement = file ? file->placement : make_placement(o.schedule, stages, chunks);
    const std::vector<int64_t>& stages_here = placement.stage[size_t(rank)];
    Stage stage{{}, stages_here.front() == 0, stages_here.back() == count - 1};
    for (const int64_t index : stages_here) {
        const int64_t first = std::accumulate(sizes.begin(), sizes.begin() + index, int64_t(0));
        stage.chunks.push_back({first, first + sizes[size_t(index)]});
    }
    return stage;
}

Schedule pipeline_schedule(const PipelineOptions& o, int64_t stages, int64_t micro_batches) {
    if (!from_file(o)) return make_schedule(o.schedule, stages, micro_batches, chunks_of(o, stages));
    Schedule schedule = schedule_of_file(o, stages);
    std::string wrong = incomplete(schedule);
    if (wrong.empty()) wrong = deadlock(schedule, Sends::posted);
    if (!wrong.empty()) usage_error("--pipeline {}: {}", o.schedule, wrong);
    if (schedule.micro_batches != micro_batches)
        usage_error(
            "--pipeline {}: is for {} micro-batches, and there are {}: --global-batch / (--micro-batch x data-parallel "
            "ranks) must be {}",
            o.schedule, schedule.micro_batches, micro_batches, schedule.micro_batches);
    return schedule;
}

}  // namespace train70b
