#include "05_pipeline/flags.h"

#include <numeric>

namespace train70b {

void add_pipeline_flags(Flags& flags, int64_t& pp, PipelineOptions& o) {
    flags.group("Communication");
    flags.add("--pp", pp, "pipeline stages of a model copy [what --dp leaves, all without it]", whole_number_from(1))
        .default_text("");
    flags.add("--pipeline", o.schedule, "schedule", one_of({"naive", "gpipe", "1f1b", "interleaved", "zero-bubble"}));
    flags
        .add("--virtual-stages", o.virtual_stages, "chunks of layers per rank, of --pipeline interleaved",
             whole_number_from(1))
        .default_text("2; 1 for the others");
    flags
        .add("--stage-layers", o.stage_layers, "a,b,...: layers of each stage, in order [equally many]",
             whole_number_from(0))
        .default_text("");
}

Stage pipeline_stage(const LlamaConfig& config, int64_t stages, int64_t rank, const PipelineOptions& o) {
    const int64_t chunks = o.chunks(), parts = stages * chunks, layers = config.layers;
    if (chunks > 1 && o.schedule != "interleaved")
        usage_error("--virtual-stages {}: belongs to --pipeline interleaved; {} has one chunk per rank", chunks,
                    o.schedule);
    if (chunks > 1 && stages == 1)
        usage_error("--pipeline interleaved: one stage has nothing to take turns with; --pp 2 or more would do");
    if (parts > layers)
        usage_error("--pp {}{}: more than --layers {}; each needs one at least", stages,
                    chunks > 1 ? fmt::format(" x --virtual-stages {} = {} parts", chunks, parts) : "", layers);
    std::vector<int64_t> sizes = o.stage_layers;
    if (sizes.empty()) {
        if (layers % parts != 0)
            usage_error("--layers {} does not divide by {} {}; {} would, or --stage-layers {}", layers, parts,
                        chunks > 1 ? "parts (--pp x --virtual-stages)" : "stages (--pp)", (layers / parts + 1) * parts,
                        [&] {  // the first ones take what is left over
                            std::string example;
                            for (int64_t i = 0; i < parts; ++i)
                                example += fmt::format("{}{}", i ? "," : "", layers / parts + (i < layers % parts));
                            return example;
                        }());
        sizes.assign(size_t(parts), layers / parts);
    }
    const auto shown = [&] {
        std::string text;
        for (size_t i = 0; i < sizes.size(); ++i) text += fmt::format("{}{}", i ? "," : "", sizes[i]);
        return text;
    };
    if (int64_t(sizes.size()) != parts)
        usage_error("--stage-layers {}: lists {} stages; --pp {}{} makes {}", shown(), sizes.size(), stages,
                    chunks > 1 ? fmt::format(" x --virtual-stages {}", chunks) : "", parts);
    const int64_t sum = std::accumulate(sizes.begin(), sizes.end(), int64_t(0));
    if (sum != layers) usage_error("--stage-layers {}: {} layers; the model has {}", shown(), sum, layers);
    for (const int64_t size : sizes)
        if (size < 1) usage_error("--stage-layers {}: each stage needs a layer at least", shown());

    Stage stage{{}, rank == 0, rank == stages - 1};
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const auto mine = sizes.begin() + chunk * stages + rank;
        const int64_t first = std::accumulate(sizes.begin(), mine, int64_t(0));
        stage.chunks.push_back({first, first + *mine});
    }
    return stage;
}

Schedule pipeline_schedule(const PipelineOptions& o, int64_t stages, int64_t micro_batches) {
    return make_schedule(o.schedule, stages, micro_batches, o.chunks());
}

}  // namespace train70b
