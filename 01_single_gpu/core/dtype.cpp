#include "01_single_gpu/core/dtype.h"

namespace train70b {

int64_t size_of(DType dtype) {
    constexpr uint8_t kSizes[] = {4, 2, 8, 1, 1, 1, 1, 4, 1};  // in the order of DType; of e2m1's bits four are used
    static_assert(sizeof kSizes == size_t(DType::u8) + 1, "a size for each");
    return kSizes[size_t(dtype)];
}

const char* name_of(DType dtype) {
    switch (dtype) {
        case DType::f32: return "fp32";
        case DType::bf16: return "bf16";
        case DType::f64: return "fp64";
        case DType::e4m3: return "e4m3";
        case DType::e5m2: return "e5m2";
        case DType::e2m1: return "e2m1";
        case DType::i8: return "i8";
        case DType::i32: return "i32";
        case DType::u8: return "u8";
    }
    return "?";
}

const char* name_of(Device device) {
    switch (device) {
        case Device::cpu: return "cpu";
        case Device::cuda: return "cuda";
        case Device::meta: return "meta";
    }
    return "?";
}

}  // namespace train70b
