#include "07_fp8/complete/fp8.h"

#include <algorithm>
#include <utility>

#include "01_single_gpu/core/random.h"

namespace train70b {

std::array<LayerShape, 4> layer_shapes(const LlamaConfig& c, int64_t tp) {
    const int64_t E = c.hidden, q = c.q_width(tp), kv = c.kv_width(tp), F = c.ffn / tp;
    const bool own = c.head_size > 0;  // the head size does not follow from the hidden size
    return {{{"q, k, v", E, q + 2 * kv, "--hidden",
              own ? "--head-dim, --heads, --kv-heads" : "--hidden, --heads, --kv-heads"},
             {"o", q, E, own ? "--head-dim, --heads" : "--hidden", "--hidden"},
             {"gate, up", E, 2 * F, "--hidden", "--ffn"},
             {"down", F, E, "--ffn", "--hidden"}}};
}

std::string why_not_fp8(const LayerShape& layer, int64_t rows, int64_t divisor) {
    const auto check = [&](int64_t size, const std::string& what) {
        return size % divisor == 0 ? std::string()
                                   : fmt::format("{}: {} {} on a rank are not divisible by {} (try {})", layer.name,
                                                 size, what, divisor, (size / divisor + 1) * divisor);
    };
    for (const std::string& why : {check(layer.in, fmt::format("inputs ({})", layer.in_flags)),
                                   check(layer.out, fmt::format("outputs ({})", layer.out_flags)),
                                   check(rows, "rows of a micro-batch (--micro-batch x --seq-len)")})
        if (!why.empty()) return why;
    return {};
}

namespace {

Tensor product(const Quantized& a, const Quantized& b, DType dtype, Memory kind) {
    Tensor c({a.data.rows(), b.data.rows()}, dtype, a.data.device(), kind);
    scaled_matmul_into(c, a, b);
    return c;
}

// The weights, or their transpose, in 8 bits.
Quantized quantized_weight(const Fp8::Layer& layer, Recipe& recipe, Usage usage, bool training) {
    const Tensor weight = layer.linear->weight();
    if (size_of(weight.dtype()) > 1) {
        const QuantizedPair pair = recipe.quantize(layer.weight, weight, usage, training);
        return usage == Usage::rowwise ? pair.rowwise : pair.columnwise;
    }
    if (usage == Usage::rowwise)
        return {weight, layer.gathered_scale_inv, Scaling::tensor};  // ZeRO has gathered FP8 data
    Tensor transposed({weight.cols(), weight.rows()}, weight.dtype(), weight.device(), Memory::workspace);
    transpose_fp8(transposed, weight);
    return {transposed, layer.gathered_scale_inv, Scaling::tensor};
}

Var fp8_multiply(Tape& tape, const Var& x, const std::shared_ptr<Fp8::Layer>& layer,
                 const std::shared_ptr<Recipe>& recipe) {
    if (const int64_t rows = x.data.rows(), divisor = recipe->divisor(); !tape.recording && rows % divisor != 0) {
        // A batch of evaluation may have any number of rows: it is padded with rows of zeros, which change no amax.
        Var padded{.data = Tensor({(rows / divisor + 1) * divisor, x.data.cols()}, x.data.dtype(), x.data.device())};
        fill(padded.data, 0);
        Tensor head = padded.data.row_slice(0, rows);
        copy(head, x.data);
        return {.data = fp8_multiply(tape, padded, layer, recipe).data.row_slice(0, rows)};
    }
    const bool keep = tape.recording && !x.recomputed && !layer->input_stays;
    const bool training = tape.recording;
    const DType dtype = x.data.dtype();
    CHECK(x.data.rows() % recipe->divisor() == 0, "{} rows", x.data.rows());
    Linear& linear = *layer->linear;
    Var y;
    Quantized x_t;  // what the backward pass keeps of x
    {
        const QuantizedPair quantized_x =
            recipe->quantize(layer->input, x.data, keep ? Usage::both : Usage::rowwise, training, Memory::activations);
        x_t = quantized_x.columnwise;
        y.data = product(quantized_x.rowwise, quantized_weight(*layer, *recipe, Usage::rowwise, training), dtype,
                         linear.y_kind);
    }
    // The tape runs the newest entry first: dX, then dW.
    const auto dy_t = std::make_shared<Quantized>();
    tape.record_wgrad([=, &linear, saved = keep ? std::nullopt : std::optional<Saved>(x)] {
        const Quantized kept =
            saved ? recipe->quantize(layer->input, saved->get(), Usage::columnwise, false).columnwise : x_t;
        Tensor dw = linear.grad();
        scaled_matmul_into(dw, *dy_t, kept, 1);  // dW += dY^T X
        *dy_t = {};
    });
    tape.record([=, &linear, dx = x.grad, dy = y.grad] {
        const QuantizedPair quantized_dy = recipe->quantize(layer->gradient, *dy, Usage::both, true);
        *dy_t = quantized_dy.columnwise;
        accumulate(*dx,
                   product(quantized_dy.rowwise, quantized_weight(*layer, *recipe, Usage::columnwise, false), dtype,
                           linear.dx_kind));  // dX = dY W
    });
    return y;
}

}  // namespace

Fp8 apply_fp8(Llama& model, const Fp8Options& options, int64_t rows, const Comm& tensor_ranks, int64_t data_rank) {
    Fp8 result;
    result.tensor_ranks = tensor_ranks;
    if (options.recipe == "off") return result;
    const int64_t operands = 3 * 4 * int64_t(model.blocks.size());
    result.recipe = make_recipe(options, operands, model.options.device, tensor_ranks);
    const int64_t divisor = result.recipe->divisor();
    const bool sharded = tensor_ranks.size() > 1;
    int64_t operand = 0;

    const std::array<LayerShape, 4> shapes = layer_shapes(model.config, tensor_ranks.size());
    const auto add = [&](Linear& linear, size_t shape, bool column, bool input_stays) {
        const int64_t first = std::exchange(operand, operand + 3);
        for (const char* role : {" input", " weight", " gradient"})
            result.recipe->operand_names.push_back(linear.weights[0]->name + role);
        CHECK(linear.weights[0]->local.cols == shapes[shape].in, "{}: {} inputs", shapes[shape].name,
              linear.weights[0]->local.cols);
        if (const std::string why = why_not_fp8(shapes[shape], rows, divisor); !why.empty()) {
            if (std::find(result.left_out.begin(), result.left_out.end(), why) == result.left_out.end())
                result.left_out.push_back(why);
            return;
        }
        // How tensor parallelism shards the three: a column-parallel layer by its outputs, a row-parallel one by its
        // inputs.
        auto layer = std::make_shared<Fp8::Layer>(
            Fp8::Layer{.linear = &linear,
                       .input = {Operand::input, first, false, sharded && !column},
                       .weight = {Operand::weight, first + 1, sharded && column, sharded && !column},
                       .gradient = {Operand::gradient, first + 2, false, sharded && column},
                       .input_stays = input_stays});
        layer->gradient.key = random_bits(linear.weights[0]->key(0), uint64_t(data_rank));
        int64_t above = 0;
        for (const Param* weight : linear.weights) {
            for (int64_t r = 0; r < weight->local.rows; ++r)
                layer->gradient.outs.push_back(above + weight->local.row_begin + r);
            above += weight->global_shape[0];
        }
        linear.multiply = [layer, recipe = result.recipe](Tape& tape, const Var& x, Linear&) {
            return fp8_multiply(tape, x, layer, recipe);
        };
        result.layers.push_back(layer);
    };
    for (Block& block : model.blocks) {
        add(block.qkv, 0, true, false);
        add(block.o, 1, false, true);  // attention keeps its output
        add(block.feed_forward->gate_up, 2, true, false);
        add(block.feed_forward->down, 3, false, false);
    }
    return result;
}

}  // namespace train70b
