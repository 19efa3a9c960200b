#include "06_context_parallel/complete/flags.h"

#include "01_single_gpu/core/registry.h"

namespace train70b {

void add_context_parallel_flags(Flags& flags, int64_t& cp, ContextParallelOptions& o) {
    flags.group("Communication");
    flags.add("--cp", cp, "context-parallel ranks [default: all ranks / --dp]", integer_from(1)).default_text("");
    flags.add("--cp-algorithm", o.algorithm, "attention algorithm over the context-parallel ranks",
              one_of(names_of(context_algorithms())));
    flags.add("--ulysses-size", o.ulysses_size, "ranks that divide heads, with --cp-algorithm hybrid", integer_from(1))
        .default_text("2");
}

}  // namespace train70b
