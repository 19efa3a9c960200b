#include "07_fp8/recipes.h"

#include <algorithm>
#include <cmath>

namespace train70b {

std::unique_ptr<Recipe> make_recipe(const Fp8Options& options, int64_t operands, Device device, const Comm& ranks) {
    if (options.recipe == "current") return std::make_unique<JustInTime>(ranks);
    if (options.recipe == "rowwise") return std::make_unique<Rowwise>(ranks);
    if (options.recipe == "blockwise") return std::make_unique<Blockwise>(ranks);
    CHECK(options.recipe == "delayed", "--fp8 {}", options.recipe);
    return std::make_unique<Delayed>(options, operands, device, ranks);
}

namespace {
Codes empty_codes(const Tensor& x, Want want, DType format, Scaling scaling, Memory kind) {
    Codes codes;
    if (want != Want::transposed) codes.plain = make_quantized(x.rows(), x.cols(), format, scaling, x.device());
    if (want != Want::plain) codes.transposed = make_quantized(x.cols(), x.rows(), format, scaling, x.device(), kind);
    return codes;
}
}  // namespace

Codes JustInTime::quantize(const Operand& operand, const Tensor& x, Want want, bool, Memory kind) {
    const DType type = format(operand.role);
    const Scaling by = scaling(operand.role);
    Codes codes = empty_codes(x, want, type, by, kind);
    if (by == Scaling::tensor && codes.plain && codes.transposed) codes.transposed.scale = codes.plain.scale;
    const auto zeros = [](const Quantized& q) {
        if (!q) return Tensor();
        Tensor amax = Tensor::like(q.scale, Memory::workspace);
        fill(amax, 0);
        return amax;
    };
    Tensor amax = zeros(codes.plain), amax_t;
    if (by != Scaling::tensor || !amax) amax_t = zeros(codes.transposed);
    absolute_max(amax, amax_t, x, by);
    // Of the whole tensor, where a scale's group reaches over ranks.
    const bool whole = by == Scaling::tensor && (operand.rows_divided || operand.cols_divided);
    if (amax && (whole || (by == Scaling::row && operand.cols_divided))) ranks_.all_reduce(amax, Reduce::max).wait();
    if (amax_t && (whole || (by == Scaling::row && operand.rows_divided)))
        ranks_.all_reduce(amax_t, Reduce::max).wait();
    if (amax) scale_from(codes.plain.scale, amax, type);
    if (amax_t) scale_from(codes.transposed.scale, amax_t, type);
    Tensor none;
    cast(codes.plain, codes.transposed, none, x);
    return codes;
}

Delayed::Delayed(const Fp8Options& options, int64_t operands, Device device, const Comm& ranks)
    : JustInTime(ranks),
      options_(options),
      ranks_(ranks),
      states_(static_cast<size_t>(operands)),
      amax_({operands}, DType::f32, device, Memory::workspace),
      scale_({operands, 4}, DType::f32, device, Memory::workspace) {
    fill(amax_, 0);
    fill(scale_, 1);
}

Tensor Delayed::place(int64_t operand) const { return scale_.element_slice(4 * operand, {1}); }

Codes Delayed::quantize(const Operand& operand, const Tensor& x, Want want, bool training, Memory kind) {
    const DType type = format(operand.role);
    Tensor amax = training ? amax_.row_slice(operand.number, operand.number + 1) : Tensor(), none;
    if (states_[size_t(operand.number)].scale == 0) {
        if (amax) absolute_max(amax, none, x, Scaling::tensor);
        return JustInTime::quantize(operand, x, want, training, kind);
    }
    Codes codes;
    const auto with_known_scale = [&](int64_t rows, int64_t cols, Memory booked) {
        return Quantized{Tensor({rows, cols}, type, x.device(), booked), place(operand.number), Scaling::tensor};
    };
    if (want != Want::transposed) codes.plain = with_known_scale(x.rows(), x.cols(), Memory::workspace);
    if (want != Want::plain) codes.transposed = with_known_scale(x.cols(), x.rows(), kind);
    cast(codes.plain, codes.transposed, amax, x);  // one pass: codes now, amax for later
    return codes;
}

void Delayed::next_step() {
    if (ranks_.size() > 1) ranks_.all_reduce(amax_, Reduce::max).wait();  // of all operands in one message
    const std::vector<double> amaxes = read(amax_);
    fill(amax_, 0);
    std::vector<float> scales(size_t(scale_.size()), 1);
    for (size_t i = 0; i < states_.size(); ++i) {
        State& state = states_[i];
        state.amaxes.push_back(std::isfinite(amaxes[i]) ? float(amaxes[i]) : 0);
        if (int64_t(state.amaxes.size()) > options_.history) state.amaxes.pop_front();
        const float most = *std::max_element(state.amaxes.begin(), state.amaxes.end());
        // Nothing to go by: the scale stays.
        if (most > 0) {
            const Operand::Role role = Operand::Role(i % 3);
            state.scale = std::max(std::ldexp(most, int(options_.margin)) / largest(format(role)),
                                   std::numeric_limits<float>::min());
        }
        if (state.scale > 0) scales[4 * i] = state.scale;
    }
    if (scale_.device() == Device::meta) return;
    Tensor host(scale_.shape(), DType::f32, Device::cpu, Memory::workspace);
    std::copy(scales.begin(), scales.end(), host.data<float>());
    copy(scale_, host);
}

}  // namespace train70b
