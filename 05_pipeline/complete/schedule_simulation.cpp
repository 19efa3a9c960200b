#include "05_pipeline/complete/schedule_simulation.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cmath>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <tuple>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/json.h"

namespace train70b {

Costs equal_costs(const Schedule& s, double forward, double input, double weight, double hop) {
    const double share = 1.0 / double(s.chunks);
    const std::array of_pass = {forward * share, (input + weight) * share, input * share, weight * share};
    return {[=](int64_t, const Step& step) { return of_pass[size_t(step.pass)]; }, hop};
}

double Timeline::begin() const {
    double first = std::numeric_limits<double>::infinity();
    for (const auto& spans : ranks)
        for (const Span& span : spans) first = std::min(first, span.begin);
    return first;
}

double Timeline::total() const {
    double last = -std::numeric_limits<double>::infinity();
    for (const auto& spans : ranks)
        for (const Span& span : spans) last = std::max(last, span.end);
    return last - begin();
}

double Timeline::span(int64_t rank) const {
    const auto& spans = ranks[size_t(rank)];
    return spans.empty() ? 0 : spans.back().end - spans.front().begin;
}

double Timeline::longest_span() const {
    double longest = 0;
    for (size_t rank = 0; rank < ranks.size(); ++rank) longest = std::max(longest, span(int64_t(rank)));
    return longest;
}

double Timeline::span_bubble() const {
    int64_t longest = 0;
    for (size_t rank = 1; rank < ranks.size(); ++rank)
        if (span(int64_t(rank)) > span(longest)) longest = int64_t(rank);
    return 1 - busy(longest) / span(longest);
}

double Timeline::busy(int64_t rank) const {
    double sum = 0;
    for (const Span& span : ranks[size_t(rank)]) sum += span.end - span.begin;
    return sum;
}

double Timeline::bubble() const {
    const double all = total();
    double sum = 0;
    for (size_t rank = 0; rank < ranks.size(); ++rank) sum += 1 - busy(int64_t(rank)) / all;
    return sum / double(ranks.size());
}

namespace {

// When the output of a pass through a stage is complete, and which of its rank's steps it is: (forward?, micro-batch,
// stage index).
struct Done {
    double end;
    size_t step;
};
using Outputs = std::map<std::tuple<bool, int64_t, int64_t>, Done>;

// From the last end back: to the rank's own previous step if this one began at its end, else to its input.
void mark_critical_path(const Schedule& s, const Outputs& done, Timeline& timeline) {
    const auto end_of = [&](int64_t rank) {
        const auto& spans = timeline.ranks[size_t(rank)];
        return spans.empty() ? 0 : spans.back().end;
    };
    int64_t rank = 0;
    for (int64_t other = 1; other < s.stages; ++other)
        if (end_of(other) > end_of(rank)) rank = other;
    for (size_t i = timeline.ranks[size_t(rank)].size(); i > 0;) {
        auto& spans = timeline.ranks[size_t(rank)];
        Timeline::Span& span = spans[--i];
        span.critical = true;
        if (i > 0 && spans[i - 1].end == span.begin) continue;
        const bool forward = span.step.pass == Pass::forward;
        const int64_t from = s.stage_index(rank, span.step.chunk) + (forward ? -1 : 1);
        if (from < 0) return;  // the first step
        rank = s.rank_of(from);
        i = done.at({forward, span.step.micro_batch, from}).step + 1;
    }
}

}  // namespace

Timeline simulate(const Schedule& s, const Costs& costs) {
    Outputs done;
    Timeline timeline;
    timeline.ranks.resize(size_t(s.stages));
    for (bool moved = true; moved;) {
        moved = false;
        for (int64_t rank = 0; rank < s.stages; ++rank) {
            auto& spans = timeline.ranks[size_t(rank)];
            for (; spans.size() < s.ranks[size_t(rank)].size(); moved = true) {
                // tag::simulate[]
                const Step& step = s.ranks[size_t(rank)][spans.size()];
                const int64_t stage = s.stage_index(rank, step.chunk);
                const bool forward = step.pass == Pass::forward, weight = step.pass == Pass::backward_weight;
                double begin = spans.empty() ? 0 : spans.back().end;
                const int64_t from = forward ? stage - 1 : stage + 1;
                if (!weight && from >= 0 && from < s.stage_count()) {
                    const auto input = done.find({forward, step.micro_batch, from});
                    if (input == done.end()) break;  // not simulated yet
                    begin = std::max(begin, input->second.end + (s.rank_of(from) == rank ? 0 : costs.hop));
                }
                const double end = begin + costs.step(rank, step);
                if (!weight) done[{forward, step.micro_batch, stage}] = {end, spans.size()};
                spans.push_back({step, begin, end});
                // end::simulate[]
            }
        }
    }
    for (int64_t rank = 0; rank < s.stages; ++rank)
        CHECK(timeline.ranks[size_t(rank)].size() == s.ranks[size_t(rank)].size(), "{}", deadlock(s, Sends::posted));
    mark_critical_path(s, done, timeline);
    return timeline;
}

Schedule consecutive(const Schedule& s, int64_t steps) {
    Schedule all = s;
    all.micro_batches = steps * s.micro_batches;
    for (auto& list : all.ranks) {
        const std::vector<Step> once = list;
        for (int64_t k = 1; k < steps; ++k)
            for (Step step : once) {
                step.micro_batch += k * s.micro_batches;
                list.push_back(step);
            }
    }
    return all;
}

std::string ascii_gantt(const Timeline& timeline, int64_t width) {
    std::string text;
    const double begin = timeline.begin(), total = timeline.total(), scale = double(width) / total;
    const auto place = [&](const Timeline::Span& span) {
        const int64_t from = std::clamp<int64_t>(std::llround((span.begin - begin) * scale), 0, width - 1);
        const int64_t to = std::clamp<int64_t>(std::llround((span.end - begin) * scale), from + 1, width);
        const char letter = letter_of(span.step.pass);
        return std::tuple(
            from, to,
            fmt::format("{}{}", span.step.chunk % 2 ? char(std::tolower(letter)) : letter, span.step.micro_batch));
    };
    std::set<Pass> short_of_room;  // a pass of which some step has no room for its number is drawn without numbers
    for (const auto& spans : timeline.ranks)
        for (const Timeline::Span& span : spans)
            if (const auto [from, to, name] = place(span); to - from < int64_t(name.size()))
                short_of_room.insert(span.step.pass);
    for (size_t rank = 0; rank < timeline.ranks.size(); ++rank) {
        std::string line(size_t(width), '.');
        for (const Timeline::Span& span : timeline.ranks[rank]) {
            auto [from, to, name] = place(span);
            if (short_of_room.contains(span.step.pass)) name.resize(1);
            const char fill = span.critical                             ? '='
                              : span.step.pass == Pass::forward         ? ' '
                              : span.step.pass == Pass::backward_weight ? '~'
                                                                        : '-';
            for (int64_t i = from; i < to; ++i)
                line[size_t(i)] = i - from < int64_t(name.size()) ? name[size_t(i - from)] : fill;
        }
        text += fmt::format("rank {:<3}|{}|  idle {:>4.1f}%\n", rank, line,
                            100 * (1 - timeline.busy(int64_t(rank)) / total));
    }
    return text;
}

std::string chrome_trace(const std::vector<std::pair<std::string, Timeline>>& timelines) {
    auto events = nlohmann::ordered_json::array();
    for (size_t process = 0; process < timelines.size(); ++process) {
        const auto& [title, timeline] = timelines[process];
        events.push_back({{"ph", "M"}, {"name", "process_name"}, {"pid", process}, {"args", {{"name", title}}}});
        const double begin = timeline.begin();
        for (size_t rank = 0; rank < timeline.ranks.size(); ++rank) {
            events.push_back({{"ph", "M"},
                              {"name", "thread_name"},
                              {"pid", process},
                              {"tid", rank},
                              {"args", {{"name", fmt::format("rank {}", rank)}}}});
            for (const Timeline::Span& span : timeline.ranks[rank])
                events.push_back({{"ph", "X"},
                                  {"name", to_string(span.step)},
                                  {"pid", process},
                                  {"tid", rank},
                                  {"ts", (span.begin - begin) * 1e6},
                                  {"dur", (span.end - span.begin) * 1e6}});
        }
    }
    return json_text(nlohmann::ordered_json{{"traceEvents", events}}) + "\n";
}

}  // namespace train70b
