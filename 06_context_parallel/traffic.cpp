#include "06_context_parallel/traffic.h"

namespace train70b {

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
                               DType dtype, Recompute recompute) {
    const int64_t U = layout.ulysses, G = layout.groups(), a = size_of(dtype), D = c.head_dim();
    const int64_t rows = batch * seq_len / layout.ranks, kv_heads = std::max(c.kv_heads, U);  // copied up to U
    const int64_t forwards = recompute == Recompute::none || recompute == Recompute::pointwise ? 1 : 2;
    ContextTraffic traffic;
    const int64_t block = 2 * rows * U * (kv_heads / U) * D;  // elements of k and v in one message
    const int64_t wide = size_of(stats_dtype(dtype));         // of its gradients
    if (layout.gather)
        traffic.gather = (G - 1) * block * (a * (forwards + 1) + wide);
    else if (G > 1)
        traffic.ring = (G - 1) * block * a * (forwards + 1) + G * block * wide;
    const int64_t in = rows * (c.heads + 2 * kv_heads) * D * a, out = rows * c.heads * D * a;
    if (U > 1)
        traffic.ulysses = ((forwards + 1) * (in + out) + (recompute == Recompute::selective ? 0 : out)) * (U - 1) / U;
    return traffic;
}

}  // namespace train70b
