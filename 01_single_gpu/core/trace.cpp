#include "01_single_gpu/core/trace.h"

#include <nlohmann/json.hpp>

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

std::string TraceText::next() {
    std::string text;
    const auto add = [&](const nlohmann::ordered_json& event) { text += ",\n" + event.dump(); };
    if (!std::exchange(has_title_, true)) {
        const auto metadata = [&](const char* name, const nlohmann::ordered_json& args) {
            add({{"name", name}, {"ph", "M"}, {"pid", rank_}, {"tid", 0}, {"args", args}});
        };
        metadata("process_name", {{"name", title_}});
        if (rank_ > 0) metadata("process_sort_index", {{"sort_index", rank_}});
    }
    for (; written_ < events_.size() && text.size() < kPiece; ++written_) {
        const Profile::Event& event = events_[written_];
        const double begin = clock_.to_rank_0(event.begin), end = clock_.to_rank_0(event.begin + event.seconds);
        nlohmann::ordered_json json = {
            {"name", event.name},         {"cat", event.category}, {"ph", "X"}, {"ts", begin * 1e6},
            {"dur", (end - begin) * 1e6}, {"pid", rank_},          {"tid", 0}};
        if (!event.detail.empty())  // a collective: "dp.all_reduce", "dp.all_reduce #17, 4096 fp32"
            json["args"] = {{"group", event.name.substr(0, event.name.find('.'))}, {"call", event.detail}};
        add(json);
    }
    return text;
}

}  // namespace train70b
