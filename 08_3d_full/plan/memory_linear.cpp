// Products, with tensor parallelism around them and in 8 bits.
#include "08_3d_full/plan/memory_unit_walk.h"

namespace train70b {

namespace {

bool column_parallel(Layer layer) { return layer == Layer::qkv || layer == Layer::gate_up || layer == Layer::head; }
}  // namespace

// FP8 data and its scales.
Fp8Tensor UnitWalk::quantized(int64_t rows, int64_t cols, Scaling scaling, Memory kind) {
    return {held(kind, rows * cols), held(kind, 4 * ScaleLayout{scaling, rows, cols}.size())};
}

// x (rows, cols), its transpose, or both; while they are made, amaxes of the size of the scales.
UnitWalk::Fp8Pair UnitWalk::quantize(int64_t rows, int64_t cols, Scaling scaling, bool rowwise, bool columnwise,
                                     Memory kind) {
    Fp8Pair pair;
    if (rowwise) pair.rowwise = quantized(rows, cols, scaling, kWorkspace);
    if (columnwise) pair.columnwise = quantized(cols, rows, scaling, kind);
    const bool one = scaling == Scaling::tensor && rowwise && columnwise;  // share a scale
    if (one) pair.columnwise.scales = pair.rowwise.scales;
    const auto amaxes = [&](int64_t r, int64_t c) { return held(kWorkspace, 4 * ScaleLayout{scaling, r, c}.size()); };
    Held amax, amax_t;
    if (rowwise) amax = amaxes(rows, cols);
    if (columnwise && !one) amax_t = amaxes(cols, rows);
    return pair;
}

// Y = X W^T
Held UnitWalk::linear(Layer layer, Memory y_kind, int64_t y_bytes, Fp8Tensor* transposed) {
    if (!s_.fp8[size_t(layer)]) return held(y_kind, y_bytes);
    const int64_t in = s_.in(layer), out = s_.out(layer);
    Fp8Pair x = quantize(s_.R, in, s_.scaling, true, transposed != nullptr, kActivations);  // (R, in), (in, R)
    if (transposed) *transposed = x.columnwise;
    Fp8Tensor w;  // (out, in)
    if (!s_.gathered) w = quantize(out, in, s_.weight_scaling, true, false, kWorkspace).rowwise;
    return held(y_kind, y_bytes);
}

// f: all rows of the input of a column-parallel layer
Held UnitWalk::input_of_column(const Held& normed) { return s_.sequence && !s_.overlap ? all_rows(kComm) : normed; }

// o, down, and g: (R, E), of which sequence parallelism keeps (R_l, E)
Held UnitWalk::row_parallel(Layer layer, Fp8Tensor* transposed) {
    if (s_.sequence && s_.overlap) {  // matmul_reduce_scatter: partial sums travel around the ring
        const int64_t part = s_.a * s_.R_l * s_.E;
        const Held sum = held(kComm, part), received = held(kComm, part);
        if (s_.R > 2 * s_.R_l) moment(kComm, part);  // more than two ranks: the next one
        return residual();
    }
    const Held y = linear(layer, s_.sequence ? kComm : kActivations, s_.a * s_.R * s_.E, transposed);
    return s_.sequence ? residual() : y;
}

// g backward: all rows of the gradient
Held UnitWalk::gather_rows(Held part) { return s_.sequence && !s_.overlap ? all_rows(kComm) : std::move(part); }

// f backward: this rank's rows
Held UnitWalk::scatter_rows(Held full) { return s_.sequence && !s_.overlap ? residual() : std::move(full); }

// dX = dY W. The weight gradient keeps dY, or its transpose in 8 bits.
Held UnitWalk::input_gradient(Layer layer, Held dy, WeightGradient& gradient) {
    const int64_t in = s_.in(layer), out = s_.out(layer);
    const bool column = column_parallel(layer);
    const Memory dx_kind = column && s_.sequence ? kComm : kActivations;
    gradient.layer = layer;
    if (s_.fp8[size_t(layer)]) {
        Fp8Pair quantized_dy = quantize(s_.R, out, s_.scaling, true, true, kWorkspace);  // (R, out), (out, R)
        gradient.dy_transposed = quantized_dy.columnwise;
        if (layer == Layer::qkv && s_.biases && split_) gradient.biases_dy = dy;
        Fp8Tensor w;  // (in, out)
        if (s_.gathered)
            w.data = held(kWorkspace, in * out);
        else
            w = quantize(out, in, s_.weight_scaling, false, true, kWorkspace).columnwise;
        return held(dx_kind, s_.a * s_.R * in);
    }
    if (s_.overlap && s_.sequence && !column) {  // all_gather_matmul
        gradient.dy = all_rows(kComm);
        return held(kActivations, s_.a * s_.R * in);
    }
    gradient.dy = std::move(dy);
    return held(dx_kind, s_.a * s_.R * in);
}

// dX, and dW += dY^T X
Held UnitWalk::linear_backward(Layer layer, Held dy, Held x, Fp8Tensor x_transposed) {
    if (s_.overlap && column_parallel(layer)) return overlapped_backward(layer, std::move(dy), std::move(x));
    WeightGradient gradient;
    Held dx = input_gradient(layer, std::move(dy), gradient);
    gradient.x = std::move(x);
    gradient.x_transposed = std::move(x_transposed);
    weight_gradient(std::move(gradient));
    return dx;
}

// The same of a column-parallel layer with f's backward pass: two communications and two products at once.
Held UnitWalk::overlapped_backward(Layer layer, Held dy, Held x) {
    WeightGradient gradient{.layer = layer, .dy = std::move(dy), .x = std::move(x)};
    const bool recomputed = s_.pointwise() && layer != Layer::head;
    if (!s_.sequence || !split_) {
        if (recomputed) gradient.x = residual();  // the norm once more
        gradient.has_x = true;
    }
    Held gathered;
    if (s_.sequence && !split_) gathered = all_rows(kComm);
    Held dx = all_rows(s_.sequence ? kComm : kActivations);
    if (s_.sequence) dx = residual();
    if (split_) deferred_.push_back(std::move(gradient));
    return dx;
}

void UnitWalk::weight_gradient(WeightGradient gradient) {
    if (split_) return deferred_.push_back(std::move(gradient));
    run(gradient);
}

// X once more, where it was not kept.
void UnitWalk::run(WeightGradient& gradient) {
    const Layer layer = gradient.layer;
    Held normed, x;
    if (column_parallel(layer) && !gradient.has_x) {
        if (s_.pointwise() && layer != Layer::head) normed = residual();
        if (s_.sequence && !gradient.x_transposed.data) x = all_rows(kComm);
    } else if (layer == Layer::o && s_.U > 1) {
        x = gather_heads(s_.q);
    } else if (layer == Layer::down && s_.pointwise()) {
        x = held(kActivations, s_.a * s_.R * s_.F);
    }
    if (s_.fp8[size_t(layer)] && !gradient.x_transposed.data)
        quantize(s_.R, s_.in(layer), s_.scaling, false, true, kWorkspace);
}

void UnitWalk::weight_gradients() {
    for (WeightGradient& gradient : deferred_) {
        run(gradient);
        gradient = {};
    }
    deferred_.clear();
}

}  // namespace train70b
