#include "05_pipeline/flags.h"

#include <numeric>

#include "01_single_gpu/core/registry.h"

namespace train70b {

void add_pipeline_flags(Flags& flags, int64_t& pp, PipelineOptions& o) {
    flags.group("Communication");
    flags.add("--pp", pp, "pipeline stages [default: all ranks / --dp]", integer_from(1)).default_text("");
    flags.add("--pipeline", o.schedule, "pipeline schedule", one_of(names_of(schedule_generators())));
    flags
        .add("--virtual-stages", o.virtual_stages, "model chunks per rank, with --pipeline interleaved",
             integer_from(1))
        .default_text("2; 1 for the others");
    flags
        .add("--stage-layers", o.stage_layers, "number of layers of each stage [default: equal]",
             {integer_from(0).problem, "INT,..."})
        .default_text("");
}

Stage pipeline_stage(const LlamaConfig& config, int64_t stages, int64_t rank, const PipelineOptions& o) {
    const int64_t chunks = o.chunks(), count = stages * chunks, layers = config.layers;
    if (chunks > 1 && !find_schedule(o.schedule).virtual_stages)
        usage_error("--virtual-stages {}: --pipeline {} has one model chunk per rank (try --pipeline interleaved)",
                    chunks, o.schedule);
    if (chunks > 1 && stages == 1)
        usage_error("--pipeline {}: needs at least two pipeline ranks (try --pp 2)", o.schedule);
    if (count > layers)
        usage_error("--pp {}{}: more stages than --layers {}; each stage needs at least one layer", stages,
                    chunks > 1 ? fmt::format(" x --virtual-stages {} = {}", chunks, count) : "", layers);
    std::vector<int64_t> sizes = o.stage_layers;
    if (sizes.empty()) {
        std::string uneven;  // the first stages take the remainder
        for (int64_t i = 0; i < count; ++i)
            uneven += fmt::format("{}{}", i ? "," : "", layers / count + (i < layers % count));
        if (layers % count != 0)
            usage_error("--layers {} is not divisible by --pp {}{} (try --layers {} or {}, or --stage-layers {})",
                        layers, stages, chunks > 1 ? fmt::format(" x --virtual-stages {}", chunks) : "",
                        layers / count * count, (layers / count + 1) * count, uneven);
        sizes.assign(size_t(count), layers / count);
    }
    const auto shown = [&] {
        std::string text;
        for (size_t i = 0; i < sizes.size(); ++i) text += fmt::format("{}{}", i ? "," : "", sizes[i]);
        return text;
    };
    if (int64_t(sizes.size()) != count)
        usage_error("--stage-layers {}: lists {} stages; --pp {}{} makes {}", shown(), sizes.size(), stages,
                    chunks > 1 ? fmt::format(" x --virtual-stages {}", chunks) : "", count);
    const int64_t sum = std::accumulate(sizes.begin(), sizes.end(), int64_t(0));
    if (sum != layers) usage_error("--stage-layers {}: {} layers; the model has {}", shown(), sum, layers);
    for (const int64_t size : sizes)
        if (size < 1) usage_error("--stage-layers {}: each stage needs at least one layer", shown());

    Stage stage{{}, rank == 0, rank == stages - 1};
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const auto mine = sizes.begin() + chunk * stages + rank;
        const int64_t first = std::accumulate(sizes.begin(), mine, int64_t(0));
        stage.chunks.push_back({first, first + *mine});
    }
    return stage;
}

StageComms split_stages(const Comm& world, int64_t dp) {
    return {world.split([dp](int rank) { return int(rank % dp); }, "pp"),
            world.split([dp](int rank) { return int(rank / dp); }, "dp")};
}

Schedule pipeline_schedule(const PipelineOptions& o, int64_t stages, int64_t micro_batches) {
    return make_schedule(o.schedule, stages, micro_batches, o.chunks());
}

}  // namespace train70b
