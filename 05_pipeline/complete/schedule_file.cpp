#include "05_pipeline/complete/schedule_file.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <sstream>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/files.h"

namespace train70b {

namespace {

struct Line {
    const std::string& file;
    int64_t number;  // from 1
    std::vector<std::string> words;

    [[noreturn]] void wrong(size_t word, const std::string& problem) const {
        constexpr size_t kShown = 40;  // of a file that is no text at all
        std::string shown = words[word].substr(0, kShown);
        for (char& c : shown)
            if (c >= 0 && c < ' ') c = '?';
        if (words[word].size() > kShown) shown += "...";
        usage_error("{}, line {}, word {} \"{}\": {}", file, number, word + 1, shown, problem);
    }
};

// Without comments and empty lines.
std::vector<Line> lines_of(const std::string& file, const std::string& text) {
    std::vector<Line> lines;
    std::istringstream stream(text);
    std::string line;
    for (int64_t number = 1; std::getline(stream, line); ++number) {
        std::istringstream words(line.substr(0, line.find('#')));
        Line found{file, number, {}};
        for (std::string word; words >> word;) found.words.push_back(word);
        if (!found.words.empty()) lines.push_back(std::move(found));
    }
    return lines;
}

// A number of at most nine digits without leading zeros, or none.
std::optional<int64_t> number_of(const std::string& text) {
    if (text.empty() || text.size() > 9 || text.find_first_not_of("0123456789") != text.npos) return {};
    if (text.size() > 1 && text[0] == '0') return {};
    return std::stoll(text);
}

std::vector<Step> steps_of(const Line& line) {
    std::vector<Step> steps;
    for (size_t i = 0; i < line.words.size(); ++i) {
        const std::string& word = line.words[i];
        const size_t pass = std::string("FBIW").find(word[0]), dot = word.find('.');
        const auto micro_batch = number_of(word.substr(1, dot == word.npos ? dot : dot - 1));
        const auto chunk = dot == word.npos ? 0 : number_of(word.substr(dot + 1));
        if (pass == std::string::npos || !micro_batch || !chunk)
            line.wrong(i, "is no step (F, B, I or W, the micro-batch, and .CHUNK if not 0: F3, B0.1)");
        // Each micro-batch goes through each chunk, in two steps or three.
        const int64_t steps_here = int64_t(line.words.size());
        if (*micro_batch >= steps_here || *chunk >= steps_here)
            line.wrong(i, fmt::format("a rank of {} steps has no such micro-batch or chunk", steps_here));
        steps.push_back({Pass(pass), *micro_batch, *chunk});
    }
    return steps;
}

Placement placement_in(const Line& line, const Schedule& s) {
    if (line.words[0] == "placement:") {
        if (line.words.size() != 2 || (line.words[1] != "loop" && line.words[1] != "v"))
            line.wrong(line.words.size() > 1 ? 1 : 0, "must be \"placement: loop\" or \"placement: v\"");
        if (line.words[1] == "loop") return loop_placement(s.stages, s.chunks);
        if (s.chunks != 2) line.wrong(1, fmt::format("a V has two chunks per rank; the steps name {}", s.chunks));
        return v_placement(s.stages);
    }
    if (line.words[0] != "stages:")
        line.wrong(0, "must be \"placement: loop\", \"placement: v\" or \"stages: 0 3 / 1 2\"");
    const int64_t count = s.stage_count();
    std::vector<std::vector<int64_t>> stages(1);
    std::vector<bool> taken(static_cast<size_t>(count));
    for (size_t i = 1; i < line.words.size(); ++i) {
        if (line.words[i] == "/") {
            stages.emplace_back();
            continue;
        }
        const auto stage = number_of(line.words[i]);
        if (!stage || *stage >= count)
            line.wrong(i, fmt::format("must be a stage from 0 to {} ({} ranks of {} chunks), or /", count - 1, s.stages,
                                      s.chunks));
        if (taken[size_t(*stage)]) line.wrong(i, "is there twice");
        if (!stages.back().empty() && *stage < stages.back().back())
            line.wrong(i, "comes after a higher stage of its rank; chunks are in the order of their stages");
        taken[size_t(*stage)] = true;
        stages.back().push_back(*stage);
    }
    if (int64_t(stages.size()) != s.stages)
        line.wrong(0, fmt::format("lists {} ranks; there are {} lines of steps", stages.size(), s.stages));
    for (size_t rank = 0; rank < stages.size(); ++rank)
        if (int64_t(stages[rank].size()) != s.chunks)
            line.wrong(
                0, fmt::format("has {} stages for rank {}, which has {} chunks", stages[rank].size(), rank, s.chunks));
    return placement_of(std::move(stages));
}

}  // namespace

Schedule parse_schedule(const std::string& name, const std::string& text) {
    Schedule s{name, 0, 0, 1, {}, {}};
    const std::vector<Line> lines = lines_of(name, text);
    const Line* placement = nullptr;
    for (const Line& line : lines)
        if (line.words[0].ends_with(":")) {
            if (placement) line.wrong(0, "a second line of the placement");
            if (!s.ranks.empty()) line.wrong(0, "the placement comes before the ranks' lines");
            placement = &line;
        } else {
            s.ranks.push_back(steps_of(line));
            for (const Step& step : s.ranks.back()) {
                s.micro_batches = std::max(s.micro_batches, step.micro_batch + 1);
                s.chunks = std::max(s.chunks, step.chunk + 1);
            }
        }
    s.stages = int64_t(s.ranks.size());
    size_t steps = 0;
    for (const auto& rank : s.ranks) steps += rank.size();
    if (s.chunks > 1 && s.stages * s.chunks > int64_t(steps))
        usage_error("{}: has fewer steps than {} ranks of {} chunks have stages", name, s.stages, s.chunks);
    if (s.ranks.empty()) usage_error("{}: has no line of steps (one line per rank: F0 F1 B0 B1)", name);
    s.placement = placement ? placement_in(*placement, s) : loop_placement(s.stages, s.chunks);
    return s;
}

Schedule read_schedule(const std::string& what, const std::string& path) {
    constexpr int64_t kMost = 100 << 20;  // bytes; ten million passes are less
    const InputFile file(what, path, "must be a schedule: one line of steps per rank");
    if (file.bytes() > kMost) usage_error("{}: has {} bytes; a schedule has at most {}", what, file.bytes(), kMost);
    std::string text(size_t(file.bytes()), ' ');
    file.read(0, text.data(), file.bytes());
    Schedule schedule = parse_schedule(what, text);
    schedule.name = fmt::format("file:{}", path);
    return schedule;
}

std::string schedule_text(const Schedule& s) {
    std::string text = fmt::format("# {}: {} ranks, {} micro-batches\n", s.name, s.stages, s.micro_batches);
    if (s.chunks == 2 && s.placement == v_placement(s.stages)) {
        text += "placement: v\n";
    } else if (s.placement != loop_placement(s.stages, s.chunks)) {
        text += "stages:";
        for (size_t rank = 0; rank < s.placement.stage.size(); ++rank)
            text += fmt::format("{} {}", rank > 0 ? " /" : "", fmt::join(s.placement.stage[rank], " "));
        text += "\n";
    }
    for (const auto& steps : s.ranks) {
        std::string line;
        for (const Step& step : steps) line += fmt::format("{}{}", line.empty() ? "" : " ", to_string(step));
        text += line + "\n";
    }
    return text;
}

}  // namespace train70b
