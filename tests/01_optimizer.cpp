// Learning-rate schedules, peak rates, what AdamW keeps, initial values.
#include "01_single_gpu/core/profile.h"
#include "01_single_gpu/core/registry.h"
#include "tests/training.h"

using namespace train70b;
using namespace train70b::test;

TEST_CASE("learning rate: warm-up, then each shape at known places; no or nothing but a warm-up") {
    const auto at = [](const std::string& shape, double step, double warmup = 10, double steps = 110) {
        return LrSchedule{2.0, 0.5, warmup, steps, shape}.at(step);
    };
    for (const std::string& shape : names_of(lr_shapes())) {
        INFO(shape);
        for (int64_t s = 1; s <= 10; ++s) EXPECT(at(shape, s) == 2.0 * double(s) / 10.0);
        for (int64_t s = 11; s <= 110; ++s) EXPECT(at(shape, s) <= at(shape, s - 1));
        EXPECT(at(shape, 110) == (shape == "constant" ? 2.0 : 0.5));
        EXPECT(at(shape, 10, 25, 10) == 0.8);  // the run ends before the warm-up does
        EXPECT(at(shape, 10, 10, 10) == 2.0);
        for (int64_t steps : {1, 10})
            for (int64_t s = 1; s <= steps; ++s)
                EXPECT((at(shape, s, 0, steps) >= 0.5 && at(shape, s, 0, steps) <= 2.0));
    }
    EXPECT(at("linear", 60) == 1.25);  // half of the way
    EXPECT(at("linear", 35) == 1.625);
    EXPECT(at("linear", 1, 0, 10) == 1.85);
    EXPECT(at("cosine", 60) == doctest::Approx(1.25).epsilon(1e-12));
    EXPECT(at("cosine", 35) == doctest::Approx(0.5 + 0.75 * (1 + std::sqrt(0.5))).epsilon(1e-12));
    EXPECT(at("wsd", 88) == 2.0);   // the last fifth of 110 steps begins here
    EXPECT(at("wsd", 99) == 1.25);  // and this is its middle
    EXPECT_USAGE_ERROR(lr_shape("cosin"), "--lr-schedule cosin: unknown; must be one of constant linear cosine wsd");
}

TEST_CASE("peak rates: by the device's whole name and the dtype; what is not in the table is not known") {
    const auto tflops = [](const char* name, DType dtype) {
        return std::lround(peak_flops_of(name, dtype).value_or(0) / 1e11);  // tenths of a TFLOP/s
    };
    EXPECT(tflops("NVIDIA H200", DType::bf16) == 9890);
    EXPECT(tflops("NVIDIA H200", DType::f32) == 670);
    EXPECT(tflops("NVIDIA H200 NVL", DType::bf16) == 8350);
    EXPECT(tflops("NVIDIA H200 NVL", DType::f32) == 600);
    EXPECT(tflops("NVIDIA H100 80GB HBM3", DType::bf16) == 9890);
    EXPECT(tflops("NVIDIA H100 PCIe", DType::bf16) == 7560);
    EXPECT(tflops("NVIDIA B200", DType::bf16) == 22500);
    EXPECT(tflops("NVIDIA GB200", DType::bf16) == 25000);
    EXPECT(tflops("NVIDIA A100 80GB PCIe", DType::f32) == 195);
    for (const char* name : {"", "H200", "NVIDIA H200 MIG 1g.18gb", "NVIDIA H20", "NVIDIA H2000", "NVIDIA GB2000",
                             "NVIDIA A1000", "nvidia h200", "AMD EPYC"})
        for (const DType dtype : {DType::bf16, DType::f32}) {
            EXPECT(!peak_flops_of(name, dtype));
            EXPECT(mfu_text_of(name, dtype).empty());
        }
    EXPECT(!peak_flops_of("NVIDIA H200", DType::e4m3));  // FP8 runs are measured against the bf16 peak
    EXPECT(!peak_flops(Device::cpu, DType::bf16));
    EXPECT(mfu_text(Device::cpu, DType::bf16).empty());
    const std::string text = mfu_text_of("NVIDIA A100-SXM4-80GB", DType::f32);
    for (const char* part : {"6 per parameter", "6 L H D T", "19.5 TFLOP/s", "fp32", "NVIDIA A100-SXM4-80GB"})
        EXPECT(text.find(part) != std::string::npos);
}

