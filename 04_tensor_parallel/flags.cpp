#include "04_tensor_parallel/flags.h"

namespace train70b {

void add_tensor_parallel_flags(Flags& flags, int64_t& tp, TensorParallelOptions& o) {
    flags.group("Communication");
    flags
        .add("--tp", tp, "tensor-parallel ranks of a model copy [what --dp leaves, all without it]",
             whole_number_from(1))
        .default_text("");
    flags.add_switch("--sequence-parallel", o.sequence_parallel, "divide the rows of norms and residuals, too");
    flags.add_switch("--tp-overlap", o.overlap, "communicate behind the products");
}

namespace {
std::string what_would_do(const LlamaConfig& c) {  // "--tp 1, 2 or 4 would do"
    std::vector<int64_t> list;
    for (int64_t tp = 1; tp <= c.heads; ++tp)
        if (c.heads_divide_by(tp) && c.ffn % tp == 0) list.push_back(tp);
    std::string text;
    for (size_t i = 0; i < list.size(); ++i)
        text += fmt::format("{}{}", i == 0 ? "" : i + 1 == list.size() ? " or " : ", ", list[i]);
    return fmt::format("--tp {} would do", text);
}
}  // namespace

void check_tensor_parallel(const LlamaConfig& c, int64_t seq_len, int64_t tp, const TensorParallelOptions& o) {
    if (c.heads % tp != 0) usage_error("--tp {}: --heads {} does not divide by it; {}", tp, c.heads, what_would_do(c));
    if (c.ffn % tp != 0) usage_error("--tp {}: --ffn {} does not divide by it; {}", tp, c.ffn, what_would_do(c));
    if (!c.heads_divide_by(tp))
        usage_error("--tp {}: --kv-heads {} can be divided over it or copied, if one divides the other; {}", tp,
                    c.kv_heads, what_would_do(c));
    if (o.sequence_parallel && seq_len % tp != 0)
        usage_error("--sequence-parallel on: --seq-len {} does not divide by --tp {}; {} would", seq_len, tp,
                    (seq_len / tp + 1) * tp);
}

}  // namespace train70b
