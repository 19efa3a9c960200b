// What kernels call: mathematical functions, whose last bits are off as on a GPU, and the PTX of tensor cores.
#include <cmath>
#include <cstring>
#include <vector>

#include "internal.h"

namespace emulate {

// ---- mathematical functions ----

namespace {

enum class Ulp { none, up, down, random };
const auto kUlp = Ulp(choice("EMULATE_ULP", {"none", "up", "down", "random"}));

template <class Bits, class Real>
Real moved(Real exact, int most) {
    if (kUlp == Ulp::none || !std::isfinite(exact) || exact == 0) return exact;
    const int by = kUlp == Ulp::up ? most : kUlp == Ulp::down ? -most : int(random() % uint64_t(2 * most + 1)) - most;
    return __builtin_bit_cast(Real, Bits(__builtin_bit_cast(Bits, exact) + Bits(by)));  // away from zero, or towards it
}

}  // namespace

float off(float exact, int most) { return moved<uint32_t>(exact, most); }
double off(double exact, int most) { return moved<uint64_t>(exact, most); }

// ---- PTX ----

void ex2_approx_ftz(float& y, float x, Where) {
    y = off(std::exp2(std::fpclassify(x) == FP_SUBNORMAL ? 0.0f : x), 2);
    if (std::fpclassify(y) == FP_SUBNORMAL) y = 0;
}

namespace {
struct Copy {
    uint32_t to;
    const void *from, *code;
    int bytes, size;
};
std::vector<Copy>* const on_the_way = new std::vector<Copy>[1024];  // of each thread of the block
}  // namespace

void cp_async(int bytes, uint32_t to, const void* from, int size, Where where) {
    const Unchecked scope;
    if (size < 0 || size > bytes) fault("cp.async in " + to_string(where) + " of more bytes than its number");
    const void* code = __builtin_return_address(0);
    if (size > 0) check_access(from, size_t(bytes), Kind::read, code);
    check_access(shared_memory + to, size_t(bytes), Kind::write, code);
    await_copy(to, size_t(bytes), false);
    on_the_way[now.thread].push_back({to, from, code, bytes, size});
}

void cp_async_wait_all(Where) {
    const Unchecked scope;
    counting = false;  // they were when they were issued
    for (const Copy& copy : on_the_way[now.thread]) {
        await_copy(copy.to, size_t(copy.bytes), true);
        check_access(shared_memory + copy.to, size_t(copy.bytes), Kind::write, copy.code);
        std::memset(shared_memory + copy.to, 0, size_t(copy.bytes));
        std::memcpy(shared_memory + copy.to, copy.from, size_t(copy.size));
    }
    on_the_way[now.thread].clear();
    counting = kStats;
}

void thread_ends() {
    if (!on_the_way[now.thread].empty())
        fault("a thread ends and has not waited for its copy: " + line_of(on_the_way[now.thread][0].code));
}

uint32_t shared_address(const void* p, Where where) {
    const Unchecked scope;
    const auto offset = static_cast<const char*>(p) - shared_memory;
    if (offset < 0 || size_t(offset) >= kSharedArena) fault("not an address of shared memory: " + to_string(where));
    return uint32_t(offset);
}

void ldmatrix_x4(bool transposed, uint32_t& r0, uint32_t& r1, uint32_t& r2, uint32_t& r3, uint32_t address,
                 Where where) {
    const Unchecked scope;
    if (address % 16 != 0) fault("ldmatrix in " + to_string(where) + ": rows must be aligned to 16 bytes");
    check_access(shared_memory + address, 16, Kind::read, __builtin_return_address(0));
    const char* rows =
        warp_exchange(~0u, shared_memory + address, 16, transposed ? "ldmatrix.trans" : "ldmatrix", where);
    uint32_t* const result[4] = {&r0, &r1, &r2, &r3};
    for (int i = 0; i < 4; ++i) {  // lanes 8 i to 8 i + 7 gave the rows of matrix i
        uint16_t pair[2];
        for (int j = 0; j < 2; ++j) {
            const int along = 2 * (lane() % 4) + j, across = lane() / 4;
            const int row = transposed ? along : across, column = transposed ? across : along;
            std::memcpy(&pair[j], rows + 64 * (8 * i + row) + 2 * column, 2);
        }
        std::memcpy(result[i], pair, 4);
    }
}

// The fragments are those of the PTX ISA's section on mma.m16n8k16 with bf16, with g = lane / 4 and t = lane % 4.
void mma_m16n8k16_bf16(float& c0, float& c1, float& c2, float& c3, uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                       uint32_t b0, uint32_t b1, Where where) {
    const uint32_t mine[6] = {a0, a1, a2, a3, b0, b1};
    const char* given = warp_exchange(~0u, mine, sizeof mine, "mma", where);
    const auto bf16 = [given](int lane, int word, int half) {
        uint16_t bits;
        std::memcpy(&bits, given + 64 * lane + 4 * word + 2 * half, 2);
        return __builtin_bit_cast(float, uint32_t(bits) << 16);
    };
    const int g = lane() / 4, t = lane() % 4;
    float* const c[4] = {&c0, &c1, &c2, &c3};
    for (int i = 0; i < 4; ++i) {
        const int row = g + 8 * (i / 2), column = 2 * t + i % 2;
        float sum = 0;
        for (int k = 0; k < 16; ++k)
            sum += bf16(row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k % 2) *
                   bf16(column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
        *c[i] += sum;
    }
}

}  // namespace emulate
