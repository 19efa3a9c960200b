// The front of every op: checks shapes, dtypes and devices, opens a profiling span, and calls the device's kernel.
#include "01_single_gpu/ops/ops.h"

#include "01_single_gpu/core/dispatch.h"
#include "01_single_gpu/ops/kernels.h"

namespace train70b {

namespace {

void expect(const char* name, const Tensor& tensor, const Shape& shape, DType dtype) {
    CHECK(tensor.shape() == shape && tensor.dtype() == dtype, "{} is {} {}, expected {} {}", name,
          name_of(tensor.dtype()), to_string(tensor.shape()), name_of(dtype), to_string(shape));
}

// Activations may come as (B*T, E) or, flattened differently, with the same rows and columns.
void expect_rows(const char* name, const Tensor& tensor, int64_t rows, int64_t cols, DType dtype) {
    CHECK(tensor.rows() == rows && tensor.cols() == cols && tensor.dtype() == dtype,
          "{} is {} {}, expected {} rows of {} {}", name, name_of(tensor.dtype()), to_string(tensor.shape()), rows,
          cols, name_of(dtype));
}

}  // namespace

void matmul_into(Tensor& c, const Tensor& a, const Tensor& b, Transpose transpose, float beta) {
    const int64_t m = transpose == Transpose::a ? a.cols() : a.rows();
    const int64_t k = transpose == Transpose::a ? a.rows() : a.cols();
    const int64_t n = transpose == Transpose::b ? b.rows() : b.cols();
    CHECK(is_float(a.dtype()) && a.dtype() == b.dtype() &&
              (c.dtype() == a.dtype() || c.dtype() == stats_dtype(a.dtype())),
          "a {}, b {}, c {}", name_of(a.dtype()), name_of(b.dtype()), name_of(c.dtype()));
    CHECK((transpose == Transpose::b ? b.cols() : b.rows()) == k, "a {} b {}", to_string(a.shape()),
          to_string(b.shape()));
    expect_rows("c", c, m, n, c.dtype());
    Span span("matmul", "op", 2.0 * m * n * k, bytes_of({a, b, c}));
    RUN(device_of({c, a, b}), matmul_into(c, a, b, transpose, beta));
}

Tensor matmul(const Tensor& a, const Tensor& b, Transpose transpose, Memory kind) {
    const int64_t m = transpose == Transpose::a ? a.cols() : a.rows();
    const int64_t n = transpose == Transpose::b ? b.rows() : b.cols();
    Tensor c({m, n}, a.dtype(), a.device(), kind);
    matmul_into(c, a, b, transpose);
    return c;
}

namespace {
// Between two devices, same dtype.
void move([[maybe_unused]] Tensor& to, [[maybe_unused]] const Tensor& from) {
    CHECK(to.device() != Device::meta && from.device() != Device::meta, "{} to {}", name_of(from.device()),
          name_of(to.device()));
#if TRAIN70B_CUDA
    cuda_copy(to.raw(), from.raw(), from.bytes(), to.device() == Device::cpu ? CopyKind::to_host : CopyKind::to_device);
#endif
}
}  // namespace

void fill(Tensor& x, double value) {
    Span span("fill", "op", 0, bytes_of({x}));
    RUN(x.device(), fill(x, value));
}

void copy(Tensor& to, const Tensor& from) {
    CHECK(to.size() == from.size(), "{} to {}", to_string(from.shape()), to_string(to.shape()));
    CHECK(to.dtype() == from.dtype() || (is_float(to.dtype()) && is_float(from.dtype())), "{} to {}",
          name_of(from.dtype()), name_of(to.dtype()));
    Span span("copy", "op", 0, bytes_of({to, from}));
    if (to.device() == from.device()) {
        RUN(to.device(), copy(to, from));
    } else if (to.dtype() != from.dtype()) {  // cast where it comes from, then move
        Tensor cast(from.shape(), to.dtype(), from.device(), Memory::workspace);
        copy(cast, from);
        move(to, cast);
    } else {
        move(to, from);
    }
}

void scale(Tensor& x, double factor) {
    CHECK(is_float(x.dtype()), "{}", name_of(x.dtype()));
    Span span("scale", "op", 0, 2 * bytes_of({x}));
    RUN(x.device(), scale(x, factor));
}

void add(Tensor& sum, const Tensor& a, const Tensor& b) {
    CHECK(is_float(a.dtype()) && is_float(b.dtype()) && is_float(sum.dtype()));
    CHECK(sum.size() == a.size() && a.size() == b.size(), "{} + {}", to_string(a.shape()), to_string(b.shape()));
    Span span("add", "op", 0, bytes_of({sum, a, b}));
    RUN(device_of({sum, a, b}), add(sum, a, b));
}

void swap_blocks(Tensor& to, const Tensor& from, int64_t a, int64_t b) {
    CHECK(to.dtype() == from.dtype() && to.size() == from.size() && from.size() % (a * b) == 0 && !to.overlaps(from),
          "{} to {} in blocks of {} x {}", to_string(from.shape()), to_string(to.shape()), a, b);
    Span span("swap_blocks", "op", 0, bytes_of({to, from}));
    RUN(device_of({to, from}), swap_blocks(to, from, a, b));
}

void sum_squares(Tensor& out, const Tensor& x) {
    expect("out", out, {1}, DType::f64);
    CHECK(is_float(x.dtype()), "{}", name_of(x.dtype()));
    Span span("sum_squares", "op", 0, bytes_of({x}));
    RUN(device_of({out, x}), sum_squares(out, x));
}

void embedding(Tensor& y, const Tensor& tokens, const Tensor& table, int64_t first_row) {
    expect("tokens", tokens, {y.rows()}, DType::i32);
    expect_rows("y", y, tokens.size(), table.cols(), table.dtype());
    Span span("embedding", "op", 0, 2 * bytes_of({y}));
    RUN(device_of({y, tokens, table}), embedding(y, tokens, table, first_row));
}

void embedding_backward(Tensor& dtable, const Tensor& tokens, const Tensor& dy, int64_t first_row) {
    expect("tokens", tokens, {dy.rows()}, DType::i32);
    CHECK(dtable.cols() == dy.cols() && is_float(dtable.dtype()), "dtable {}", to_string(dtable.shape()));
    Span span("embedding_backward", "op", 0, bytes_of({dy}));
    RUN(device_of({dtable, tokens, dy}), embedding_backward(dtable, tokens, dy, first_row));
}

void rmsnorm(Tensor& y, Tensor& inv_rms, const Tensor& x, const Tensor& weight, double eps) {
    expect_rows("y", y, x.rows(), x.cols(), x.dtype());
    expect("inv_rms", inv_rms, {x.rows()}, stats_dtype(x.dtype()));
    expect("weight", weight, {x.cols()}, x.dtype());
    Span span("rmsnorm", "op", 0, bytes_of({y, x}));
    RUN(device_of({y, inv_rms, x, weight}), rmsnorm(y, inv_rms, x, weight, eps));
}

void add_rmsnorm(Tensor& sum, Tensor& y, Tensor& inv_rms, const Tensor& a, const Tensor& b, const Tensor& weight,
                 double eps) {
    for (const Tensor& part : List{sum, y, b}) expect_rows("sum, y or b", part, a.rows(), a.cols(), a.dtype());
    expect("inv_rms", inv_rms, {a.rows()}, stats_dtype(a.dtype()));
    expect("weight", weight, {a.cols()}, a.dtype());
    Span span("add_rmsnorm", "op", 0, bytes_of({sum, y, a, b}));
    RUN(device_of({sum, y, inv_rms, a, b, weight}), add_rmsnorm(sum, y, inv_rms, a, b, weight, eps));
}

void rmsnorm_again(Tensor& y, const Tensor& x, const Tensor& inv_rms, const Tensor& weight) {
    expect_rows("y", y, x.rows(), x.cols(), x.dtype());
    expect("inv_rms", inv_rms, {x.rows()}, stats_dtype(x.dtype()));
    expect("weight", weight, {x.cols()}, x.dtype());
    Span span("rmsnorm_again", "op", 0, bytes_of({y, x}));
    RUN(device_of({y, inv_rms, x, weight}), rmsnorm_again(y, x, inv_rms, weight));
}

void rmsnorm_backward(Tensor& dx, Tensor& dweight, const Tensor& dy, const Tensor& x, const Tensor& inv_rms,
                      const Tensor& weight) {
    for (const Tensor& part : List{dx, dy}) expect_rows("dx or dy", part, x.rows(), x.cols(), x.dtype());
    expect("inv_rms", inv_rms, {x.rows()}, stats_dtype(x.dtype()));
    expect("weight", weight, {x.cols()}, x.dtype());
    CHECK(dweight.shape() == weight.shape() && is_float(dweight.dtype()), "dweight {}", to_string(dweight.shape()));
    Span span("rmsnorm_backward", "op", 0, bytes_of({dx, dy, x}));
    RUN(device_of({dx, dweight, dy, x, inv_rms, weight}), rmsnorm_backward(dx, dweight, dy, x, inv_rms, weight));
}

namespace {
void check_rope(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& qkv, const Tensor& positions,
                const Rope& rope) {
    CHECK(rope.head_dim > 0 && rope.head_dim % 2 == 0 && rope.head_dim <= kMaxHeadDim, "head_dim {}", rope.head_dim);
    expect("positions", positions, {qkv.rows()}, DType::i32);
    CHECK(q.cols() % rope.head_dim == 0 && k.cols() % rope.head_dim == 0, "q {} k {} for heads of {}",
          to_string(q.shape()), to_string(k.shape()), rope.head_dim);
    expect_rows("q", q, qkv.rows(), q.cols(), qkv.dtype());
    for (const Tensor& part : List{k, v}) expect_rows("k or v", part, qkv.rows(), k.cols(), qkv.dtype());
    expect_rows("qkv", qkv, qkv.rows(), q.cols() + 2 * k.cols(), qkv.dtype());
}
}  // namespace

void split_rope(Tensor& q, Tensor& k, Tensor& v, const Tensor& qkv, const Tensor& positions, const Rope& rope) {
    check_rope(q, k, v, qkv, positions, rope);
    Span span("split_rope", "op", 0, 2 * bytes_of({qkv}));
    RUN(device_of({q, k, v, qkv, positions}), split_rope(q, k, v, qkv, positions, rope));
}

void split_rope_backward(Tensor& dqkv, const Tensor& dq, const Tensor& dk, const Tensor& dv, const Tensor& positions,
                         const Rope& rope) {
    check_rope(dq, dk, dv, dqkv, positions, rope);
    Span span("split_rope_backward", "op", 0, 2 * bytes_of({dqkv}));
    RUN(device_of({dq, dk, dv, dqkv, positions}), split_rope_backward(dqkv, dq, dk, dv, positions, rope));
}

namespace {
void check_attention(const Tensor& out, const Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                     const AttentionShape& s) {
    CHECK(s.kv_heads > 0 && s.heads % s.kv_heads == 0, "{} query heads, {} key/value heads", s.heads, s.kv_heads);
    CHECK(s.head_dim > 0 && s.head_dim <= kMaxHeadDim, "head_dim {}", s.head_dim);
    for (const Tensor& part : List{q, out})
        expect_rows("q or out", part, s.batch * s.query_len, s.heads * s.head_dim, q.dtype());
    for (const Tensor& part : List{k, v})
        expect_rows("k or v", part, s.batch * s.key_len, s.kv_heads * s.head_dim, q.dtype());
    expect("lse", lse, {s.batch * s.query_len, s.heads}, stats_dtype(q.dtype()));
}

// Pairs (query, key) that the mask leaves, times heads and batch.
double visible_pairs(const AttentionShape& s) {
    double pairs = double(s.query_len) * s.key_len;
    if (s.causal) {
        pairs = 0;
        for (int64_t i = 0; i < s.query_len; ++i)
            pairs += std::clamp<int64_t>(i + 1 + s.key_len - s.query_len, 0, s.key_len);
    }
    return pairs * s.heads * s.batch;
}
}  // namespace

void attention(Tensor& out, Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
               const AttentionShape& shape) {
    check_attention(out, lse, q, k, v, shape);
    Span span("attention", "op", 4 * visible_pairs(shape) * shape.head_dim, bytes_of({out, q, k, v}));
    RUN(device_of({out, lse, q, k, v}), attention(out, lse, q, k, v, shape));
}

void attention_backward(Tensor& dq, Tensor& dk, Tensor& dv, const Tensor& dout, const Tensor& q, const Tensor& k,
                        const Tensor& v, const Tensor& out, const Tensor& lse, const AttentionShape& shape) {
    check_attention(out, lse, q, k, v, shape);
    expect_rows("dout", dout, q.rows(), q.cols(), q.dtype());
    CHECK(dq.size() == q.size() && dk.size() == k.size() && dv.size() == v.size());
    for (const Tensor& part : List{dq, dk, dv})
        CHECK(part.dtype() == q.dtype() || part.dtype() == stats_dtype(q.dtype()), "{}", name_of(part.dtype()));
    Span span("attention_backward", "op", 10 * visible_pairs(shape) * shape.head_dim,
              bytes_of({dq, dk, dv, dout, q, k, v, out}));
    RUN(device_of({dq, dk, dv, dout, q, k, v, out, lse}),
        attention_backward(dq, dk, dv, dout, q, k, v, out, lse, shape));
}

void merge_attention(Tensor& out, Tensor& lse, const Tensor& part_out, const Tensor& part_lse) {
    const DType wide = stats_dtype(part_out.dtype());
    expect("lse", lse, {lse.rows(), lse.cols()}, wide);
    expect("part_lse", part_lse, lse.shape(), wide);
    CHECK(out.dtype() == wide && out.cols() % lse.cols() == 0, "out {} {}", name_of(out.dtype()),
          to_string(out.shape()));
    for (const Tensor& part : List{out, part_out})
        expect_rows("out or part_out", part, lse.rows(), out.cols(), part.dtype());
    Span span("merge_attention", "op", 0, bytes_of({out, out, part_out, lse, lse, part_lse}));
    RUN(device_of({out, lse, part_out, part_lse}), merge_attention(out, lse, part_out, part_lse));
}

void swiglu(Tensor& h, const Tensor& gate_up) {
    expect_rows("gate_up", gate_up, h.rows(), 2 * h.cols(), h.dtype());
    Span span("swiglu", "op", 0, bytes_of({h, gate_up}));
    RUN(device_of({h, gate_up}), swiglu(h, gate_up));
}

void swiglu_backward(Tensor& dgate_up, const Tensor& dh, const Tensor& gate_up) {
    expect_rows("gate_up", gate_up, dh.rows(), 2 * dh.cols(), dh.dtype());
    expect_rows("dgate_up", dgate_up, gate_up.rows(), gate_up.cols(), gate_up.dtype());
    Span span("swiglu_backward", "op", 0, bytes_of({dgate_up, dh, gate_up}));
    RUN(device_of({dgate_up, dh, gate_up}), swiglu_backward(dgate_up, dh, gate_up));
}

void softmax_stats(Tensor& row_max, Tensor& row_sum, Tensor& target_logit, const Tensor& logits, const Tensor& targets,
                   int64_t first_vocab, int64_t vocab) {
    for (const Tensor& part : List{row_max, row_sum, target_logit})
        expect("row_max, row_sum or target_logit", part, {logits.rows()}, stats_dtype(logits.dtype()));
    expect("targets", targets, {logits.rows()}, DType::i32);
    Span span("softmax_stats", "op", 0, bytes_of({logits}));
    RUN(device_of({row_max, row_sum, target_logit, logits, targets}),
        softmax_stats(row_max, row_sum, target_logit, logits, targets, first_vocab, vocab));
}

void rescale_sums(Tensor& row_sum, const Tensor& row_max, const Tensor& whole_max) {
    for (const Tensor& part : List{row_sum, row_max, whole_max})
        expect("row_sum, row_max or whole_max", part, {row_sum.size()}, stats_dtype(row_sum.dtype()));
    Span span("rescale_sums", "op", 0, bytes_of({row_sum, row_sum, row_max, whole_max}));
    RUN(device_of({row_sum, row_max, whole_max}), rescale_sums(row_sum, row_max, whole_max));
}

void cross_entropy(Tensor& loss, Tensor& lse, const Tensor& row_max, const Tensor& row_sum, const Tensor& target_logit,
                   double scale) {
    expect("loss", loss, {1}, stats_dtype(loss.dtype()));
    for (const Tensor& part : List{lse, row_max, row_sum, target_logit})
        expect("lse, row_max, row_sum or target_logit", part, {lse.size()}, loss.dtype());
    Span span("cross_entropy", "op", 0, bytes_of({lse, row_max, row_sum, target_logit}));
    RUN(device_of({loss, lse, row_max, row_sum, target_logit}),
        cross_entropy(loss, lse, row_max, row_sum, target_logit, scale));
}

void cross_entropy_backward(Tensor& logits, const Tensor& targets, const Tensor& lse, double scale, int64_t first_vocab,
                            int64_t vocab) {
    expect("targets", targets, {logits.rows()}, DType::i32);
    expect("lse", lse, {logits.rows()}, stats_dtype(logits.dtype()));
    Span span("cross_entropy_backward", "op", 0, 2 * bytes_of({logits}));
    RUN(device_of({logits, targets, lse}), cross_entropy_backward(logits, targets, lse, scale, first_vocab, vocab));
}

void adamw(Tensor& param, Tensor& master, Tensor& exp_avg, Tensor& exp_avg_sq, const Tensor& grad,
           const AdamWStep& step) {
    const DType wide = stats_dtype(param.dtype());
    CHECK(param.dtype() == wide ? !master : master && master.dtype() == wide,
          "a bf16 parameter needs an fp32 master, another one is its own");
    CHECK(param.size() == grad.size() && param.size() == exp_avg.size() && param.size() == exp_avg_sq.size() &&
          (!master || master.size() == param.size()));
    CHECK(exp_avg.dtype() == wide && exp_avg_sq.dtype() == wide && is_float(grad.dtype()) && step.step >= 1);
    Span span("adamw", "op", 0,
              bytes_of({param, grad}) + 2 * bytes_of({exp_avg, exp_avg_sq}) + (master ? 2 : 1) * bytes_of({exp_avg}));
    RUN(device_of({param, exp_avg, exp_avg_sq, grad}), adamw(param, master, exp_avg, exp_avg_sq, grad, step));
}

void fill_normal(Tensor& x, uint64_t key, const GlobalIndex& index, float std) {
    CHECK(is_float(x.dtype()) && index.cols > 0 && index.col_begin + index.cols <= index.global_cols);
    Span span("fill_normal", "op", 0, bytes_of({x}));
    RUN(x.device(), fill_normal(x, key, index, std));
}

std::vector<double> read(const Tensor& x) {
    if (x.device() == Device::meta) return std::vector<double>(x.size(), 1.0);
    Tensor here = x, wide({x.size()}, DType::f64, Device::cpu, Memory::workspace);
    if (x.device() != Device::cpu) {
        here = Tensor({x.size()}, x.dtype(), Device::cpu, Memory::workspace);
        copy(here, x);
    }
    copy(wide, here);
    return std::vector<double>(wide.data<double>(), wide.data<double>() + wide.size());
}

Tensor upload(const std::vector<int32_t>& values, Shape shape, Device device, Memory kind) {
    Tensor tensor(std::move(shape), DType::i32, device, kind);
    CHECK(tensor.size() == int64_t(values.size()), "{} values for {}", values.size(), to_string(tensor.shape()));
    if (device == Device::cpu) std::copy(values.begin(), values.end(), tensor.data<int32_t>());
#if TRAIN70B_CUDA
    if (device == Device::cuda) cuda_copy(tensor.raw(), values.data(), tensor.bytes(), CopyKind::to_device);
#endif
    return tensor;
}

#if TRAIN70B_CUDA
void synchronize(Device device) {
    if (device == Device::cuda) cuda_synchronize();
}
#else
void synchronize(Device) {}
std::string why_no_cuda() { return "this build has no CUDA (install the CUDA Toolkit and build again)"; }
#endif

}  // namespace train70b
