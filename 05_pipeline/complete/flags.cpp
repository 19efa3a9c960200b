#include "05_pipeline/complete/flags.h"

#include "01_single_gpu/core/registry.h"

namespace train70b {

namespace {

Check schedule_name() {
    const Check known = one_of(names_of(schedule_generators()));
    return {[known](const std::string& text) {
                if (text.starts_with(kScheduleFile) && text.size() > std::string(kScheduleFile).size())
                    return std::string();
                const std::string problem = known.problem(text);
                return problem.empty() ? problem : problem + "|file:SCHEDULE";
            },
            known.name + "|file:SCHEDULE"};
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

}  // namespace train70b