TEST_CASE("AdamW: states of 8 bytes per fp32 element, 12 per bf16, 16 per fp64; weight decay touches matrices only") {
    for (DType dtype : {DType::f32, DType::bf16, DType::f64}) {
        Param matrix = make_param("matrix", {5, 7}, 1), vector = make_param("vector", {9}, 1);
        const std::vector<Param*> params = {&matrix, &vector};
        bind_data(params, tensor(randoms(44, 1), {44}, dtype));
        bind_grads(params, tensor(std::vector<double>(44), {44}, stats_dtype(dtype)));
        std::vector<double> shrunk = values(matrix.data);
        const std::vector<double> vector_before = values(vector.data);
        const MemoryBytes before = ledger().now();
        {
            AdamW adamw(full_segments(params), {.weight_decay = 0.5});
            for (int step = 1; step <= 3; ++step) adamw.update(step, 0.25, 1);
            MemoryBytes expected = before;
            expected[static_cast<int>(Memory::optimizer)] += 44 * (dtype == DType::f32    ? 8
                                                                   : dtype == DType::bf16 ? 12
                                                                                          : 16);
            EXPECT(ledger().now() == expected);
        }
        EXPECT(ledger().now() == before);
        for (double& value : shrunk) value *= 0.875 * 0.875 * 0.875;  // (1 - lr * weight_decay) each step
        EXPECT(distance(matrix.data, shrunk) <= (dtype == DType::f32 ? 1e-6 : dtype == DType::bf16 ? 4e-3 : 1e-15));
        EXPECT(values(vector.data) == vector_before);
    }
}

TEST_CASE("AdamW: a parameter's lr_scale multiplies the update, not the weight decay; at 1 it is not there") {
    for (DType dtype : {DType::f32, DType::bf16, DType::f64}) {
        const auto run = [&](double lr_scale, double lr, double weight_decay, double gradient) {
            Param matrix = make_param("matrix", {5, 7}, 1);
            matrix.lr_scale = lr_scale;
            bind_data({&matrix}, tensor(randoms(35, 1), {35}, dtype));
            std::vector<double> grad = randoms(35, 2);
            for (double& g : grad) g *= gradient;
            bind_grads({&matrix}, tensor(grad, {35}, stats_dtype(dtype)));
            AdamW adamw(full_segments({&matrix}), {.weight_decay = weight_decay});
            for (int step = 1; step <= 3; ++step) adamw.update(step, lr, 1);
            return values(matrix.data);
        };
        const double bound = dtype == DType::f32 ? 1e-6 : dtype == DType::bf16 ? 4e-3 : 1e-14;
        EXPECT(run(0.125, 0.5, 0, 1) == run(1, 0.0625, 0, 1));  // powers of two: not a bit is lost
        EXPECT(distance(run(0.3, 0.5, 0, 1), run(1, 0.15, 0, 1)) <= bound);
        EXPECT(run(0.125, 0.5, 0.25, 0) == run(1, 0.5, 0.25, 0));  // a gradient of 0: only the decay is left
        EXPECT(distance(run(0.3, 0.5, 0.25, 0), run(1, 0.5, 0.25, 0)) <= bound);
        EXPECT(distance(run(0.125, 0.5, 0.25, 1), run(1, 0.5, 0.25, 1)) > 0.01);
    }
}

TEST_CASE("weight decay: of matrices only, not of biases and norms") {
    std::vector<Param> params;
    for (const char* name : {"model.layers.0.self_attn.q_proj.bias", "model.layers.0.self_attn.k_norm.weight",
                             "model.layers.0.input_layernorm.weight", "model.norm.weight"})
        params.push_back(make_param(name, {6}, 0));
    params[0].init_value = 0;  // as the model has it
    params.push_back(make_param("model.layers.0.self_attn.q_proj.weight", {2, 3}, 1));
    std::vector<Param*> list;
    for (Param& param : params) list.push_back(&param);
    const int64_t size = total_size(list);
    const std::vector<double> before = randoms(size, 3);
    bind_data(list, tensor(before, {size}, DType::f64));
    bind_grads(list, tensor(std::vector<double>(size_t(size), 0.0), {size}, DType::f64));
    AdamW(full_segments(list), {.weight_decay = 0.5}).update(1, 0.5, 1);
    for (size_t i = 0; i < params.size(); ++i) {
        std::vector<double> expected(before.begin() + 6 * int64_t(i), before.begin() + 6 * int64_t(i) + 6);
        if (params[i].is_matrix())
            for (double& x : expected) x *= 0.75;
        INFO(params[i].name);
        EXPECT(values(params[i].data) == expected);
    }
}

