#pragma once
// An op on the GPU beside the same on the CPU.
#include <cstring>
#include <map>

#include "01_single_gpu/complete/llama.h"
#include "01_single_gpu/complete/optimizer.h"
#include "tests/ops.h"

namespace train70b::test {

inline bool have_gpu() {
    if (why_no_cuda().empty()) return true;
    DOCTEST_MESSAGE("skipped: " << why_no_cuda());
    return false;
}

// Tests of attention are of the program's own kernels; 01_cuda_cudnn.cpp has those of cuDNN's.
inline const bool kOwnAttention = (attention_by = AttentionBy::own, true);

// For its lifetime `place` is `value`: Chosen<attention_by> own(AttentionBy::own).
template <auto& place>
struct Chosen {
    using Value = std::remove_reference_t<decltype(place)>;
    const Value before = place;
    explicit Chosen(Value value) { place = value; }
    ~Chosen() { place = before; }
};

constexpr DType kTypes[] = {DType::f32, DType::bf16};

// Results of the ops under test; the same call on both devices must agree within the rounding of the dtype. `what`: op
// and shape, for the message where one fails.
using Results = std::vector<Tensor>;
inline double norm(const std::vector<double>& x) { return std::sqrt(dot(x, x)); }

// Relative to the norm of each result, or to `least` where that is larger.
inline void expect_near(const std::string& what, DType dtype, const Results& cuda, const Results& cpu,
                        double fp32_bound, double least = 0) {
    REQUIRE(cpu.size() == cuda.size());
    for (size_t i = 0; i < cpu.size(); ++i) {
        INFO(what << ": result " << i << ", " << std::string(name_of(dtype)));
        // bf16: both round the same fp32 value, up to the last bit of bf16 where the values differ in fp32's last bits.
        std::vector<double> found = values(cuda[i]), expected = values(cpu[i]);
        for (size_t j = 0; j < expected.size(); ++j)  // the lse of a query that sees no key
            if (expected[j] == -INFINITY && found[j] == -INFINITY) expected[j] = found[j] = 0;
        const double size = norm(expected), scale = size > 0 && size < least ? size / least : 1;
        EXPECT(scale * distance(found, expected) <= (dtype == DType::f32 ? fp32_bound : 4e-3));
    }
}

// Bytes as they are: NaN equals NaN, -0 is not 0.
inline bool same_bits(const Tensor& a, const Tensor& b) {
    Tensor x(a.shape(), a.dtype(), Device::cpu), y(b.shape(), b.dtype(), Device::cpu);
    copy(x, a);
    copy(y, b);
    return x.bytes() == y.bytes() && std::memcmp(x.raw(), y.raw(), size_t(x.bytes())) == 0;
}
// Twice on the GPU: the same bits, whatever the order of blocks. `share`: in a slice, of so many runs one is repeated.
inline Results run_twice(const std::string& what, const std::function<Results(Device)>& op, int64_t share = 1) {
    static int64_t runs = 0;
    const Results once = op(Device::cuda);
    if (kSmall && runs++ % share != 0) return once;
    const Results again = op(Device::cuda);
    for (size_t i = 0; i < once.size(); ++i) {
        INFO(what << ": result " << i << " of a second run");
        EXPECT(same_bits(once[i], again[i]));
    }
    return once;
}

inline void compare(const std::string& what, DType dtype, const std::function<Results(Device)>& op,
                    double fp32_bound = 5e-6) {
    const Results cpu = op(Device::cpu);
    expect_near(what, dtype, run_twice(what, op), cpu, fp32_bound);
}

// An op and its gradient, which takes the op's results: compares the results, then the gradients that both devices
// compute from the CPU's results. From its own results each would compute other gradients: attention's takes
// sum(dout * out), a sum in which the rounding of out can be much of what is left. Where each query sees one key at
// most, dq and dk are 0 but for rounding: no gradient is held to less than a tenth of the largest one's norm, dv's.
inline void compare_with_gradient(const std::string& what, DType dtype, DType gradient_dtype,
                                  const std::function<Results(Device)>& op,
                                  const std::function<Results(Device, const Results&)>& gradient, double fp32_bound) {
    const Results cpu = op(Device::cpu);
    expect_near(what, dtype, run_twice(what, op, 5), cpu, fp32_bound);
    Results copies;
    for (const Tensor& x : cpu) copy(copies.emplace_back(x.shape(), x.dtype(), Device::cuda), x);
    const Results expected = gradient(Device::cpu, cpu);
    double largest = 0;
    for (const Tensor& x : expected) largest = std::max(largest, norm(values(x)));
    const Results found = run_twice(
        what + ", gradient", [&](Device device) { return gradient(device, copies); }, 5);
    expect_near(what + ", gradient", gradient_dtype, found, expected, fp32_bound, 0.1 * largest);
}

inline AdamWStep adamw_step(int64_t step) {
    return {.lr = 0.01, .beta1 = 0.9, .beta2 = 0.95, .eps = 1e-8, .weight_decay = 0.1, .grad_scale = 0.5, .step = step};
}

inline std::string ops(const std::string& names, const Shape& sizes) { return names + " " + to_string(sizes); }

// An array of the test, on one device.
struct Maker {
    Device device;
    DType dtype;
    Tensor random(Shape shape, uint64_t key, double size = 1) const {
        int64_t count = 1;
        for (int64_t dim : shape) count *= dim;
        std::vector<double> numbers = randoms(count, key);
        for (double& x : numbers) x *= size;
        return tensor(numbers, std::move(shape), dtype, device);
    }
    Tensor empty(Shape shape) const { return Tensor(std::move(shape), dtype, device); }
    Tensor floats(Shape shape) const { return Tensor(std::move(shape), DType::f32, device); }
    Tensor zeros(Shape shape, DType type = DType::f32) const {
        Tensor x(std::move(shape), type, device);
        fill(x, 0);
        return x;
    }
    Tensor ids(int64_t count, int64_t below, uint64_t key) const {
        std::vector<int32_t> list(count);
        for (int64_t i = 0; i < count; ++i) list[i] = int32_t(random_bits(key, i) % uint64_t(below));
        return upload(list, {count}, device);
    }
};

// Rows and columns: whole packs, remainders, one, and rows that are not 16-byte aligned; a block walks along a row in
// passes of 2,048 columns, and a real model's rows are wider. In a slice, one of the three long ones.
const std::vector<std::array<int64_t, 2>> kSizes = [] {
    std::vector<std::array<int64_t, 2>> list = {{4, 64}, {7, 40}, {5, 19}, {1, 1}, {2, 2056}};
    const std::array<int64_t, 2> large[] = {{3, 4104}, {2, 6152}, {300, 136}};
    for (int64_t turn = 0; turn < 8; ++turn)
        if (const auto& size = large[turn % 3]; in_gpu_slice(turn) && std::count(list.begin(), list.end(), size) == 0)
            list.push_back(size);
    return list;
}();

}  // namespace train70b::test
