#include "07_fp8/report.h"

#include <cmath>
#include <numeric>
#include <utility>

#include "01_single_gpu/core/random.h"
#include "01_single_gpu/io/bench.h"
#include "02_data_parallel/runtime/measure.h"
#include "07_fp8/adamw8bit.h"
#include "07_fp8/flags.h"
#include "07_fp8/formats.h"

namespace train70b {

// ---- accuracy -------------------------------------------------------------------------------------------------------

namespace {

using Matrix = std::vector<double>;  // row-major

Tensor host_tensor(const Matrix& x, int64_t rows, int64_t cols) {
    Tensor t({rows, cols}, DType::f32, Device::cpu, Memory::workspace);
    for (size_t i = 0; i < x.size(); ++i) t.data<float>()[i] = float(x[i]);
    return t;
}

Matrix normal(int64_t count, uint64_t key, double size) {
    Tensor x({count}, DType::f32, Device::cpu, Memory::workspace);
    fill_normal(x, key, {.cols = count, .global_cols = count}, float(size));
    return {x.data<float>(), x.data<float>() + count};
}

// a (M, K) b (N, K)^T
Matrix product(const Matrix& a, const Matrix& b, int64_t K) {
    const int64_t M = int64_t(a.size()) / K, N = int64_t(b.size()) / K;
    Matrix c(static_cast<size_t>(M * N));
    for (int64_t m = 0; m < M; ++m)
        for (int64_t n = 0; n < N; ++n)
            c[size_t(m * N + n)] =
                std::inner_product(a.begin() + m * K, a.begin() + (m + 1) * K, b.begin() + n * K, 0.0);
    return c;
}

// Mean over rows, so that large rows do not speak for small ones.
double row_error(const Matrix& c, const Matrix& expected, int64_t cols) {
    const int64_t rows = int64_t(c.size()) / cols;
    double sum = 0;
    for (int64_t r = 0; r < rows; ++r) {
        double difference = 0, size = 0;
        for (int64_t i = r * cols; i < (r + 1) * cols; ++i) {
            difference += std::pow(c[size_t(i)] - expected[size_t(i)], 2);
            size += std::pow(expected[size_t(i)], 2);
        }
        sum += std::sqrt(difference / size) / double(rows);
    }
    return sum;
}

// What an operand (rows, cols) of a product over its columns becomes.
using Rounding = std::function<Matrix(const Matrix& x, int64_t cols, Operand::Role role)>;

Matrix to_bf16(const Matrix& x, int64_t cols, Operand::Role) {
    Tensor rounded({int64_t(x.size())}, DType::bf16, Device::cpu, Memory::workspace);
    copy(rounded, host_tensor(x, int64_t(x.size()) / cols, cols));
    return read(rounded);
}

Rounding by_recipe(const std::string& name) {
    return [name](const Matrix& x, int64_t cols, Operand::Role role) -> Matrix {
        const auto recipe = make_recipe({.recipe = name}, 3, Device::cpu, Comm());
        const Tensor back = dequantized(
            recipe
                ->quantize({role, int64_t(role)}, host_tensor(x, int64_t(x.size()) / cols, cols), Usage::rowwise, false)
                .rowwise);
        return {back.data<float>(), back.data<float>() + back.size()};
    };
}

// One scale per tensor, and the format as told; amax: what the scale was made for, as a multiple of what is there.
template <class Format>
Matrix one_scale(const Matrix& x, double amax) {
    double most = 0;
    for (const double value : x) most = std::max(most, std::abs(value));
    const double scale = amax * most / double(Format::largest());
    Matrix rounded;
    for (const double value : x) rounded.push_back(double(float(Format(float(value / scale)))) * scale);
    return rounded;
}

// MXFP8: 32 values share a power of two. Blackwell's tensor cores (sm_100) take it, Hopper's do not. Two rules for the
// scale: that of the OCP specification (Microscaling Formats v1.0, section 6.3) takes the exponent of the largest
// magnitude less that of the format's largest, 2^8, so that up to an eighth of the largest values is cut off; NVIDIA's
// (Mishra et al. 2025) rounds up, so that nothing is.
enum class MxScale { ocp_floor, round_up };
Rounding mxfp8(MxScale rule) {
    return [rule](const Matrix& x, int64_t, Operand::Role) {
        Matrix rounded(x.size());
        for (size_t begin = 0; begin < x.size(); begin += 32) {
            float most = 0;
            for (size_t i = begin; i < begin + 32; ++i) most = std::max(most, std::abs(float(x[i])));
            const float scale =
                rule == MxScale::round_up ? float(e8m0(most / e4m3::largest())) : float(e8m0(most / 256, /*up=*/false));
            for (size_t i = begin; i < begin + 32; ++i) rounded[i] = double(float(e4m3(float(x[i]) / scale)) * scale);
        }
        return rounded;
    };
}

}  // namespace

std::vector<ProductErrors> product_errors(int64_t rows, int64_t in, int64_t out, uint64_t seed) {
    const auto key = [seed](uint64_t i) { return random_bits(seed, i); };
    const Matrix x = normal(rows * in, key(0), 1), w = normal(out * in, key(1), 0.02);
    Matrix x_rows = x, x_cols = x, dy = normal(rows * out, key(2), 1e-7), w_t(w.size());
    for (int64_t r = 0; r < rows; ++r)
        for (int64_t c = 0; c < in; ++c) {
            if (r % 64 == 5) x_rows[size_t(r * in + c)] *= 100;
            if (c % 64 == 5) x_cols[size_t(r * in + c)] *= 100;
        }
    const Matrix of_element = normal(rows * out, key(3), 0.5), of_row = normal(rows, key(4), 1.5);
    for (size_t i = 0; i < dy.size(); ++i) dy[i] *= std::pow(10, of_element[i] + of_row[i / size_t(out)]);
    for (int64_t o = 0; o < out; ++o)
        for (int64_t i = 0; i < in; ++i) w_t[size_t(i * out + o)] = w[size_t(o * in + i)];

    const auto errors = [&](const std::string& name, const Rounding& round) {
        const auto error = [&](const Matrix& a, const Matrix& b, int64_t K, Operand::Role role) {
            return row_error(product(round(a, K, role), round(b, K, Operand::weight), K), product(a, b, K),
                             int64_t(b.size()) / K);
        };
        return ProductErrors{name, error(x, w, in, Operand::input), error(x_rows, w, in, Operand::input),
                             error(x_cols, w, in, Operand::input), error(dy, w_t, out, Operand::gradient)};
    };
    const auto with_amax = [](double amax) -> Rounding {
        return [amax](const Matrix& m, int64_t, Operand::Role role) {
            return role == Operand::gradient ? one_scale<e5m2>(m, amax) : one_scale<e4m3>(m, amax);
        };
    };
    return {errors("bf16", to_bf16),
            errors("current", by_recipe("current")),
            errors("current, all E4M3", [](const Matrix& m, int64_t, Operand::Role) { return one_scale<e4m3>(m, 1); }),
            errors("current, all E5M2", [](const Matrix& m, int64_t, Operand::Role) { return one_scale<e5m2>(m, 1); }),
            errors("delayed, amax was x8", with_amax(8)),
            errors("delayed, amax was /8", with_amax(1.0 / 8)),
            errors("rowwise", by_recipe("rowwise")),
            errors("blockwise", by_recipe("blockwise")),
            errors("mxfp8, scale: OCP floor", mxfp8(MxScale::ocp_floor)),
            errors("mxfp8, rounded up", mxfp8(MxScale::round_up))};
}

std::string error_table(const std::vector<ProductErrors>& errors) {
    std::string text = fmt::format(
        "error of one product against double: mean over rows of |difference| / |row|\n{:<24}{:>12}{:>16}{:>16}{:>16}\n",
        "", "normal", "rows x 100", "columns x 100", "tiny gradients");
    for (const ProductErrors& e : errors)
        text += fmt::format("{:<24}{:>12.2e}{:>16.2e}{:>16.2e}{:>16.2e}\n", e.recipe, e.normal, e.outlier_rows,
                            e.outlier_cols, e.tiny);
    return text;
}

std::vector<LossCurve> loss_curves(const TrainOptions& options, const Dataset& data, const Layout& layout,
                                   const ZeroOptions& zero, const Precision& chosen, int64_t steps) {
    TrainOptions o = options.without_files();
    o.steps = steps;
    std::vector<LossCurve> curves;
    const auto run = [&](const std::string& name, const std::string& recipe, const std::string& optimizer) {
        Llama model(o.model, o.llama());
        Trainer trainer(o, model, data);
        Precision precision = chosen;
        precision.fp8.recipe = recipe;
        precision.optimizer = optimizer;
        const Composition composition(model, trainer, o, layout, zero, precision);
        LossCurve curve{name, {}};
        trainer.allocate();
        for (const MeasuredStep& step : measure_steps(trainer, layout.data_ranks, steps))
            curve.losses.push_back(step.report.loss);
        curves.push_back(curve);
    };
    run(o.dtype, "off", "adamw");
    for (const char* recipe : {"current", "delayed", "rowwise", "blockwise"}) run(recipe, recipe, "adamw");
    run(o.dtype + ", adamw8bit", "off", "adamw8bit");
    run("current, adamw8bit", "current", "adamw8bit");
    return curves;
}

std::string curve_table(const std::vector<LossCurve>& curves) {
    const auto mean_of_last = [](const std::vector<double>& losses) {
        const size_t count = std::min<size_t>(10, losses.size());
        return std::accumulate(losses.end() - int64_t(count), losses.end(), 0.0) / double(count);
    };
    std::string text = fmt::format("{} steps with each: mean of the last ten losses\n{:<24}{:>10}{:>14}{:>22}\n",
                                   curves[0].losses.size(), "", "loss", "distance", "farthest at any step");
    for (const LossCurve& curve : curves) {
        double farthest = 0;
        for (size_t i = 0; i < curve.losses.size(); ++i)
            farthest = std::max(farthest, std::abs(curve.losses[i] - curves[0].losses[i]));
        const double loss = mean_of_last(curve.losses);
        text += fmt::format("{:<24}{:>10.4f}{:>+14.4f}{:>22.4f}\n", curve.name, loss,
                            loss - mean_of_last(curves[0].losses), farthest);
    }
    return text;
}

std::string curve_csv(const std::vector<LossCurve>& curves) {
    std::string text = "step";
    for (const LossCurve& curve : curves) text += fmt::format(",\"{}\"", curve.name);
    for (size_t i = 0; i < curves[0].losses.size(); ++i) {
        text += fmt::format("\n{}", i + 1);
        for (const LossCurve& curve : curves) text += fmt::format(",{:.9g}", curve.losses[i]);
    }
    return text + "\n";
}

// ---- memory ---------------------------------------------------------------------------------------------------------

int64_t fp8_activations(const LlamaConfig& c, int64_t rows, DType dtype, Recompute recompute, const Recipe& recipe,
                        int64_t tensor_ranks) {
    const int64_t a = size_of(dtype), E = c.hidden, F = c.ffn / tensor_ranks;
    const auto saved = [&](int64_t in) {  // a byte and a share of a scale instead of a bytes
        return (a - 1) * rows * in - 4 * ScaleLayout{recipe.scaling(Operand::input), in, rows}.size();
    };
    const ActivationFormula f = activation_formula(c, 1, rows, dtype, recompute, {tensor_ranks, false});
    // Of the inputs that a block keeps, those of q k v, of gate and up, of down are codes now; attention keeps that of
    // o. In the last block's turn what down has let go is already replaced by gradients of the full width: less is
    // gained there.
    if (recompute == Recompute::none) {
        const int64_t working = std::max(f.working, 2 * a * rows * F + saved(F));
        return f.total - c.layers * (2 * saved(E) + saved(F)) + working - f.working;
    }
    if (recompute == Recompute::full) {  // only the block that is being made again holds any
        const int64_t head = rows * (a * (2 * E + (c.vocab + tensor_ranks - 1) / tensor_ranks) + 4);
        return f.total - f.working + std::max(head, f.working - 2 * saved(E));
    }
    return f.total;  // pointwise, selective: they are made again, not kept
}

PrecisionRun run_precision(const TrainOptions& options, const Dataset& data, const Layout& layout,
                           const ZeroOptions& zero_options, const Precision& precision) {
    TrainOptions o = options.without_files();
    const MemoryBytes before = ledger().now();
    Llama model(o.model, o.llama());
    Trainer trainer(o, model, data);
    Composition composition(model, trainer, o, layout, zero_options, precision);
    trainer.allocate();
    const MeasuredStep step = measure_steps(trainer, layout.data_ranks, 2).back();
    PrecisionRun run;
    run.step_s = step.report.step_s;
    for (const auto& [operation, entry] : step.comm.operations) {
        if (operation.ends_with(".all_gather")) run.gathered += entry.bytes;
        if (operation.ends_with(".reduce_scatter") || operation == layout.data_ranks.name() + ".all_reduce")
            run.reduced += entry.bytes;
    }
    run.peak = step.report.peak;
    for (int i = 0; i < kMemoryKinds; ++i) run.peak.kind[size_t(i)] -= before[size_t(i)];
    const int64_t tp = layout.tensor_ranks.size(), rows = o.micro_batch * o.seq_len;
    const auto& [dtype, grad_dtype, device, recompute, init_std] = model.options;
    run.activations_formula =
        precision.fp8.recipe == "off"
            ? activation_formula(o.model, o.micro_batch, o.seq_len, dtype, recompute, {tp, false}).total
            : fp8_activations(o.model, rows, dtype, recompute, *make_recipe(precision.fp8, 3, Device::cpu, Comm()), tp);
    for (const Param* param : model.params()) {
        const int64_t size = param->local.size(), master = master_bytes(dtype) * size;
        run.optimizer_formula += master + (precision.optimizer == "adamw8bit"
                                               ? 2 * size + 8 * BlockLayout{param->global_index(0), size}.blocks()
                                               : (AdamW::state_bytes(dtype) - master_bytes(dtype)) * size);
    }
    return run;
}

std::string memory_table(const std::vector<PrecisionRun>& runs, bool formulas) {
    std::string text = fmt::format(
        "bytes of rank 0: peak of a step{}; and what it sends in "
        "one\n{:<24}{:>12}{:>12}{:>12}{:>13}{:>12}{:>13}{:>13}{:>11}\n",
        formulas ? ", below it the formula" : "", "", "params", "grads", "optimizer", "activations", "workspace",
        "all-gathers", "reductions", "step");
    for (const PrecisionRun& run : runs) {
        const auto kind = [&](Memory memory) { return run.peak.kind[size_t(memory)]; };
        text +=
            fmt::format("{:<24}{:>12}{:>12}{:>12}{:>13}{:>12}{:>13}{:>13}{:>8.1f} ms\n", run.name, kind(Memory::params),
                        kind(Memory::grads), kind(Memory::optimizer), kind(Memory::activations),
                        kind(Memory::workspace), run.gathered, run.reduced, 1e3 * run.step_s);
        if (formulas) text += fmt::format("{:<48}{:>12}{:>13}\n", "", run.optimizer_formula, run.activations_formula);
    }
    return text;
}

std::string projection_table() {
    const LlamaConfig c = preset("70b");
    constexpr double kDevice = 80e9, kRanks = 8;  // bytes, devices
    constexpr int64_t kSequence = 4096;
    const double n = double(c.parameters()), block = double(c.block_parameters());
    std::string text = fmt::format(
        "computed: 70b on {:.0f} devices of {:.0f} GB, ZeRO-3, one sequence of {} with full recomputation; GB of one "
        "device\n"
        "{:<38}{:>8}{:>8}{:>11}{:>10}{:>13}{:>8}{:>10}\n",
        kRanks, kDevice / 1e9, kSequence, "", "params", "grads", "optimizer", "gathered", "activations", "all",
        "needs");
    struct Row {
        const char* name;
        double grad, states;  // bytes per parameter; of the weights: 2
        bool codes;
    };
    const double moments8 = moment_bytes("adamw8bit", DType::bf16);
    for (const Row& row : {Row{"bf16, fp32 gradients, AdamW", 4, 12, false}, Row{"bf16 gradients", 2, 12, false},
                           Row{"bf16 gradients, adamw8bit", 2, 4 + moments8, false},
                           Row{"bf16 gradients, adamw8bit, fp8", 2, 4 + moments8, true},
                           Row{"the same, optimizer offloaded", 2, 0, true},
                           Row{"bf16 gradients, 8 bits, no masters", 2, moments8, false}}) {
        // Whole at once, in the backward pass: a unit and the one fetched ahead, and the gradients of it and of the one
        // whose reduction is under way. The head, larger than a block, is never in codes.
        const double head = double(c.vocab * c.hidden), P = row.codes ? 1 : 2, G = row.grad;
        const double gathered = std::max(
            {2 * head + P * block + G * head, 2 * P * block + G * (block + head), 2 * P * block + 2 * G * block});
        const double activations =
            double(row.codes ? fp8_activations(c, kSequence, DType::bf16, Recompute::full, CurrentScaling(Comm()), 1)
                             : activation_formula(c, 1, kSequence, DType::bf16, Recompute::full).total);
        const double shared = (2 + row.grad + row.states) * n, own = gathered + activations;
        text += fmt::format("{:<38}{:>8.1f}{:>8.1f}{:>11.1f}{:>10.1f}{:>13.1f}{:>8.1f}{:>10.0f}\n", row.name,
                            2 * n / kRanks / 1e9, row.grad * n / kRanks / 1e9, row.states * n / kRanks / 1e9,
                            gathered / 1e9, activations / 1e9, (shared / kRanks + own) / 1e9,
                            std::ceil(shared / (kDevice - own)));
    }
    return text +
           fmt::format(
               "needs: devices of that size. Offloaded, the node's host memory holds {:.0f} GB. Without masters: bf16 "
               "weights, updated with stochastic rounding; not a mode of this program yet\n",
               (4 + 4 + moments8) * n / 1e9);
}

// ---- time -----------------------------------------------------------------------------------------------------------

ProductTimes time_products(Device device, const Fp8Options& options, int64_t rows, int64_t in, int64_t out) {
    const auto random = [&](Shape shape, uint64_t key, float size) {
        Tensor x(shape, DType::bf16, device, Memory::workspace);
        fill_normal(x, key, {.cols = x.size(), .global_cols = x.size()}, size);
        return x;
    };
    const Tensor x = random({rows, in}, 1, 1), w = random({out, in}, 2, 0.02f), dy = random({rows, out}, 3, 1e-6f);
    Tensor y({rows, out}, DType::bf16, device, Memory::workspace), dx = Tensor::like(x, Memory::workspace);
    Tensor dw({out, in}, DType::f32, device, Memory::workspace);
    fill(dw, 0);
    const auto recipe = make_recipe(options, 3, device, Comm());
    const auto seconds = [&](const std::function<void()>& body) { return median_seconds(device, 9, body); };
    QuantizedPair of_x, of_w, of_dy;
    const auto make_codes = [&] {
        of_x = recipe->quantize({Operand::input, 0}, x, Usage::both, true);
        of_w.rowwise = recipe->quantize({Operand::weight, 1}, w, Usage::rowwise, true).rowwise;
        of_w.columnwise = recipe->quantize({Operand::weight, 1}, w, Usage::columnwise, false).columnwise;
        of_dy = recipe->quantize({Operand::gradient, 2}, dy, Usage::both, true);
    };
    make_codes();
    recipe->next_step();
    ProductTimes times{rows, in, out, 0, 0, 0};
    times.bf16_s = seconds([&] {
        matmul_into(y, x, w, Transpose::b);
        matmul_into(dx, dy, w);
        matmul_into(dw, dy, x, Transpose::a, 1);
    });
    times.codes_s = seconds(make_codes);
    times.fp8_s = seconds([&] {
        scaled_matmul_into(y, of_x.rowwise, of_w.rowwise);
        scaled_matmul_into(dx, of_dy.rowwise, of_w.columnwise);
        scaled_matmul_into(dw, of_dy.columnwise, of_x.columnwise, 1);
    });
    return times;
}

std::string time_table(const std::vector<ProductTimes>& times, const std::string& recipe) {
    std::string text = fmt::format(
        "a layer's three products, {}: TFLOP/s, and milliseconds of making the "
        "codes\n{:>8}{:>8}{:>8}{:>10}{:>10}{:>12}{:>14}\n",
        recipe, "rows", "in", "out", "bf16", "fp8", "codes, ms", "whole gain");
    const ProductTimes* even = nullptr;
    for (const ProductTimes& t : times) {
        const double flops = 6.0 * double(t.rows) * double(t.in) * double(t.out), all = t.fp8_s + t.codes_s;
        text += fmt::format("{:>8}{:>8}{:>8}{:>10.1f}{:>10.1f}{:>12.3f}{:>12.2f} x\n", t.rows, t.in, t.out,
                            flops / t.bf16_s / 1e12, flops / t.fp8_s / 1e12, 1e3 * t.codes_s, t.bf16_s / all);
        if (t.bf16_s <= all) even = nullptr;
        if (t.bf16_s > all && !even) even = &t;
    }
    if (even)
        text += fmt::format("8 bits pay from {} rows of {} to {} on\n", even->rows, even->in, even->out);
    else
        text += "8 bits do not pay at the largest of these shapes\n";
    return text;
}

// ---- all of it ------------------------------------------------------------------------------------------------------

void Fp8Report::add_flags(CommandLine& flags) {
    flags.group("Output");
    flags.add("--compare", compare_steps_, "train every recipe for this many steps and compare losses; 0: off",
              integer_from(0));
    flags.add_output("--compare-csv", compare_csv_, "FILE.csv: write the losses of --compare");
}

void Fp8Report::check(const Program& p) const {
    if (!compare_csv_.empty() && (compare_steps_ == 0 || !p.tables))
        usage_error("--compare-csv: holds the losses of --compare N; add --compare 60, and leave out --tables off");
    if (compare_steps_ > 0 && p.options.dtype == "fp64")
        usage_error("--compare: trains in FP8, too, which does not go with --dtype fp64; leave one of them out");
}

void Fp8Report::open() {
    if (this_rank == 0 && !compare_csv_.empty()) csv_.emplace("--compare-csv", compare_csv_);
}

namespace {
std::string describe(const Precision& precision, const std::string& dtype) {
    return (precision.fp8.recipe == "off" ? dtype : precision.fp8.recipe) +
           (precision.optimizer == "adamw" ? "" : ", " + precision.optimizer);
}
}  // namespace

void Fp8Report::print(Program& p, const Layout& layout, const ZeroOptions& zero, const Precision& chosen) {
    const TrainOptions& options = p.options;
    if (this_rank == 0) say("\n{}", error_table(product_errors(256, 512, 512, 1)));
    std::vector<PrecisionRun> runs;
    for (const char* recipe : {"off", "current", "delayed", "rowwise", "blockwise"})
        for (const char* optimizer : {"adamw", "adamw8bit"}) {
            Precision precision = chosen;
            precision.fp8.recipe = recipe;
            precision.fp8.strict = false;
            precision.optimizer = optimizer;
            if (options.dtype == "fp64" && (recipe != std::string("off") || optimizer != std::string("adamw")))
                continue;
            if (optimizer != std::string("adamw") && recipe != std::string("off") && recipe != chosen.fp8.recipe)
                continue;
            runs.push_back(run_precision(options, p.data(), layout, zero, precision));
            runs.back().name = describe(precision, options.dtype);
        }
    say("\n{}", memory_table(runs, layout.data_ranks.size() == 1));
    if (compare_steps_ > 0) {
        const std::vector<LossCurve> curves = loss_curves(options, p.data(), layout, zero, chosen, compare_steps_);
        say("\n{}", curve_table(curves));
        if (csv_) {
            csv_->write(curve_csv(curves));
            csv_->commit();
        }
    }
    if (options.device_kind() == Device::cuda && chosen.fp8.recipe != "off" && this_rank == 0) {
        std::vector<ProductTimes> times;
        for (const int64_t size : {1024, 2048, 4096, 8192})
            for (const int64_t rows : {1024, 4096, 16384})
                times.push_back(time_products(Device::cuda, chosen.fp8, rows, size, size));
        say("\n{}", time_table(times, chosen.fp8.recipe));
    }
    say("\n{}", projection_table());
}

}  // namespace train70b
