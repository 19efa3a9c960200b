#include "08_3d_full/watch/ramps.h"

#include <numeric>
#include <set>

#include "05_pipeline/flags.h"

namespace train70b {

void add_ramp_flags(Flags& flags, TrainOptions& o) {
    const Check check{ramp_problem, "FROM:TO:STEPS"};
    flags.group("Data");
    flags
        .add_word(
            "--batch-ramp", [&o](const std::string& text) { o.batch_ramp = parse_ramp(text); },
            "the global batch grows from FROM to TO sequences (--global-batch) over the first STEPS steps", check)
        .default_text("");
    flags
        .add_word(
            "--seq-ramp", [&o](const std::string& text) { o.seq_ramp = parse_ramp(text); },
            "sequences grow from FROM to TO tokens (--seq-len); the tokens of a step stay the same", check)
        .default_text("");
}

int64_t ramp_micro_batch(const TrainOptions& o, int64_t dp) {
    const int64_t unit = std::gcd(o.batch_ramp.from, o.batch_ramp.to);
    if (!o.batch_ramp || dp < 1) return 0;
    return unit % dp == 0 ? unit / dp : 1;
}

void check_ramps(const TrainOptions& o, const ParallelConfig& config) {
    const auto at_other_ends = [](const char* flag, Ramp ramp, const char* size, int64_t value) {
        if (!ramp || ramp.to == value) return;
        const Ramp as_given = ramp;
        ramp.to = value;
        ramp.from = std::min(ramp.from, value);
        usage_error("{} {}: must end at {} {} (try {} {}, or {} {})", flag, as_given.text(), size, value, flag,
                    ramp.text(), size, as_given.to);
    };
    at_other_ends("--batch-ramp", o.batch_ramp, "--global-batch", o.global_batch);
    at_other_ends("--seq-ramp", o.seq_ramp, "--seq-len", o.seq_len);
    if (!o.save_reference.empty() && (o.batch_ramp || o.seq_ramp))
        usage_error("--save-reference {}: all steps of a reference run have one size; leave out {}", o.save_reference,
                    o.batch_ramp ? "--batch-ramp" : "--seq-ramp");
    if (const Ramp& ramp = o.batch_ramp) {
        const int64_t unit = std::gcd(ramp.from, ramp.to), at_once = o.micro_batch * config.mesh.dp;
        if (unit % at_once != 0)
            usage_error(
                "--batch-ramp {}: the batch grows in multiples of {}, which is not divisible by --micro-batch {} x {} "
                "data-parallel ranks (try FROM and TO that are multiples of {})",
                ramp.text(), unit, o.micro_batch, config.mesh.dp, at_once);
        const StepSizes sizes = o.sizes();
        std::set<int64_t> counts;  // micro-batches of a rank
        for (int64_t step = 1; step <= ramp.steps; ++step) counts.insert(sizes.samples(step) / at_once);
        if (from_file(config.pipeline))
            usage_error("--batch-ramp {}: --pipeline {} is for one number of micro-batches (try a schedule by name)",
                        ramp.text(), config.pipeline.schedule);
        const ScheduleGenerator& schedule = find_schedule(config.pipeline.schedule);
        const int64_t unit_count = schedule.multiple ? schedule.multiple(config.mesh.pp) : 1;
        const int64_t least = schedule.least ? schedule.least(config.mesh.pp) : 1;
        for (const int64_t count : counts) {
            if (count % unit_count != 0)
                usage_error(
                    "--batch-ramp {}: a batch of {} sequences is {} micro-batches, and --pipeline {} needs a "
                    "multiple of --pp {} (try FROM and TO that are multiples of {})",
                    ramp.text(), count * at_once, count, schedule.name, config.mesh.pp, at_once * unit_count);
            if (count < least)
                usage_error(
                    "--batch-ramp {}: a batch of {} sequences is {} micro-batches, and --pipeline {} needs {} on --pp "
                    "{} (try FROM {})",
                    ramp.text(), count * at_once, count, schedule.name, least, config.mesh.pp, at_once * least);
        }
    }
    if (const Ramp& ramp = o.seq_ramp) {
        if (ramp.to % ramp.from != 0)
            usage_error(
                "--seq-ramp {}: TO is not divisible by FROM (try {}:{}:{}): a sequence is cut into equal pieces",
                ramp.text(), std::gcd(ramp.from, ramp.to), ramp.to, ramp.steps);
        const int64_t unit = context_layout(config, o).granularity();
        if (ramp.from % unit != 0)
            usage_error(
                "--seq-ramp {}: pieces of {} tokens are not divisible by {} (--cp {} with --cp-algorithm {}; try "
                "{}:{}:{})",
                ramp.text(), ramp.from, unit, config.mesh.cp, config.context.algorithm, (ramp.from / unit + 1) * unit,
                ramp.to, ramp.steps);
    }
}

}  // namespace train70b
