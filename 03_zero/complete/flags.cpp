#include "03_zero/complete/flags.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <numeric>

#include "01_single_gpu/complete/report/report.h"
#include "01_single_gpu/core/platform/platform.h"
#include "03_zero/complete/offload.h"

namespace train70b {

void add_zero_flags(Flags& flags, int64_t& dp, ZeroOptions& o) {
    flags.group("Communication");
    flags.add("--dp", dp, "data-parallel ranks [default: all ranks / ranks per model copy]", integer_from(1))
        .default_text("");
    flags
        .add_word(
            "--zero", [&o](const std::string& stage) { o.stage = std::stoi(stage); },
            "ZeRO stage; shards 1: optimizer states, 2: also gradients, 3: also parameters",
            one_of({"0", "1", "2", "3"}))
        .default_text(std::to_string(o.stage));
    flags
        .add("--hybrid-shard", o.hybrid_shard, "ranks per shard group; groups are replicas [default: all]",
             integer_from(1))
        .default_text("");
    flags
        .add_word(
            "--prefetch",
            [&o](const std::string& units) {
                o.prefetch = std::stoll(units);
                o.prefetch_given = true;
            },
            "units to unshard ahead, with --zero 3", integer_from(0))
        .default_text(std::to_string(o.prefetch));
    flags
        .add_word(
            "--offload",
            [&o](const std::string& what) {
                o.offload = Offload(std::ranges::find(kOffloadNames, what) - kOffloadNames.begin());
            },
            "what to keep in host memory; nvme: as optimizer, but its states in files", one_of(kOffloadNames))
        .default_text("none");
    if (const char* folder = std::getenv("TMPDIR"); folder && *folder) o.offload_dir = folder;
    flags
        .add_word(  // read behind --offload
            "--offload-dir",
            [&o](const std::string& folder) {
                if (o.offload != Offload::nvme) usage_error("--offload-dir {}: needs --offload nvme", folder);
                o.offload_dir = folder;
            },
            "folder of those files, on a local disk", {.problem = {}, .name = "DIR"})
        .default_text("$TMPDIR, or /tmp");
    flags
        .add("--bucket-mb", o.bucket_mb,
             "bucket size of gradient reductions, MiB; 0: one per unit [default: 25; with --zero 2 or 3: 0]",
             real_number(0, 1e6))
        .default_text("25; from --zero 2 on 0: each unit by itself");
    flags.add_switch("--overlap", o.overlap, "overlap gradient reduction with the backward pass");
}

void check_zero(const ZeroOptions& o, const TrainOptions& training, int64_t data_ranks, int64_t ranks_on_node,
                std::optional<double> states) {
    if (o.hybrid_shard > 0 && o.stage == 0)
        usage_error("--hybrid-shard {}: --zero 0 shards nothing (try --zero 1, 2 or 3)", o.hybrid_shard);
    if (o.hybrid_shard > 0 && data_ranks % o.hybrid_shard != 0)
        usage_error(
            "the {} ranks that share parameters (--dp, and --cp) are not divisible by --hybrid-shard {} (try "
            "--hybrid-shard {})",
            data_ranks, o.hybrid_shard, std::gcd(o.hybrid_shard, data_ranks));
    if (o.prefetch_given && o.stage < 3)
        usage_error("--prefetch {}: --zero {} keeps all parameters, nothing is unsharded (try --zero 3)", o.prefetch,
                    o.stage);
    if (o.offload != Offload::none && o.stage == 0)
        usage_error(
            "--offload: with --zero 0 each of {} ranks would keep all states on the host (try --zero 1, 2 or 3)",
            data_ranks);
    if (o.offload == Offload::all && o.stage < 3)
        usage_error("--offload all: needs --zero 3 (with --zero {} try --offload optimizer)", o.stage);
    if (o.offload == Offload::none || training.dry_run) return;
    const int64_t shards = o.hybrid_shard > 0 ? o.hybrid_shard : data_ranks;
    const Llama::Options types = training.llama();
    const double elements = double(training.model.parameters() / shards + 1);  // of a rank
    const auto check = [&](double bytes, const std::string& of_what, double available, const char* instead) {
        const double here = bytes * elements * double(std::min(ranks_on_node, data_ranks));
        if (here > available)
            usage_error(
                "--offload {}: needs {} of {} on this node ({} per rank), and {} are available (try more nodes, or {})",
                kOffloadNames[int(o.offload)], human_bytes(here), of_what, human_bytes(bytes * elements),
                human_bytes(available), instead);
    };
    const bool on_disk = o.offload == Offload::nvme;
    const double state = states.value_or(double(AdamW::state_bytes(types.dtype)));
    check(double(size_of(types.dtype) + size_of(types.grad_dtype)) + (on_disk ? 0 : state), "host memory",
          double(available_host_memory()), "--offload none");
    if (!on_disk) return;
    map_file(o.offload_dir, 1);  // usage error if nothing can be written there
    const std::filesystem::path folder = std::filesystem::path(o.offload_dir) / ".";
    if (platform::is_in_memory(folder))
        usage_error("--offload-dir {}: is in memory itself (must be on a disk)", o.offload_dir);
    check(state, o.offload_dir, double(std::filesystem::space(folder).available), "another --offload-dir");
}

}  // namespace train70b
