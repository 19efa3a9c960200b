#include "02_data_parallel/complete/flags.h"

#include <numeric>

#include "01_single_gpu/core/registry.h"
#include "02_data_parallel/complete/all_reduce.h"

namespace train70b {

void add_comm_flags(Flags& flags, CommOptions& o) {
    flags.group("Communication");
    flags.add("--comm", o.backend, "communication backend; auto: nccl, staged or mpi",
              one_of({"auto", "mpi", "nccl", "staged", "fake"}));
    flags.add("--fake-world", o.fake_world, "number of simulated ranks, with --comm fake [default: none]",
              integer_from(1));
    flags.add("--fake-rank", o.fake_rank, "the simulated rank that this process runs, with --comm fake",
              integer_from(0));
    flags.add("--comm-timeout", o.timeout, "seconds after which a collective is aborted", real_number(0, 1e6, false));
    flags.add_switch("--comm-check", o.check, "verify before each collective that all ranks make the same call");
    flags.add("--comm-streams", o.streams,
              "with nccl and --simulate: collectives of different groups overlap, or all run one after another",
              one_of({"group", "one"}));
    flags
        .add("--all-reduce", o.all_reduce,
             help_of("all-reduce algorithm [default: ring; with nccl: library]", all_reduce_algorithms()),
             one_of(all_reduce_names()))
        .default_text("ring; with nccl: library");
    flags
        .add("--ranks-per-node", o.ranks_per_node,
             "for hierarchical and tree: take so many neighbouring ranks for a node", integer_from(0))
        .default_text("a node is a machine");
}

int64_t ranks_per_copy(int64_t given, int64_t dp, const Comm& world) {
    if (given > 0) return given;
    if (dp > 0 && world.size() % dp != 0)
        usage_error("{} ranks are not divisible by --dp {} (try --dp {})", world.size(), dp,
                    std::gcd(world.size(), dp));
    return world.size() / std::max<int64_t>(dp, 1);
}

int64_t data_parallel_ranks(int64_t dp, const Comm& world, int64_t ranks_per_copy, const std::string& flag) {
    const int64_t ranks = world.size();
    if (ranks % ranks_per_copy != 0)
        usage_error("{} {}: {} ranks are not divisible by {} (try mpirun -np {}, or {} {})", flag, ranks_per_copy,
                    ranks, ranks_per_copy, (ranks / ranks_per_copy + 1) * ranks_per_copy, flag,
                    std::gcd(ranks, ranks_per_copy));
    const int64_t copies = ranks / ranks_per_copy;
    if (dp != 0 && dp != copies)
        usage_error("--dp {}: there are {} ranks{} (try mpirun -np {}, or --dp {})", dp, ranks,
                    ranks_per_copy > 1 ? fmt::format(", {} per model copy", ranks_per_copy) : "", dp * ranks_per_copy,
                    copies);
    return copies;
}

}  // namespace train70b
