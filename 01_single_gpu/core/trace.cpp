#include "01_single_gpu/core/trace.h"

#include <cstdio>
#include <nlohmann/json.hpp>

#include "01_single_gpu/core/say.h"
#include "01_single_gpu/core/version.h"

namespace train70b {

std::string trace_head() {
    const nlohmann::ordered_json other = {{"commit", build_commit()}, {"clock", "that of rank 0"}};
    // One event, so that all others begin with a comma.
    return fmt::format(
        "{{\"displayTimeUnit\":\"ms\",\"otherData\":{},\"traceEvents\":[\n"
        R"({{"name":"process_sort_index","ph":"M","pid":0,"tid":0,"args":{{"sort_index":0}}}})",
        other.dump());
}

std::string trace_title(int rank, const std::string& title) {
    const auto metadata = [&](const char* name, const nlohmann::ordered_json& args) {
        const nlohmann::ordered_json event = {{"name", name}, {"ph", "M"}, {"pid", rank}, {"tid", 0}, {"args", args}};
        return ",\n" + event.dump();
    };
    std::string text = metadata("process_name", {{"name", title}});
    if (rank > 0) text += metadata("process_sort_index", {{"sort_index", rank}});
    return text;
}

std::string trace_text(const std::vector<Profile::Event>& events, int rank, const ClockDifference& clock) {
    std::string text;
    for (const Profile::Event& event : events) {
        const double begin = clock.to_rank_0(event.begin), end = clock.to_rank_0(event.begin + event.seconds);
        nlohmann::ordered_json json = {
            {"name", event.name},         {"cat", event.category}, {"ph", "X"}, {"ts", begin * 1e6},
            {"dur", (end - begin) * 1e6}, {"pid", rank},           {"tid", 0}};
        if (!event.detail.empty())  // a collective: "dp.all_reduce", "dp.all_reduce #17, 4096 fp32"
            json["args"] = {{"group", event.name.substr(0, event.name.find('.'))}, {"call", event.detail}};
        text += ",\n" + json.dump();
    }
    return text;
}

EventFile::~EventFile() {
    if (file_) std::fclose(file_);
}

void EventFile::write(const std::vector<Profile::Event>& events) {
    if (events.empty()) return;
    if (!file_) file_ = std::tmpfile();
    std::string text;
    for (const auto& [name, category, begin, seconds, detail] : events)
        text += fmt::format("{} {} {} {} |{}\n", name, category, begin, seconds, detail);
    if (file_ && std::fputs(text.c_str(), file_) >= 0 && std::fflush(file_) == 0) return;
    profile().events_on = false;
    warn(fmt::format("rank {}: --trace: {} is full; events are missing, and the run goes on", this_rank, P_tmpdir));
}

std::vector<Profile::Event> EventFile::read() {
    if (file_ && !std::exchange(reads_, true)) std::rewind(file_);
    std::vector<Profile::Event> events;
    char name[256], category[256], detail[1024];
    double begin = 0, seconds = 0;
    while (file_ && events.size() < kMostEvents) {
        const int got = std::fscanf(file_, "%255s %255s %lf %lf |%1023[^\n]", name, category, &begin, &seconds, detail);
        if (got < 4) break;
        events.push_back({name, category, begin, seconds, got == 5 ? detail : ""});
    }
    return events;
}

}  // namespace train70b
