#include "08_3d_full/watch/probe.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "01_single_gpu/complete/run/bench.h"
#include "02_data_parallel/runtime/median.h"

namespace train70b {

namespace {

constexpr int kCalls = 5;

// Ranks below 80% of the median are slow. across: whether a rank's messages cross nodes, if others' do not: it is
// compared with those alike.
void add_row(ProbeResult& result, const std::string& name, const std::string& unit, const std::vector<double>& of_rank,
             std::vector<double> across = {}, bool judge_across = true) {
    constexpr double kOutlier = 0.8;  // of the median
    across.resize(of_rank.size());
    std::vector<double> rates, alike[2];
    for (size_t rank = 0; rank < of_rank.size(); ++rank)
        if (of_rank[rank] > 0)
            for (auto* to : {&rates, &alike[size_t(across[rank])]}) to->push_back(of_rank[rank]);
    if (rates.empty()) return;
    const auto [smallest, largest] = std::minmax_element(rates.begin(), rates.end());
    std::optional<SlowRank> slowest;
    for (size_t rank = 0; rank < of_rank.size(); ++rank) {
        const std::vector<double>& those = alike[size_t(across[rank])];
        if (those.empty() || (across[rank] > 0 && !judge_across)) continue;
        const double usual = median(those);
        if (!(of_rank[rank] < kOutlier * usual)) continue;
        result.slow.push_back({int64_t(rank), name, of_rank[rank] / usual});
        if (!slowest || result.slow.back().of_median < slowest->of_median) slowest = result.slow.back();
    }
    const std::string outlier =
        slowest ? fmt::format("rank {} is slow: {:.0f}% of the median", slowest->rank, 100 * slowest->of_median) : "";
    const auto digits = [](double rate) { return fmt::format("{:.3g}", rate); };
    result.table.row({name, digits(*smallest), digits(median(rates)), digits(*largest), unit, outlier});
}

// GB/s of messages from this rank to the next one of the group, on a channel; one rank after another.
double rate_to_next(const Comm& group, const Tensor& message, Device device) {
    double rate = 0;
    const int n = group.size(), rank = group.rank();
    for (int from = 0; from < n; ++from) {
        const int to = (from + 1) % n;
        const Comm channel = group.p2p_channel(from, to);
        if (rank != from && rank != to) continue;
        const int peer = (rank == from) == (from < to) ? 1 : 0;
        const double seconds = median_seconds(device, kCalls, [&] {
            rank == from ? channel.send(message, peer).wait() : channel.recv(message, peer).wait();
        });
        if (rank == from) rate = double(message.bytes()) / seconds / 1e9;
    }
    return rate;
}

// All-reduces of a large tensor, in bytes that a rank sends, and messages of one element to the next rank: bytes per
// second, and seconds.
std::pair<double, double> measure_link(const Comm& group, Device device) {
    constexpr int kSmallCalls = 101;
    const int64_t elements = device == Device::cuda ? 1 << 26 : 1 << 18;
    Tensor large({elements}, DType::f32, device, Memory::comm), in = Tensor::like(large, Memory::comm);
    fill(large, 0);
    const Tensor out = large.element_slice(0, {1}), received = in.element_slice(0, {1});
    group.barrier().wait();
    const double latency = median_seconds(device, kSmallCalls, [&] { group.ring_shift(out, received).wait(); });
    group.barrier().wait();
    const double seconds = median_seconds(device, 4 * kCalls, [&] { group.all_reduce(large).wait(); });
    const double sent = 2.0 * (group.size() - 1) / group.size() * double(large.bytes());
    return {sent / std::max(seconds - 2 * (group.size() - 1) * latency, 0.1 * seconds), latency};
}

// "node-0: ranks 0 to 7, node-1: ranks 8 to 15"
std::string text_of(const std::vector<std::string>& hosts) {
    std::string text;
    for (size_t begin = 0, end = 0; begin < hosts.size(); begin = end) {
        while (end < hosts.size() && hosts[end] == hosts[begin]) ++end;
        text += fmt::format("{}{}: ", begin ? ", " : "", hosts[begin]);
        text += end - begin == 1 ? fmt::format("rank {}", begin) : fmt::format("ranks {} to {}", begin, end - 1);
    }
    return text;
}

}  // namespace

ProbeResult probe(const Comm& world, const MeshComms& ranks, Device device, DType dtype, ProbeSizes sizes) {
    const auto [side, elements] = sizes.side > 0           ? sizes
                                  : device == Device::cuda ? ProbeSizes{4096, 1 << 25}
                                                           : ProbeSizes{384, 1 << 19};
    Tensor a({side, side}, dtype, device, Memory::workspace), b = Tensor::like(a, Memory::workspace);
    Tensor c = Tensor::like(a, Memory::workspace), message({elements}, dtype, device, Memory::comm);
    for (Tensor* x : {&a, &b}) fill_normal(*x, 1, {.cols = x->size(), .global_cols = x->size()}, 1);
    fill(message, 1);
    world.barrier().wait();
    const double product = 2.0 * double(side) * double(side) * double(side) /
                           median_seconds(device, kCalls, [&] { matmul_into(c, a, b, Transpose::b); }) / 1e12;
    ProbeResult result{.table = Table(fmt::format("probe of {} ranks", world.size()),
                                      {"", "least", "median", "most", Column("").left(), Column("").left()})};
    add_row(result, fmt::format("product, {} x {}", side, side), "TFLOP/s", world.gather({product}));
    // From node to node, around a ring of them: a rank whose link is slow is slow to the node after it and from the one
    // before, and here has the better of both. So a link that is slow one way only is not named here, nor two nodes
    // beside each other told apart. If it names a rank, no axis does for what crosses nodes: its peers are slow, too.
    const int N = world.size(), L = int(ranks_on_this_node());
    char machine[256] = {};
    ::gethostname(machine, sizeof machine - 1);
    const std::vector<double> node{double(std::hash<std::string>()(machine))}, nodes = world.gather(node);
    bool adjacent = world.gather({double(L)}) == std::vector<double>(size_t(N), double(L));
    for (int r = 0; r < N; ++r) adjacent = adjacent && nodes[size_t(r)] == nodes[size_t(r - r % L)];
    const size_t before = result.slow.size();
    if (N >= 3 * L && adjacent) {
        const Comm across = world.split([=](int r) { return r % L; }, "across", GroupLoad::light);
        const std::vector<double> sent = world.gather({rate_to_next(across, message, device)});
        std::vector<double> better;
        for (int r = 0; r < N; ++r) better.push_back(std::max(sent[size_t(r)], sent[size_t((r + N - L) % N)]));
        add_row(result, fmt::format("message between {} nodes", N / L), "GB/s", better);
    }
    const bool judge_across = result.slow.size() == before;
    // All-reduces, in bytes that a rank sends; NCCL gives a group as much of the GPU as ring attention's has.
    const Comm cp = ranks.cp.size() > 1 ? ranks.cp.split([](int) { return 0; }, "cp_probe") : ranks.cp;
    for (const auto& [name, comm] : {std::pair("tp", ranks.tp), {"cp", cp}, {"dp", ranks.dp_cp}}) {
        if (comm.size() == 1) continue;
        world.barrier().wait();
        const double seconds = median_seconds(device, kCalls, [&, group = comm] { group.all_reduce(message).wait(); });
        fill(message, 1);
        const bool across = comm.gather(node) != std::vector<double>(size_t(comm.size()), node[0]);
        add_row(result, fmt::format("{}, all-reduce over {}", name, comm.size()), "GB/s",
                world.gather({2.0 * (comm.size() - 1) / comm.size() * double(message.bytes()) / seconds / 1e9}),
                world.gather({double(across)}), judge_across);
    }
    // Messages to the next stage, on a channel as the pipeline's.
    if (const int n = ranks.pp.size(); n > 1) {
        const bool across = ranks.pp.gather(node)[size_t((ranks.pp.rank() + 1) % n)] != node[0];
        add_row(result, fmt::format("pp, message of {} stages", n), "GB/s",
                world.gather({rate_to_next(ranks.pp, message, device)}), world.gather({double(across)}), judge_across);
    }
    world.take_stats();
    return result;
}

std::string probe_links(const Comm& world, Device device) {
    if (world.size() == 1) usage_error("--probe-file: one rank has no links (try mpirun -np 2)");
    const int64_t per_node = ranks_on_this_node(), nodes = world.size() / per_node;
    for (const double ranks : world.gather({double(per_node)}))
        if (ranks != double(per_node)) usage_error("--probe-file: nodes have {} and {} ranks", per_node, ranks);
    const Comm node = world.split([=](int rank) { return int(rank / per_node); }, "node");
    const Comm across = world.split([=](int rank) { return int(rank % per_node); }, "across");
    nlohmann::ordered_json file = {{"nodes", nodes}, {"gpus_per_node", per_node}};
    if (device == Device::cpu) file["cores"] = std::thread::hardware_concurrency();
    const auto measure = [&](const char* key, const Comm& group) {
        const auto [rate, latency] = group.size() > 1 ? measure_link(group, device) : std::pair(0.0, 0.0);
        const std::vector<double> rates = world.gather({rate}), latencies = world.gather({latency});
        const double shares = device == Device::cpu && key == std::string("rail") ? double(per_node) : 1;  // of a rail
        if (group.size() > 1)
            file[key] = {{"bytes_per_s", std::round(shares * median(rates))}, {"seconds", median(latencies)}};
    };
    measure(device == Device::cpu ? "host" : "nvlink", node);
    measure("rail", across);
    if (file.contains("rail")) file["rails"] = device == Device::cpu ? 1 : per_node;
    if (device == Device::cuda) {  // messages that are no channel's, and host numbers
        const Tensor out({1 << 24}, DType::f32, device, Memory::comm), in = Tensor::like(out, Memory::comm);
        const int n = world.size(), next = (world.rank() + 1) % n, before = (world.rank() + n - 1) % n;
        world.barrier().wait();
        const double large = median_seconds(device, kCalls, [&] { world.send_recv(out, next, in, before).wait(); });
        const double sum = median_seconds(Device::cpu, 101, [&] { world.sum(1.0); });
        file["host"] = {{"bytes_per_s", std::round(median(world.gather({double(out.bytes()) / large})))},
                        {"seconds", median(world.gather({sum})) / std::log2(double(n))}};
    }
    world.take_stats();
    return file.dump(2) + "\n";
}

void check_machines(Program& p, const MeshComms& ranks, const std::string& probing, OptionalOutput& links) {
    const std::vector<std::string> hosts = hosts_of_ranks();
    p.trainer().note(text_of(hosts), {{"event", "hosts"}, {"hosts", hosts}});
    if (probing == "off") return;
    const ProbeResult result = probe(p.world, ranks, p.options.device_kind(), p.options.llama().dtype);
    say(result.table);
    if (links.given()) {
        const std::string text = probe_links(p.world, p.options.device_kind());
        if (this_rank == 0) links.write(text);
    }
    auto slow = nlohmann::ordered_json::array();
    std::string text;
    if (this_rank == 0)
        for (const SlowRank& rank : result.slow) {
            const std::string& host = hosts[size_t(rank.rank)];
            slow.push_back({{"rank", rank.rank}, {"host", host}, {"what", rank.what}, {"of_median", rank.of_median}});
            text += fmt::format("{}rank {} on {} has {:.0f}% of the median {}", text.empty() ? "slow: " : ", ",
                                rank.rank, host, 100 * rank.of_median, rank.what);
        }
    if (text.empty()) text = "no rank is slow";
    p.trainer().note(text, {{"event", "probe"}, {"slow", slow}});
    if (probing != "strict" || result.slow.empty()) return;
    say("--probe strict: the run ends with exit code {}\n", kProbeFailed);
    p.finish();
    throw EarlyEnd{kProbeFailed};
}

void add_probe_flag(CommandLine& flags, std::string& probing, OptionalOutput& links) {
    flags.group("Output");
    flags.add("--probe", probing,
              "measure all ranks and links before training; strict: exit code 3 if a rank is below 80% of the median",
              one_of({"off", "on", "strict"}));
    flags.add_output(links, "FILE.json: write the links that --probe measures, as a part of a cluster file");
}

void check_probe(std::string& probing, OptionalOutput& links, const CommOptions& comm) {
    if (links.given()) {
        if (comm.backend == "fake") usage_error("--probe-file: not supported with --comm fake, which has no links");
        if (probing == "off") probing = "on";
        together([&] {
            if (this_rank == 0) links.open();
        });
    }
    if (probing != "off" && comm.backend == "fake")
        usage_error("--probe {}: not supported with --comm fake, which has no links (try --probe off)", probing);
}

}  // namespace train70b
