#include "06_context_parallel/context_layout.h"

#include <algorithm>

#include "01_single_gpu/core/registry.h"

namespace train70b {

const std::vector<ContextAlgorithm>& context_algorithms() {
    const auto one = [](int64_t, int64_t) { return int64_t(1); };
    const auto all = [](int64_t cp, int64_t) { return cp; };
    const auto hybrid = [](int64_t cp, int64_t size) { return size > 0 ? size : std::min<int64_t>(2, cp); };
    static std::vector<ContextAlgorithm> list = {
        {"ring", "keys and values are passed around a ring", 1, false, false, one},
        {"zigzag", "the ring, with an early and a late chunk of the sequence on each rank", 2, false, false, one},
        {"ulysses", "all-to-alls: each rank has all tokens of some heads", 1, false, false, all},
        {"hybrid", "ulysses inside groups of ranks, the zigzag ring across them", 2, false, true, hybrid},
        {"gather", "all-gather of keys and values, zigzag chunks", 2, true, false, one}};
    return list;
}

namespace {
// The number in [1, most] nearest to n for which works() is true; 0: there is none.
int64_t nearest(int64_t n, int64_t most, const std::function<bool(int64_t)>& works) {
    for (int64_t distance = 0; distance <= most; ++distance) {
        if (n - distance >= 1 && works(n - distance)) return n - distance;
        if (n + distance <= most && works(n + distance)) return n + distance;
    }
    return 0;
}
}  // namespace

ContextLayout context_layout(const LlamaConfig& c, int64_t seq_len, int64_t cp, const ContextParallelOptions& o) {
    const ContextAlgorithm& algorithm = find_entry(context_algorithms(), "--cp-algorithm", o.algorithm);
    if (o.ulysses_size > 0 && !algorithm.takes_ulysses_size)
        usage_error("--ulysses-size {}: --cp-algorithm {} has no such groups (try --cp-algorithm hybrid)",
                    o.ulysses_size, o.algorithm);
    const ContextLayout layout{.ranks = cp,
                               .ulysses = algorithm.ulysses(cp, o.ulysses_size),
                               .chunks = cp > 1 ? algorithm.chunks : 1,
                               .gather = algorithm.gather};
    const std::string asked = fmt::format("--cp {} --cp-algorithm {}", cp, o.algorithm);

    if (cp % layout.ulysses != 0)
        usage_error("--cp {} is not divisible by --ulysses-size {} (try --ulysses-size {})", cp, layout.ulysses,
                    nearest(layout.ulysses, cp, [cp](int64_t n) { return cp % n == 0; }));
    if (!c.heads_divide_by(layout.ulysses))
        usage_error("{}: --heads {} and --kv-heads {} are not divisible by {} (try {} {})", asked, c.heads, c.kv_heads,
                    layout.ulysses, algorithm.takes_ulysses_size ? "--ulysses-size" : "--cp",
                    nearest(layout.ulysses, c.heads, [&c](int64_t n) { return c.heads_divide_by(n); }));
    if (const int64_t divisor = layout.granularity(); seq_len % divisor != 0)
        usage_error("{}: --seq-len {} is not divisible by {} (try --seq-len {})", asked, seq_len,
                    layout.chunks > 1 ? fmt::format("2 x {}", cp) : std::to_string(cp),
                    std::max<int64_t>((seq_len + divisor / 2) / divisor, 1) * divisor);
    return layout;
}

}  // namespace train70b
