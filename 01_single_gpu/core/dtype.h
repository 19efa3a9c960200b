#pragma once
// Element types and devices.
#include <cstdint>

namespace train70b {

enum class DType : uint8_t { f32, bf16, f64, e4m3, e5m2, e2m1, i8, i32, u8 };  // u8: codes (chapter 07)
enum class Device : uint8_t {
    cpu,
    cuda,
    meta  // for dry runs: shapes only. Bytes are booked, nothing is allocated, and ops only check shapes
};

int64_t size_of(DType dtype);  // bytes
// The dtype of statistics of tensors of `dtype`: 1/rms, lse, softmax sums, the loss, AdamW's moments, accumulators.
inline DType stats_dtype(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }
const char* name_of(DType dtype);
const char* name_of(Device device);

}  // namespace train70b
