#include "08_3d_full/plan/simulate_flag.h"

#include <charconv>
#include <utility>

#include "08_3d_full/plan/simulate_report.h"

namespace train70b {

namespace {

// "3:1.2,7:2": what is numbered below `count`, and how many times slower each is.
std::map<int64_t, double> parse_slow(const char* flag, const std::string& text, const char* what, int64_t count) {
    std::map<int64_t, double> slow;
    const auto refuse = [&](const std::string& item, const std::string& problem) {
        usage_error("{} {}: {} (try 0:1.5, or 0:1.5,3:2)", flag, item, problem);
    };
    for (size_t begin = 0; begin < text.size();) {
        const size_t end = std::min(text.find(',', begin), text.size());
        const std::string item = text.substr(begin, end - begin);
        const size_t colon = item.find(':');
        if (colon == std::string::npos)
            refuse(item, fmt::format("must be a {}, a colon, and how many times slower it is", what));
        int64_t rank = 0;
        double times = 0;
        const char *last = item.data() + item.size(), *middle = item.data() + colon;
        const auto first_part = std::from_chars(item.data(), middle, rank);
        if (first_part.ec != std::errc() || first_part.ptr != middle || rank < 0 || rank >= count)
            refuse(item, fmt::format("the {} must be from 0 to {}", what, count - 1));
        const auto second_part = std::from_chars(middle + 1, last, times);
        if (second_part.ec != std::errc() || second_part.ptr != last || !(times >= 0.01 && times <= 1000))
            refuse(item, "the times must be from 0.01 to 1000");
        if (!slow.emplace(rank, times).second) refuse(item, fmt::format("the {} is listed twice", what));
        begin = end + 1;
    }
    return slow;
}

}  // namespace

void add_simulate_flags(CommandLine& flags, SimulateOptions& simulate) {
    flags.group("Output");
    flags.add_input("--simulate", simulate.cluster_file,
                    "CLUSTER.json: simulate one step on this cluster (08_3d_full/clusters; implies --dry-run)");
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
    simulate.cluster = read_cluster(cluster_path(simulate.cluster_file), "--simulate");
    if (!simulate.device_csv.empty()) read_device_csv(simulate.device_csv, "--device-csv", simulate.cluster.device);
    if (ranks > simulate.cluster.devices())
        usage_error(
            "--simulate {}: {} ranks, but {} has {} devices (try --fake-world {}, or \"nodes\": {} in the file)",
            simulate.cluster_file, ranks, simulate.cluster.name, simulate.cluster.devices(), simulate.cluster.devices(),
            (ranks + simulate.cluster.gpus_per_node - 1) / simulate.cluster.gpus_per_node);
    const DeviceModel& device = simulate.cluster.device;
    if (config.fp8.recipe != "off" && !(device.peak_fp8 > 0) && !device.measured.contains("scaled_matmul"))
        usage_error("--fp8 {}: {} of --simulate {} has no FP8 products (try --fp8 off)", config.fp8.recipe, device.name,
                    simulate.cluster_file);
    simulate.simulation.slow_ranks = parse_slow("--simulate-slow", simulate.slow, "rank", ranks);
    const int64_t nodes = (ranks + simulate.cluster.gpus_per_node - 1) / simulate.cluster.gpus_per_node;
    const Network network(simulate.cluster, ranks);
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
    const StepWork work{tokens, tokens * flops_per_token(options.model, options.seq_len), options.llama().dtype};
    Table table = step_table(step, recording, simulate.cluster, work);
    if (config.zero.offload != Offload::none)
        table.note("too fast: the host's update and the copies to and from it take what they would take on the device");
    say(table);
    say(ops_table(step));
    if (simulate.trace.given()) simulate.trace.write(chrome_trace(step));
}

}  // namespace train70b
