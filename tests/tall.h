#pragma once
// Ops on tensors of more than 2^31 elements: what differs from zero are the last rows, and they must come out as from
// an op on those rows alone. On the emulated GPU with EMULATE_TAIL (tests/emulate/README.md), elsewhere with enough
// memory.
#include <sys/mman.h>

#include "tests/cuda_ops.h"

namespace train70b::test {

constexpr int64_t kTall = (int64_t(1) << 31) + 1, kLastRows = 3;
// Multiples of rows such that the last blocks have the last rows: where 264 or 64 blocks take each so-manieth row, and
// for rows of 256 elements where 1,024 blocks take each so-manieth 2,048 elements.
constexpr int64_t kBlocks = 2112, kSquares = 8192;

#if TRAIN70B_CUDA
inline double memory() { return double(cuda_info().memory); }
#else
inline double memory() { return 0; }
#endif

// Whether tensors of this size can be had here; says why not.
inline bool have_tall() {
    if (!have_gpu()) return false;
    std::string why;
    if (kEmulated && !std::getenv("EMULATE_TAIL"))
        why = "EMULATE_TAIL is not set";
    else if (kEmulated) {
        const size_t arena = size_t(512) << 30;
        void* p = mmap(nullptr, arena, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (p == MAP_FAILED)
            why = "the system refuses 512 GiB of address space";
        else
            munmap(p, arena);
    } else if (memory() < 70e9) {
        why = describe("a GPU of {:.0f} GB", memory() / 1e9);
    }
    if (why.empty()) return true;
    DOCTEST_MESSAGE("skipped: tensors beyond 2^31 elements: " << why);
    return false;
}

// Arrays of `rows` rows, whose last kLastRows rows hold random numbers and whose others hold zeros.
struct Tall {
    int64_t rows;
    DType dtype;

    Tensor last(Tensor whole, int64_t count = kLastRows) const {
        const int64_t cols = whole.size() / rows;
        return whole.element_slice((rows - count) * cols, {count, cols});
    }
    Tensor zeros(int64_t cols, DType type) const {
        Tensor x({rows, cols}, type, Device::cuda);
        fill(x, 0);
        return x;
    }
    Tensor empty(int64_t cols) const { return zeros(cols, dtype); }
    Tensor floats(int64_t cols) const { return zeros(cols, DType::f32); }
    Tensor column() const {  // a number for each row
        Tensor x({rows}, DType::f32, Device::cuda);
        fill(x, 0);
        return x;
    }
    Tensor random(int64_t cols, uint64_t key, DType type) const {
        Tensor x = zeros(cols, type), part = last(x);
        copy(part, tensor(randoms(kLastRows * cols, key), {kLastRows, cols}, type));
        return x;
    }
    Tensor random(int64_t cols, uint64_t key) const { return random(cols, key, dtype); }
    Tensor ids(const std::vector<int32_t>& last_ids, int32_t others) const {
        Tensor x({rows}, DType::i32, Device::cuda);
        fill(x, others);
        Tensor part = x.element_slice(rows - kLastRows, {kLastRows});
        copy(part, upload(last_ids, {kLastRows}, Device::cpu));
        return x;
    }
};

// `width`: columns of the widest array, of which `rows` x width are more than 2^31 elements. Results that have a row
// for each row: the last ones; others (sums over rows) whole.
inline void compare_tall(const std::string& what, DType dtype, int64_t width,
                         const std::function<Results(const Tall&)>& op, int64_t multiple = kBlocks) {
    const int64_t rows = (kTall / width / multiple + 1) * multiple;
    const auto ends = [&](const Tall& shape) {
        Results results = op(shape), found;
        for (const Tensor& x : results) found.push_back(x.shape()[0] == shape.rows ? shape.last(x) : x);
        Results copies;
        for (const Tensor& x : found) copy(copies.emplace_back(x.shape(), x.dtype(), Device::cpu), x);
        return copies;
    };
    const Results small = ends({kLastRows, dtype}), large = ends({rows, dtype});
    expect_near(what + ", " + std::to_string(rows) + " rows", dtype, large, small, 1e-6);
}

}  // namespace train70b::test
