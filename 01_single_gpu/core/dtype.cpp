#include "01_single_gpu/core/dtype.h"

#include <iterator>

namespace train70b {

namespace {
constexpr struct {
    int64_t bytes;
    const char* name;
} kElements[] = {
    {4, "fp32"}, {2, "bf16"}, {8, "fp64"}, {1, "e4m3"}, {1, "e5m2"},
    {1, "e2m1"}, {1, "i8"},   {4, "i32"},  {1, "u8"}};  // in the order of DType; of e2m1's bits four are used
static_assert(std::size(kElements) == size_t(DType::u8) + 1, "one for each");
}  // namespace

int64_t size_of(DType dtype) { return kElements[size_t(dtype)].bytes; }
const char* name_of(DType dtype) { return kElements[size_t(dtype)].name; }
const char* name_of(Device device) {
    constexpr const char* kNames[] = {"cpu", "cuda", "meta"};  // in the order of Device
    static_assert(std::size(kNames) == size_t(Device::meta) + 1, "one for each");
    return kNames[size_t(device)];
}

}  // namespace train70b
