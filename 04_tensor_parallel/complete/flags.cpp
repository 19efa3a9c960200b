#include "04_tensor_parallel/complete/flags.h"

namespace train70b {

void add_tensor_parallel_flags(Flags& flags, int64_t& tp, TensorParallelOptions& o) {
    flags.group("Communication");
    flags.add("--tp", tp, "tensor-parallel ranks [default: all ranks / --dp]", integer_from(1)).default_text("");
    flags.add_switch("--sequence-parallel", o.sequence_parallel, "also divide the rows of norms and residuals");
    flags.add_switch("--tp-overlap", o.overlap, "overlap communication with matrix products");
}

TensorComms split(const Comm& world, int64_t tp) {
    return {world.split([tp](int rank) { return int(rank / tp); }, "tp"),
            world.split([tp](int rank) { return int(rank % tp); }, "dp")};
}

namespace {
std::string tp_that_works(const LlamaConfig& c) {  // "--tp 1, 2 or 4"
    std::vector<int64_t> list;
    for (int64_t tp = 1; tp <= c.heads; ++tp)
        if (c.heads_divide_by(tp) && c.ffn % tp == 0) list.push_back(tp);
    std::string text;
    for (size_t i = 0; i < list.size(); ++i)
        text += fmt::format("{}{}", i == 0 ? "" : i + 1 == list.size() ? " or " : ", ", list[i]);
    return fmt::format("--tp {}", text);
}
}  // namespace

void check_tensor_parallel(const LlamaConfig& c, int64_t seq_len, int64_t tp, const TensorParallelOptions& o) {
    if (c.heads % tp != 0)
        usage_error("--heads {} is not divisible by --tp {} (try {})", c.heads, tp, tp_that_works(c));
    if (c.ffn % tp != 0) usage_error("--ffn {} is not divisible by --tp {} (try {})", c.ffn, tp, tp_that_works(c));
    if (!c.heads_divide_by(tp))
        usage_error("--kv-heads {} is not divisible by --tp {}, nor --tp by --kv-heads (try {})", c.kv_heads, tp,
                    tp_that_works(c));
    if (o.overlap && tp > 1 && c.latent.kv_rank > 0)
        usage_error("--tp-overlap on: not supported with --kv-lora-rank {} (try off)", c.latent.kv_rank);
    if (o.sequence_parallel && seq_len % tp != 0)
        usage_error("--sequence-parallel on: --seq-len {} is not divisible by --tp {} (try --seq-len {})", seq_len, tp,
                    (seq_len / tp + 1) * tp);
}

}  // namespace train70b
