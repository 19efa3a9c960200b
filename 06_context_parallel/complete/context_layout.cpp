#include "06_context_parallel/complete/context_layout.h"

#include <algorithm>

#include "01_single_gpu/complete/data/data.h"
#include "01_single_gpu/complete/flags/flags.h"
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

void add_context_parallel_flags(Flags& flags, int64_t& cp, ContextParallelOptions& o) {
    flags.group("Communication");
    flags.add("--cp", cp, "context-parallel ranks [default: all ranks / --dp]", integer_from(1)).default_text("");
    flags.add("--cp-algorithm", o.algorithm, "attention algorithm over the context-parallel ranks",
              one_of(names_of(context_algorithms())));
    flags.add("--ulysses-size", o.ulysses_size, "ranks that divide heads, with --cp-algorithm hybrid", integer_from(1))
        .default_text("2");
}

namespace {
// The number in [1, most] nearest to n for which works() is true; 0: there is none.
int64_t nearest(int64_t n, int64_t largest, const std::function<bool(int64_t)>& works) {
    for (int64_t distance = 0; distance <= largest; ++distance) {
        if (n - distance >= 1 && works(n - distance)) return n - distance;
        if (n + distance <= largest && works(n + distance)) return n + distance;
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

std::vector<int> ring_steps(const ContextLayout& ring, int64_t chunk_len, int64_t window) {
    const auto is_seen = [&](int64_t query, int64_t key) {  // indices of chunks
        return key <= query && (query - key - 1) * chunk_len + 2 <= window;
    };
    std::vector<int> steps;
    for (int64_t step = 0; step < ring.ranks; ++step) {
        bool some = window == 0;
        for (int64_t rank = 0; rank < ring.ranks && !some; ++rank)
            for (int64_t query = 0; query < ring.chunks; ++query)
                for (int64_t key = 0; key < ring.chunks; ++key)
                    some = some || is_seen(ring.chunk_index(rank, query),
                                           ring.chunk_index((rank - step + ring.ranks) % ring.ranks, key));
        if (some) steps.push_back(int(step));
    }
    return steps;
}

double attention_pairs(const ContextLayout& layout, int64_t rank, int64_t seq_len) {
    const double G = double(layout.groups()), c = double(seq_len) / (G * double(layout.chunks));
    if (layout.chunks == 2) return c * (c + 1) + c * c + 2 * (G - 1) * c * c;
    return c * (c + 1) / 2 + double(rank / layout.ulysses) * c * c;
}

double attention_pairs(const ContextLayout& layout, int64_t rank, const std::vector<int32_t>& document_starts) {
    double pairs = 0;
    for (const auto [begin, count] : layout.queries_of(rank, int64_t(document_starts.size())))
        for (int64_t t = begin; t < begin + count; ++t) pairs += double(t - document_starts[size_t(t)] + 1);
    return pairs;
}

ContextTraffic context_traffic(const LlamaConfig& c, const ContextLayout& layout, int64_t batch, int64_t seq_len,
                               DType dtype, Recompute recompute, int64_t window) {
    const int64_t U = layout.ulysses, G = layout.groups(), a = size_of(dtype), D = c.head_dim();
    const int64_t rows = batch * seq_len / layout.ranks, kv_heads = std::max(c.kv_heads, U);  // copied up to U
    const int64_t forwards = recompute == Recompute::none || recompute == Recompute::pointwise ? 1 : 2;
    ContextTraffic traffic;
    const int64_t block = 2 * rows * U * (kv_heads / U) * D;  // elements of k and v in one message
    const int64_t stats_bytes = size_of(stats_dtype(dtype));  // of its gradients
    if (layout.gather)
        traffic.gather = (G - 1) * block * (a * (forwards + 1) + stats_bytes);
    else if (G > 1) {
        const auto steps =
            int64_t(ring_steps({.ranks = G, .chunks = layout.chunks}, seq_len / (G * layout.chunks), window).size());
        traffic.ring = (steps - 1) * block * a * (forwards + 1) + steps * block * stats_bytes;
    }
    const int64_t in = rows * (c.heads + 2 * kv_heads) * D * a, out = rows * c.heads * D * a;
    if (U > 1)
        traffic.ulysses = ((forwards + 1) * (in + out) + (recompute == Recompute::selective ? 0 : out)) * (U - 1) / U;
    return traffic;
}

}  // namespace train70b
