#include "08_3d_full/plan/simulate_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>

#include "01_single_gpu/core/check.h"

namespace train70b {

namespace {

double peak_flops_of(const DeviceModel& device, DType dtype) {
    return dtype == DType::bf16 ? device.peak_bf16 : dtype == DType::f64 ? device.peak_fp32 / 2 : device.peak_fp32;
}

// "70,123"
std::string grouped(double number) {
    const std::string digits = fmt::format("{:.0f}", number);
    std::string text;
    for (size_t i = 0; i < digits.size(); ++i) {
        if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
        text += digits[i];
    }
    return text;
}

std::string memory_text(const Recording& recording, const ClusterModel& cluster) {
    MemoryPeak most;
    int64_t rank = 0;
    for (const Sequence& sequence : recording.sequences) {
        const MemoryPeak peak = peak_of(sequence);
        if (peak.total <= most.total) continue;
        most = peak;
        rank = sequence.rank;
    }
    const double capacity = cluster.device.memory_bytes;
    return fmt::format("peak memory {:.2f} GB on rank {}, of the {:.4g} GB of each {}{}", double(most.total) / 1e9,
                       rank, capacity / 1e9, cluster.device.name,
                       capacity > 0 && double(most.total) > capacity ? ": it does not fit" : "");
}

}  // namespace

double tokens_per_s_per_gpu(const SimulatedStep& step, const StepWork& work, int64_t ranks) {
    return work.tokens / step.seconds / double(ranks);
}

double mfu(const SimulatedStep& step, const StepWork& work, const ClusterModel& cluster, int64_t ranks) {
    return work.flops / step.seconds / double(ranks) / peak_flops_of(cluster.device, work.dtype);
}

Table step_table(const SimulatedStep& step, const Recording& recording, const ClusterModel& cluster,
                 const StepWork& work) {
    Table table(fmt::format("simulated step on {}: mean of the ranks", cluster.name), {"", "ms", "share"});
    const auto row = [&](const std::string& name, double seconds) {
        table.row({name, fixed(1e3 * seconds, 3), percent(seconds / step.seconds)});
    };
    row("computation", step.compute);
    if (step.host > 1e-9 * step.seconds) row("the host's launches", step.host);
    for (const auto& [name, seconds] : step.exposed) row(name + ": exposed communication", seconds);
    for (const auto& [name, seconds] : step.waiting)
        if (name != "end") row(name + ": waiting for other ranks", seconds);
    if (step.waiting.contains("end")) row("waiting for the last rank's end", step.waiting.at("end"));
    table.row({"the step", fixed(1e3 * step.seconds, 3), percent(1.0)});
    table.note(fmt::format("{} tokens/s, {} per device; MFU {:.1f}% of {:.4g} TFLOP/s ({}); bubble {:.1f}%",
                           grouped(work.tokens / step.seconds),
                           grouped(tokens_per_s_per_gpu(step, work, recording.ranks)),
                           100 * mfu(step, work, cluster, recording.ranks),
                           peak_flops_of(cluster.device, work.dtype) / 1e12, name_of(work.dtype), 100 * step.bubble));
    table.note(memory_text(recording, cluster));
    if (step.simulated_ranks < recording.ranks)
        table.note(fmt::format("simulated: {} of {} ranks; each other one does the same as one of them",
                               step.simulated_ranks, recording.ranks));
    return table;
}

Table ops_table(const SimulatedStep& step) {
    std::vector<std::pair<std::string, SimulatedStep::Op>> ops(step.ops.begin(), step.ops.end());
    std::stable_sort(ops.begin(), ops.end(),
                     [](const auto& a, const auto& b) { return a.second.seconds > b.second.seconds; });
    double all = 0;
    for (const auto& [name, op] : ops) all += op.seconds;
    Table table("computation, by op: mean of the ranks", {"op", "calls", "ms", "share"});
    for (const auto& [name, op] : ops)
        table.row({name, fixed(op.calls, op.calls == double(int64_t(op.calls)) ? 0 : 1), fixed(1e3 * op.seconds, 3),
                   percent(all > 0 ? op.seconds / all : 0)});
    return table;
}

std::string chrome_trace(const SimulatedStep& step) {
    std::string text = "{\"traceEvents\": [\n";
    const auto out = std::back_inserter(text);
    const auto title = [&](const char* what, int64_t rank, int stream, const std::string& name) {
        fmt::format_to(out, R"({{"ph": "M", "name": "{}", "pid": {}, "tid": {}, "args": {{"name": "{}"}}}},)", what,
                       rank, stream + 1, name);
        text += "\n";
    };
    std::set<std::pair<int64_t, int>> streams;
    for (const SimulatedStep::Span& span : step.spans) streams.insert({span.rank, span.stream});
    std::set<int64_t> ranks;
    for (const auto& [rank, stream] : streams) {
        if (ranks.insert(rank).second) title("process_name", rank, -1, fmt::format("rank {}", rank));
        title("thread_name", rank, stream, step.stream_names.at(stream));
    }
    for (const SimulatedStep::Span& span : step.spans) {
        fmt::format_to(out, R"({{"ph": "X", "name": "{}", "pid": {}, "tid": {}, "ts": {:.3f}, "dur": {:.3f}}},)",
                       span.name, span.rank, span.stream + 1, 1e6 * span.begin, 1e6 * (span.end - span.begin));
        text += "\n";
    }
    for (const SimulatedStep::MemorySample& sample : step.memory) {
        fmt::format_to(out, R"({{"ph": "C", "name": "memory, MB", "pid": {}, "ts": {:.3f}, "args": {{)", sample.rank,
                       1e6 * sample.seconds);
        for (int kind = 0; kind < kDeviceMemoryKinds; ++kind)
            fmt::format_to(out, R"({}"{}": {:.3f})", kind ? ", " : "", kMemoryNames[size_t(kind)],
                           double(sample.now[size_t(kind)]) / 1e6);
        text += "}},\n";
    }
    if (text.ends_with(",\n")) text.erase(text.size() - 2);
    return text + "\n]}\n";
}

}  // namespace train70b
