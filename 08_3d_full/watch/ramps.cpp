#include "08_3d_full/watch/ramps.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "01_single_gpu/complete/report/report.h"
#include "01_single_gpu/core/registry.h"

namespace train70b {

std::string ramp_problem(const std::string& text) {
    const std::vector<std::string> parts = items_of(text, ':');
    if (parts.size() != 3) return text + " must be FROM:TO:STEPS, for example 4:16:100";
    for (const std::string& part : parts)
        if (const std::string problem = integer_from(1, &part == &parts[2] ? kMaxRampSteps : kMaxCount).problem(part);
            !problem.empty())
            return fmt::format("{}: {} (FROM:TO:STEPS)", text, problem);
    const Ramp ramp = parse_ramp(text);
    if (ramp.from > ramp.to) return text + ": FROM must be at most TO";
    return "";
}

Ramp parse_ramp(const std::string& text) {
    const std::vector<std::string> parts = items_of(text, ':');
    return {std::stoll(parts[0]), std::stoll(parts[1]), std::stoll(parts[2])};
}

void add_ramp_flags(Flags& flags, Ramps& ramps) {
    flags.group("Data");
    const auto add = [&](const char* flag, Ramp& ramp, const char* text) {
        const auto read = [&ramp](const std::string& word) { ramp = parse_ramp(word); };
        flags.add_word(flag, read, text, {ramp_problem, "FROM:TO:STEPS"}).default_text("");
    };
    add("--batch-ramp", ramps.batch,
        "the global batch grows from FROM to TO sequences (--global-batch) over the first STEPS steps");
    add("--seq-ramp", ramps.seq,
        "sequences grow from FROM to TO tokens (--seq-len); the tokens of a step stay the same");
}

int64_t ramp_micro_batch(const Ramps& ramps, int64_t dp) {
    const int64_t unit = std::gcd(ramps.batch.from, ramps.batch.to);
    if (!ramps.batch || dp < 1) return 0;
    return unit % dp == 0 ? unit / dp : 1;
}

void check_ramps(const Ramps& ramps, const TrainOptions& o, const ParallelConfig& config) {
    const auto at_other_ends = [](const char* flag, Ramp ramp, const char* size, int64_t value) {
        if (!ramp || ramp.to == value) return;
        const Ramp as_given = ramp;
        ramp.to = value;
        ramp.from = std::min(ramp.from, value);
        usage_error("{} {}: must end at {} {} (try {} {}, or {} {})", flag, as_given.text(), size, value, flag,
                    ramp.text(), size, as_given.to);
    };
    at_other_ends("--batch-ramp", ramps.batch, "--global-batch", o.global_batch);
    at_other_ends("--seq-ramp", ramps.seq, "--seq-len", o.seq_len);
    if (!o.save_reference.empty() && (ramps.batch || ramps.seq))
        usage_error("--save-reference {}: all steps of a reference run have one size; leave out {}", o.save_reference,
                    ramps.batch ? "--batch-ramp" : "--seq-ramp");
    if (const Ramp& ramp = ramps.batch) {
        const int64_t unit = std::gcd(ramp.from, ramp.to), at_once = o.micro_batch * config.mesh.dp;
        if (unit % at_once != 0)
            usage_error(
                "--batch-ramp {}: the batch grows in multiples of {}, which is not divisible by --micro-batch {} x {} "
                "data-parallel ranks (try FROM and TO that are multiples of {})",
                ramp.text(), unit, o.micro_batch, config.mesh.dp, at_once);
        const RampedSizes sizes(o.global_batch, o.seq_len, ramps);
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
    if (const Ramp& ramp = ramps.seq) {
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

void say_ramps(const Ramps& ramps) {
    for (const auto& [ramp, what] :
         {std::pair(ramps.batch, "sequences of a step"), {ramps.seq, "tokens of a sequence"}})
        if (ramp) say("      {}: from {} to {} over {} steps\n", what, ramp.from, ramp.to, ramp.steps);
}

// ---- the sizes ------------------------------------------------------------------------------------------------------

RampedSizes::RampedSizes(int64_t global_batch, int64_t seq_len, const Ramps& ramps)
    : StepSizes(global_batch, seq_len), ramps_(ramps) {
    const Ramp& batch = ramps.batch;
    if (!batch) return;
    first_.reserve(size_t(batch.steps) + 1);
    first_.push_back(0);
    for (int64_t step = 1; step <= batch.steps; ++step) first_.push_back(first_.back() + RampedSizes::samples(step));
}

int64_t RampedSizes::samples(int64_t step) const {
    if (!ramps_.batch || step > ramps_.batch.steps) return global_batch_;
    const int64_t unit = std::gcd(ramps_.batch.from, ramps_.batch.to);
    return ramps_.batch.linear(step) / unit * unit;
}

int64_t RampedSizes::seq_len(int64_t step) const {
    if (!ramps_.seq || step > ramps_.seq.steps) return seq_len_;
    int64_t length = ramps_.seq.linear(step) / ramps_.seq.from * ramps_.seq.from;
    while (seq_len_ % length != 0) length -= ramps_.seq.from;  // ends at FROM, which divides TO
    return length;
}

int64_t RampedSizes::first_sample(int64_t step) const {
    if (!ramps_.batch) return (step - 1) * global_batch_;
    if (step <= ramps_.batch.steps + 1) return first_[size_t(step) - 1];
    return first_.back() + (step - 1 - ramps_.batch.steps) * global_batch_;
}

}  // namespace train70b
