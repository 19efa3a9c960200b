#include "07_fp8/complete/recipes.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "01_single_gpu/core/registry.h"

namespace train70b {

namespace {
template <class T>
std::unique_ptr<Recipe> make(const Fp8Options& options, int64_t operands, Device device, const Comm& ranks) {
    if constexpr (std::is_same_v<T, DelayedScaling>)
        return std::make_unique<T>(options, operands, device, ranks);
    else
        return std::make_unique<T>(ranks);
}
}  // namespace

const std::vector<Fp8Recipe>& fp8_recipes() {
    static std::vector<Fp8Recipe> list = {
        {"current", "one scale per tensor, from its current amax", make<CurrentScaling>},
        {"delayed", "one scale per tensor, from the amaxes of earlier steps", make<DelayedScaling>},
        {"rowwise", "one scale per row, from its current amax", make<RowwiseScaling>},
        {"blockwise", "one scale per 1 x 128 or 128 x 128 elements, from their current amax", make<BlockwiseScaling>},
        {"mxfp8", "a power of two per 1 x 32 elements", make<Mxfp8Scaling>, false},
        {"nvfp4", "E2M1 data, an E4M3 scale per 16 elements and one per tensor", make<Nvfp4Scaling>, false},
        {"int8", "integers, one scale per row", make<Int8Scaling>, false}};
    return list;
}

std::vector<std::string> fp8_values() {
    std::vector<std::string> values = names_of(fp8_recipes());
    values.insert(values.begin(), "off");
    return values;
}

void check_on_gpu(const Fp8Options& options, const std::string& device) {
    if (options.recipe != "off" && !find_entry(fp8_recipes(), "--fp8", options.recipe).on_gpu)
        usage_error("--fp8 {}: not supported with {}, only on CPUs (try --fp8 blockwise)", options.recipe, device);
}

std::unique_ptr<Recipe> make_recipe(const Fp8Options& options, int64_t operands, Device device, const Comm& ranks) {
    if (device == Device::cuda) check_on_gpu(options, "--device cuda");
    return find_entry(fp8_recipes(), "--fp8", options.recipe).make(options, operands, device, ranks);
}

QuantizedPair CurrentScaling::allocate(const Operand& operand, const Tensor& x, Usage usage, Memory kind) const {
    QuantizedPair pair;
    const DType type = format(operand.role);
    const Scaling by = scaling(operand.role);
    if (usage != Usage::columnwise) pair.rowwise = make_quantized(x.rows(), x.cols(), type, by, x.device());
    if (usage != Usage::rowwise) pair.columnwise = make_quantized(x.cols(), x.rows(), type, by, x.device(), kind);
    return pair;
}

namespace {
// Whether the elements that share a scale are sharded over the ranks: of x, of x^T.
std::pair<bool, bool> spans_ranks(const Operand& operand, Scaling by) {
    if (by == Scaling::row) return {operand.cols_sharded, operand.rows_sharded};
    const bool spans = by == Scaling::tensor && (operand.rows_sharded || operand.cols_sharded);
    return {spans, spans};
}
}  // namespace

QuantizedPair CurrentScaling::quantize(const Operand& operand, const Tensor& x, Usage usage, bool, Memory kind) {
    const DType type = format(operand.role);
    const Scaling by = scaling(operand.role);
    QuantizedPair pair = allocate(operand, x, usage, kind);
    if (by == Scaling::tensor && pair.rowwise && pair.columnwise) pair.columnwise.scale_inv = pair.rowwise.scale_inv;
    const bool one_scale = by == Scaling::tensor && pair.rowwise;
    // What is not known must be computed, and exchanged where ranks have a part each.
    const auto zeros = [](const Quantized& q, const Tensor& known) {
        if (!q || known) return Tensor();
        Tensor amax = Tensor::like(q.scale_inv, Memory::workspace);
        fill(amax, 0);
        return amax;
    };
    Tensor amax = zeros(pair.rowwise, operand.amax);
    Tensor amax_t = one_scale ? Tensor() : zeros(pair.columnwise, operand.amax_t);
    if (amax || amax_t) compute_amax(amax, amax_t, x, by);
    const auto [spans, spans_t] = spans_ranks(operand, by);
    if (amax && spans) ranks_.all_reduce(amax, Reduce::max).wait();
    if (amax_t && spans_t) ranks_.all_reduce(amax_t, Reduce::max).wait();
    if (pair.rowwise) compute_scale_inv(pair.rowwise.scale_inv, amax ? amax : operand.amax, type);
    if (pair.columnwise && !one_scale)
        compute_scale_inv(pair.columnwise.scale_inv, amax_t ? amax_t : operand.amax_t, type);
    Tensor none;
    cast(pair.rowwise, pair.columnwise, none, x);
    return pair;
}

void CurrentScaling::weights_changed(const std::vector<WeightOperand>& weights) {
    const Scaling by = exchanged();
    // Calls body(amax, size) for all that the ranks exchange.
    const auto for_each = [&](const std::function<void(Tensor&, int64_t)>& body) {
        for (const auto& [operand, weight] : weights) {
            const auto [spans, spans_t] = spans_ranks(*operand, by);
            if (spans) body(operand->amax, ScaleLayout{by, weight.rows(), weight.cols()}.size());
            if (spans_t && by == Scaling::row) body(operand->amax_t, weight.cols());
        }
    };
    int64_t size = 0;
    for_each([&](Tensor&, int64_t n) { size += n; });
    if (size == 0) return;
    if (!weight_amaxes_) {
        weight_amaxes_ = Tensor({size}, DType::f32, weights[0].weight.device(), Memory::workspace);
        int64_t begin = 0;
        for_each([&](Tensor& amax, int64_t n) {
            amax = weight_amaxes_.element_slice(std::exchange(begin, begin + n), {n});
        });
    }
    fill(weight_amaxes_, 0);
    for (const auto& [operand, weight] : weights) {
        const bool one_scale = by == Scaling::tensor;
        Tensor amax_t = one_scale ? Tensor() : operand->amax_t;
        if (operand->amax || amax_t) compute_amax(operand->amax, amax_t, weight, by);
        if (one_scale) operand->amax_t = operand->amax;
    }
    ranks_.all_reduce(weight_amaxes_, Reduce::max).wait();
}

DelayedScaling::DelayedScaling(const Fp8Options& options, int64_t operands, Device device, const Comm& ranks)
    : CurrentScaling(ranks),
      options_(options),
      states_(static_cast<size_t>(operands), State{std::deque<float>(size_t(options.history), 0.0f), 0}),
      amax_({operands}, DType::f32, device, Memory::workspace),
      scale_inv_({operands, 4}, DType::f32, device, Memory::workspace) {
    fill(amax_, 0);
    fill(scale_inv_, 1);
}

QuantizedPair DelayedScaling::quantize(const Operand& operand, const Tensor& x, Usage usage, bool training,
                                       Memory kind) {
    const DType type = format(operand.role);
    Tensor amax = training ? amax_.row_slice(operand.index, operand.index + 1) : Tensor(), none;
    if (states_[size_t(operand.index)].scale_inv == 0) {
        if (amax) compute_amax(amax, none, x, Scaling::tensor);
        return CurrentScaling::quantize(operand, x, usage, training, kind);
    }
    QuantizedPair pair;
    const auto with_known_scale_inv = [&](int64_t rows, int64_t cols, Memory booked) {
        return Quantized{Tensor({rows, cols}, type, x.device(), booked),
                         scale_inv_.element_slice(4 * operand.index, {1}), Scaling::tensor};
    };
    if (usage != Usage::columnwise) pair.rowwise = with_known_scale_inv(x.rows(), x.cols(), Memory::workspace);
    if (usage != Usage::rowwise) pair.columnwise = with_known_scale_inv(x.cols(), x.rows(), kind);
    cast(pair.rowwise, pair.columnwise, amax, x);  // one pass: the data, and the amax for later steps
    return pair;
}

void DelayedScaling::next_step() {
    if (ranks_.size() > 1) ranks_.all_reduce(amax_, Reduce::max).wait();  // one message for all operands
    const std::vector<double> amaxes = read(amax_);
    fill(amax_, 0);
    for (size_t i = 0; i < states_.size(); ++i) {
        State& state = states_[i];
        state.amax_history.pop_front();
        state.amax_history.push_back(std::isfinite(amaxes[i]) ? float(amaxes[i]) : 0);
        const float history_max = *std::max_element(state.amax_history.begin(), state.amax_history.end());
        // Without a finite amax above 0 the scale stays.
        if (history_max > 0) {
            const Operand::Role role = Operand::Role(i % 3);
            state.scale_inv = std::max(std::ldexp(history_max, int(options_.margin)) / largest(format(role)),
                                       std::numeric_limits<float>::min());
        }
    }
    upload_scales();
}

void DelayedScaling::upload_scales() {
    if (scale_inv_.device() == Device::meta) return;
    Tensor host(scale_inv_.shape(), DType::f32, Device::cpu, Memory::workspace);
    fill(host, 1);
    for (size_t i = 0; i < states_.size(); ++i)
        if (states_[i].scale_inv > 0) host.data<float>()[4 * i] = states_[i].scale_inv;
    copy(scale_inv_, host);
}

StepState::Rows DelayedScaling::rows() const {
    CHECK(operand_names.size() == states_.size(), "{} names of {} operands", operand_names.size(), states_.size());
    Rows rows{.kind = "fp8/", .names = operand_names, .width = 2 + options_.history, .values = {}};
    const std::vector<double> amaxes = read(amax_);
    for (size_t i = 0; i < states_.size(); ++i) {
        rows.values.insert(rows.values.end(), {states_[i].scale_inv, float(amaxes[i])});
        rows.values.insert(rows.values.end(), states_[i].amax_history.begin(), states_[i].amax_history.end());
    }
    return rows;
}

void DelayedScaling::restore(const Rows& rows) {
    CHECK(rows.names == operand_names && rows.width == 2 + options_.history, "{} rows of {}", rows.names.size(),
          rows.width);
    Tensor amaxes(amax_.shape(), DType::f32, Device::cpu, Memory::workspace);
    for (size_t i = 0; i < states_.size(); ++i) {
        const auto row = rows.values.begin() + int64_t(i) * rows.width;
        states_[i].scale_inv = row[0];
        amaxes.data<float>()[i] = row[1];
        states_[i].amax_history.assign(row + 2, row + rows.width);
    }
    copy(amax_, amaxes);
    upload_scales();
}

}  // namespace train70b
