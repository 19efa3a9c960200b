#include "04_tensor_parallel/complete/traffic.h"

#include <numeric>

namespace train70b {

int64_t tensor_parallel_elements(const LlamaConfig& c, int64_t tp) {
    return c.layers * c.block_parameters(tp) + c.hidden + (c.tied ? 1 : 2) * ((c.vocab + tp - 1) / tp) * c.hidden;
}

void Traffic::add(const CommStats& stats) {
    for (const auto& [name, entry] : stats.operations) {
        if (name.ends_with(".scalar") || name.ends_with(".split")) continue;
        operations[name].calls += entry.calls;
        operations[name].bytes += entry.bytes;
    }
}

int64_t Traffic::bytes() const {
    int64_t sum = 0;
    for (const auto& [name, entry] : operations) sum += entry.bytes;
    return sum;
}

std::string Traffic::text() const {
    std::string text;
    for (const auto& [name, entry] : operations)
        text += fmt::format("{}{} {}", text.empty() ? "" : ", ", entry.calls, name.substr(name.find('.') + 1));
    return text;
}

namespace {

// Counts collectives of whole tensors of n bytes; (N-1)/N is applied once per operation, to the sum.
class Counter {
  public:
    Counter(const TrafficShape& s) : N_(s.tp) {}
    void all_reduce(int64_t times, int64_t n) { count("all_reduce", times, 2 * n * times); }
    void all_gather(int64_t times, int64_t n) { count("all_gather", times, n * times); }
    void reduce_scatter(int64_t times, int64_t n) { count("reduce_scatter", times, n * times); }
    void ring(int64_t times, int64_t n) { count("send_recv", times * (N_ - 1), n * times); }
    Traffic traffic() const {
        Traffic result;
        for (const auto& [name, entry] : sums_)
            result.operations["tp." + name] = {entry.calls, entry.bytes * (N_ - 1) / N_};
        return result;
    }

  private:
    void count(const std::string& name, int64_t calls, int64_t bytes) {
        if (calls == 0 || N_ == 1) return;
        sums_[name].calls += calls;
        sums_[name].bytes += bytes;
    }
    int64_t N_;
    std::map<std::string, Traffic::Entry> sums_;
};

void count_layer(Counter& counter, const LlamaConfig& c, const TrafficShape& s, int64_t layer) {
    const int64_t n = s.rows * c.hidden * size_of(s.dtype);
    const int64_t forwards = recompute_in(layer, s.recompute, s.recompute_every) == Recompute::full ? 2 : 1;
    if (!s.options.sequence_parallel) return counter.all_reduce(2 * forwards + 2, n);
    if (!s.options.overlap) {
        counter.all_gather(2 * forwards + 2 + 2, n);
        counter.reduce_scatter(2 * forwards + 2, n);
        return;
    }
    counter.ring(4 * forwards + 2, n);  // f and g forward, g backward
    counter.all_gather(2, n);           // f, for the weight gradient
    counter.reduce_scatter(2, n);       // f backward
}

}  // namespace

Traffic layer_traffic(const LlamaConfig& c, const TrafficShape& s) {
    Counter counter(s);
    count_layer(counter, c, s, 0);
    return counter.traffic();
}

Traffic step_traffic(const LlamaConfig& c, const TrafficShape& s, int64_t micro_batches) {
    const int64_t n = s.rows * c.hidden * size_of(s.dtype);
    const int64_t stats_bytes = size_of(stats_dtype(s.dtype));
    const bool sequence = s.options.sequence_parallel;
    Counter counter(s);
    for (int64_t m = 0; m < micro_batches; ++m) {
        for (int64_t layer = 0; layer < c.layers; ++layer) count_layer(counter, c, s, layer);
        if (!sequence) {
            counter.all_reduce(2, n);  // the embedding's g; backward the head's f
        } else {
            counter.reduce_scatter(2, n);  // the same,
            counter.all_gather(2, n);      // g backward; the head's f again, for the weight gradient
            s.options.overlap ? counter.ring(1, n) : counter.all_gather(1, n);  // and f forward
        }
        counter.all_reduce(1, stats_bytes * s.rows);      // the loss: maxima
        counter.all_reduce(1, 2 * stats_bytes * s.rows);  // sums of exponentials and the targets' logits
    }
    // Gradients of norm weights: with sequence parallelism all of them, else those of the norms of q and k.
    const int64_t partial =
        (sequence ? (2 * c.layers + 1) * c.hidden : 0) + (c.qk_norm ? 2 * c.layers * c.head_dim() : 0);
    if (partial > 0) counter.all_reduce(1, partial * size_of(s.grad_dtype));
    Traffic traffic = counter.traffic();
    if (const int64_t copies = s.tp / std::gcd(c.kv_heads, s.tp); copies > 1) {             // of each key/value head
        const int64_t of_layer = 2 * c.kv_width(s.tp) * (c.hidden + (c.qkv_bias ? 1 : 0));  // k_proj, v_proj, biases
        const int64_t bytes = c.layers * of_layer * size_of(s.grad_dtype);
        traffic.operations["tp_kv.all_reduce"] = {1, 2 * bytes * (copies - 1) / copies};
    }
    return traffic;
}

}  // namespace train70b
