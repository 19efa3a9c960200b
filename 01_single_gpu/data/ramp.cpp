#include "01_single_gpu/data/ramp.h"

#include <algorithm>
#include <numeric>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/flags/flags.h"

namespace train70b {

int64_t Ramp::linear(int64_t step) const { return step > steps ? to : from + (to - from) * (step - 1) / steps; }

std::string Ramp::text() const { return fmt::format("{}:{}:{}", from, to, steps); }

namespace {
std::vector<std::string> fields(const std::string& text) {
    std::vector<std::string> list;
    for (size_t begin = 0, end = 0; end != text.npos; begin = end + 1)
        list.push_back(text.substr(begin, (end = text.find(':', begin)) - begin));
    return list;
}
}  // namespace

std::string ramp_problem(const std::string& text) {
    const std::vector<std::string> parts = fields(text);
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
    const std::vector<std::string> parts = fields(text);
    return {std::stoll(parts[0]), std::stoll(parts[1]), std::stoll(parts[2])};
}

StepSizes::StepSizes(int64_t global_batch, int64_t seq_len, const Ramp& batch, const Ramp& seq)
    : global_batch_(global_batch), seq_len_(seq_len), batch_(batch), seq_(seq) {
    if (!batch) return;
    first_.reserve(size_t(batch.steps) + 1);
    first_.push_back(0);
    for (int64_t step = 1; step <= batch.steps; ++step) first_.push_back(first_.back() + samples(step));
}

int64_t StepSizes::samples(int64_t step) const {
    if (!batch_ || step > batch_.steps) return global_batch_;
    const int64_t unit = std::gcd(batch_.from, batch_.to);
    return batch_.linear(step) / unit * unit;
}

int64_t StepSizes::seq_len(int64_t step) const {
    if (!seq_ || step > seq_.steps) return seq_len_;
    int64_t length = seq_.linear(step) / seq_.from * seq_.from;
    while (seq_len_ % length != 0) length -= seq_.from;  // ends at FROM, which divides TO
    return length;
}

int64_t StepSizes::first_sample(int64_t step) const {
    if (!batch_) return (step - 1) * global_batch_;
    if (step <= batch_.steps + 1) return first_[size_t(step) - 1];
    return first_.back() + (step - 1 - batch_.steps) * global_batch_;
}

}  // namespace train70b
