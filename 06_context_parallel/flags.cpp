#include "06_context_parallel/flags.h"

#include <algorithm>

namespace train70b {

const std::vector<std::string>& context_algorithms() {
    static const std::vector<std::string> names = {"ring", "zigzag", "ulysses", "hybrid", "gather"};
    return names;
}

void add_context_parallel_flags(Flags& flags, int64_t& cp, ContextParallelOptions& o) {
    flags.group("Communication");
    flags
        .add("--cp", cp, "context-parallel ranks of a model copy [what --dp leaves, all without it]",
             whole_number_from(1))
        .default_text("");
    flags.add("--cp-algorithm", o.algorithm, "how they do attention", one_of(context_algorithms()));
    flags
        .add("--ulysses-size", o.ulysses_size, "of --cp-algorithm hybrid: ranks that divide heads; the rest is ring",
             whole_number_from(1))
        .default_text("2");
}

namespace {
// The number nearest to n, at least 1, of which `works` is true; 0: there is none up to most.
int64_t nearest(int64_t n, int64_t most, const std::function<bool(int64_t)>& works) {
    for (int64_t distance = 0; distance <= most; ++distance) {
        if (n - distance >= 1 && works(n - distance)) return n - distance;
        if (n + distance <= most && works(n + distance)) return n + distance;
    }
    return 0;
}
}  // namespace

ContextLayout context_layout(const LlamaConfig& c, int64_t seq_len, int64_t cp, const ContextParallelOptions& o) {
    if (o.ulysses_size > 0 && o.algorithm != "hybrid")
        usage_error("--ulysses-size {}: belongs to --cp-algorithm hybrid", o.ulysses_size);
    ContextLayout layout{.ranks = cp};
    if (o.algorithm == "ulysses") layout.ulysses = cp;
    if (o.algorithm == "hybrid") layout.ulysses = o.ulysses_size > 0 ? o.ulysses_size : std::min<int64_t>(2, cp);
    layout.gather = o.algorithm == "gather";
    const bool balanced = o.algorithm == "zigzag" || o.algorithm == "hybrid" || layout.gather;
    if (balanced && cp > 1) layout.chunks = 2;
    const std::string asked = fmt::format("--cp {} --cp-algorithm {}", cp, o.algorithm);

    if (cp % layout.ulysses != 0)
        usage_error("--ulysses-size {} does not divide --cp {}; {} would", layout.ulysses, cp,
                    nearest(layout.ulysses, cp, [cp](int64_t n) { return cp % n == 0; }));
    if (!c.heads_divide_by(layout.ulysses))
        usage_error("{}: {} ranks cannot divide --heads {} and --kv-heads {}; {} can", asked, layout.ulysses, c.heads,
                    c.kv_heads, nearest(layout.ulysses, c.heads, [&c](int64_t n) { return c.heads_divide_by(n); }));
    if (const int64_t of = layout.granularity(); seq_len % of != 0)
        usage_error("{}: --seq-len {} does not divide by {}; {} would", asked, seq_len,
                    layout.chunks > 1 ? fmt::format("2 x {}", cp) : std::to_string(cp),
                    std::max<int64_t>((seq_len + of / 2) / of, 1) * of);
    return layout;
}

}  // namespace train70b