TEST_CASE("initial values: a shard of any place holds its slice of the whole, to the last bit") {
    Param whole = make_param("model.layers.3.mlp.up_proj.weight", {37, 23}, 0.5);
    const auto initial = [](const Param& param, uint64_t seed, int64_t offset, Shape shape, DType dtype = DType::f32) {
        Tensor x(std::move(shape), dtype, Device::cpu);
        initialize(param, seed, offset, x);
        return values(x);
    };
    const std::vector<double> all = initial(whole, 7, 0, {37, 23});
    Param part = whole;
    part.local = {.row_begin = 5, .rows = 11, .col_begin = 3, .cols = 7};
    std::vector<double> slice;
    for (int64_t row = 5; row < 16; ++row)
        for (int64_t col = 3; col < 10; ++col) slice.push_back(all[row * 23 + col]);
    EXPECT(initial(part, 7, 0, {11, 7}) == slice);
    EXPECT(initial(part, 7, 20, {31}) == std::vector<double>(slice.begin() + 20, slice.begin() + 51));
    EXPECT(initial(whole, 7, 800, {51}) == std::vector<double>(all.begin() + 800, all.end()));
    EXPECT(initial(part, 7, 0, {11, 7}, DType::bf16) == values(tensor(slice, {11, 7}, DType::bf16)));
    EXPECT(initial(part, 7, 0, {11, 7}, DType::f64) == slice);  // fp64 begins where fp32 does
    Tensor too_long({78}, DType::f32, Device::cpu);
    EXPECT_CHECK_FAILS(initialize(part, 7, 0, too_long));
    EXPECT(initial(make_param("norm", {4}, 0), 7, 0, {4}) == std::vector<double>(4, 1.0));
}

TEST_CASE("initial values: rows beyond the parameter's end are 0, whatever stretch of them is asked for") {
    Param param = make_param("w", {10, 3}, 0.5);
    Tensor whole({10, 3}, DType::f32, Device::cpu);
    initialize(param, 7, 0, whole);
    for (const int64_t row_begin : {8, 12}) {  // the second lies beyond the end with all of its rows
        param.local = {.row_begin = row_begin, .rows = 4, .cols = 3};
        const int64_t real = row_begin == 8 ? 6 : 0;
        EXPECT(param.real().size() == real);
        for (int64_t offset = 0; offset < 12; ++offset)
            for (int64_t count = 1; offset + count <= 12; ++count) {
                Tensor part({count}, DType::f32, Device::cpu);
                initialize(param, 7, offset, part);
                for (int64_t i = 0; i < count; ++i)
                    EXPECT(values(part)[i] == (offset + i < real ? values(whole)[24 + offset + i] : 0));
            }
    }
}

TEST_CASE("initial values: normal, and of its own for every name and seed") {
    constexpr int64_t n = 200000;
    std::vector<std::vector<double>> draws;
    for (const char* name : {"a.weight", "b.weight"})
        for (uint64_t seed : {1, 2}) {
            Tensor x({400, 500}, DType::f32, Device::cpu);
            initialize(make_param(name, {400, 500}, 0.25), seed, 0, x);
            std::vector<double>& z = draws.emplace_back(values(x));
            for (double& value : z) value /= 0.25;
            const auto moment = [&z](int power) {
                double sum = 0;
                for (double value : z) sum += std::pow(value, power);
                return sum / n;
            };
            // Within five standard deviations of each: sqrt(1, 2, 15, 96 over n).
            EXPECT(std::abs(moment(1)) <= 0.0112);
            EXPECT(std::abs(moment(2) - 1) <= 0.0159);
            EXPECT(std::abs(moment(3)) <= 0.0434);
            EXPECT(std::abs(moment(4) - 3) <= 0.110);
        }
    for (size_t i = 0; i < draws.size(); ++i)
        for (size_t j = 0; j < i; ++j) EXPECT(std::abs(dot(draws[i], draws[j]) / n) <= 0.0112);
}
