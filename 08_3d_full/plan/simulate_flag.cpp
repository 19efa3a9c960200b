#include "08_3d_full/plan/simulate_flag.h"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

#include "01_single_gpu/core/registry.h"

namespace train70b {

// "3:1.2,7:2": what is numbered below `count`, and how many times slower each is.
static std::map<int64_t, double> parse_slow(const char* flag, const std::string& text, const char* what,
                                            int64_t count) {
    std::map<int64_t, double> slow;
    const auto refuse = [&](const std::string& item, const std::string& problem) {
        usage_error("{} {}: {} (try 0:1.5, or 0:1.5,3:2)", flag, item, problem);
    };
    if (text.empty()) return slow;
    for (const std::string& item : items_of(text)) {
        const std::vector<std::string> parts = items_of(item, ':');
        if (parts.size() != 2)
            refuse(item, fmt::format("must be a {}, a colon, and how many times slower it is", what));
        if (!integer_from(0, count - 1).problem(parts[0]).empty())
            refuse(item, fmt::format("the {} must be from 0 to {}", what, count - 1));
        if (!real_number(0.01, 1000).problem(parts[1]).empty()) refuse(item, "the times must be from 0.01 to 1000");
        if (!slow.emplace(std::stoll(parts[0]), std::stod(parts[1])).second)
            refuse(item, fmt::format("the {} is listed twice", what));
    }
    return slow;
}

void add_simulate_flags(CommandLine& flags, TrainOptions& options, SimulateOptions& simulate) {
    flags.group("Output");
    flags.add_flag("--dry-run", options.dry_run,
                   "book the memory of one step of all simulated ranks, or of --fake-rank; compute nothing");
    flags.add_input("--simulate", simulate.cluster_file,
                    "CLUSTER.json: simulate one step on this cluster (08_3d_full/plan/clusters; implies --dry-run)");
    flags.add_input("--device-csv", simulate.device_csv,
                    "FILE.csv: the ops' costs for --simulate, from --bench-csv on such a device");
    flags.add("--simulate-slow", simulate.slow, "RANK:TIMES,...: simulated ranks whose ops take so many times longer");
    flags.add("--simulate-slow-network", simulate.slow_network,
              "NODE:TIMES,...: simulated nodes whose network links have so many times less bandwidth");
    flags.add("--simulate-jitter", simulate.simulation.jitter,
              "relative standard deviation of every simulated op's time", real_number(0, 0.5));
}

void check_simulate(SimulateOptions& simulate, const ParallelConfig& config, Program& program) {
    if (!simulate.asked()) {
        for (const char* flag : {"--device-csv", "--simulate-slow", "--simulate-slow-network", "--simulate-jitter"})
            if (program.flags.given(flag)) usage_error("{}: requires --simulate CLUSTER.json", flag);
        return;
    }
    if (program.comm.backend != "fake")
        usage_error("--simulate: needs simulated ranks (try --comm fake --fake-world N)");
    const int64_t ranks = program.world.size();
    TrainOptions& options = program.options;
    options.dry_run = true;
    ClusterModel& cluster = simulate.cluster = read_cluster(cluster_path(simulate.cluster_file), "--simulate");
    cluster.all_reduce = program.comm.all_reduce;
    DeviceModel& device = cluster.device;
    if (!simulate.device_csv.empty()) read_device_csv(simulate.device_csv, "--device-csv", device);
    const int64_t nodes = (ranks + cluster.gpus_per_node - 1) / cluster.gpus_per_node;
    if (ranks > cluster.devices())
        usage_error(
            "--simulate {}: {} ranks, but {} has {} devices (try --fake-world {}, or \"nodes\": {} in the file)",
            simulate.cluster_file, ranks, cluster.name, cluster.devices(), cluster.devices(), nodes);
    check_on_gpu(config.fp8, "--simulate " + simulate.cluster_file);
    if (options.fp16()) usage_error("--dtype fp16: not supported with --simulate (try --dtype bf16)");
    if (config.fp8.recipe != "off" && !(device.peak_fp8 > 0) && !device.measured.contains("scaled_matmul"))
        usage_error("--fp8 {}: {} of --simulate {} has no FP8 products (try --fp8 off)", config.fp8.recipe, device.name,
                    simulate.cluster_file);
    simulate.simulation.slow_ranks = parse_slow("--simulate-slow", simulate.slow, "rank", ranks);
    const Network network(cluster, ranks);
    for (const auto& [node, times] : parse_slow("--simulate-slow-network", simulate.slow_network, "node", nodes))
        for (int link = 0; link < network.links(); ++link)
            if (network.name(link).starts_with(fmt::format("node {}, rail ", node)) ||
                network.name(link).starts_with(fmt::format("node {}, network", node)))
                simulate.simulation.slow_links[link] = times;
    simulate.simulation.seed = options.seed;
    simulate.simulation.stream_per_group = program.comm.streams == "group";
    if (simulate.simulation.jitter > 0 && ranks > kMaxJitterRanks)
        usage_error("--simulate-jitter {}: each of {} ranks would have to be simulated (try at most {} ranks)",
                    simulate.simulation.jitter, ranks, kMaxJitterRanks);
    simulate.trace.path = std::exchange(options.trace, "");
    if (simulate.trace.given()) simulate.trace.open();
}

// "70,123"
static std::string grouped(double number) {
    std::string text = fmt::format("{:.0f}", number);
    for (size_t i = text.size(); i > 3;) text.insert(i -= 3, ",");
    return text;
}

double tokens_per_s_per_gpu(const SimulatedStep& step, const StepWork& work, int64_t ranks) {
    return work.tokens / step.seconds / double(ranks);
}

double mfu(const SimulatedStep& step, const StepWork& work, const ClusterModel& cluster, int64_t ranks) {
    return work.flops / step.seconds / double(ranks) / peak_flops(cluster.device, work.dtype);
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
    row("the step", step.seconds);
    table.note(fmt::format("{} tokens/s, {} per device; MFU {:.1f}% of {:.4g} TFLOP/s ({}); bubble {:.1f}%",
                           grouped(work.tokens / step.seconds),
                           grouped(tokens_per_s_per_gpu(step, work, recording.ranks)),
                           100 * mfu(step, work, cluster, recording.ranks),
                           peak_flops(cluster.device, work.dtype) / 1e12, name_of(work.dtype), 100 * step.bubble));
    const auto [rank, largest] = largest_rank(recording);
    const double capacity = cluster.device.memory_bytes;
    table.note(fmt::format("peak memory {:.2f} GB on rank {}, of the {:.4g} GB of each {}{}",
                           double(largest.total) / 1e9, rank, capacity / 1e9, cluster.device.name,
                           capacity > 0 && double(largest.total) > capacity ? ": it does not fit" : ""));
    if (step.simulated_ranks < recording.ranks)
        table.note(fmt::format("simulated: {} of {} ranks; each other one does the same as one of them",
                               step.simulated_ranks, recording.ranks));
    return table;
}

// The ops, the longest first.
static Table ops_table(const SimulatedStep& step) {
    std::vector<std::pair<std::string, SimulatedStep::Op>> ops(step.ops.begin(), step.ops.end());
    std::ranges::stable_sort(ops, std::greater(), [](const auto& op) { return op.second.seconds; });
    double all = 0;
    for (const auto& [name, op] : ops) all += op.seconds;
    Table table("computation, by op: mean of the ranks", {"op", "calls", "ms", "share"});
    for (const auto& [name, op] : ops)
        table.row({name, fixed(op.calls, op.calls == double(int64_t(op.calls)) ? 0 : 1), fixed(1e3 * op.seconds, 3),
                   percent(all > 0 ? op.seconds / all : 0)});
    return table;
}

// Chrome trace events (ui.perfetto.dev): a process per traced rank, a thread per stream, a counter of its memory.
static std::string chrome_trace(const SimulatedStep& step) {
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

void print_simulation(const Program& program, const ParallelConfig& config, SimulateOptions& simulate,
                      const Recording& recording) {
    const TrainOptions& options = program.options;
    SimulationOptions& simulation = simulate.simulation;
    if (simulate.trace.given() && program.flags.given("--fake-rank"))
        simulation.traced = {program.comm.fake_rank};
    else if (simulate.trace.given())
        for (int64_t stage = 0; stage < config.mesh.pp; ++stage)
            simulation.traced.push_back(config.mesh.rank({.pp = stage}));
    const SimulatedStep step = simulate_step(recording, simulate.cluster, simulation);
    const double tokens = double(options.global_batch) * double(options.seq_len);
    const StepWork work{tokens,
                        tokens * flops_per_token(options.model, options.model.attended(double(options.seq_len))),
                        options.llama().dtype};
    Table table = step_table(step, recording, simulate.cluster, work);
    if (config.zero.offload != Offload::none)
        table.note("too fast: the host's update, copies to and from it, and files take what they would on the device");
    say(table);
    say(ops_table(step));
    if (simulate.trace.given()) simulate.trace.write(chrome_trace(step));
}

}  // namespace train70b
