#pragma once
// Shared by the public functions of the ops, which check shapes, dtypes and devices and then call the implementation of
// one device. Included by their .cpp files only; CMakeLists.txt lists those, because TRAIN70B_CUDA is 0 or 1 there.
#include <functional>
#include <initializer_list>

#include "01_single_gpu/core/cuda_device.h"
#include "01_single_gpu/core/profile.h"

// DISPATCH(device, rmsnorm(y, x)) calls cpu::rmsnorm(y, x) or cuda::rmsnorm(y, x). On the meta device it calls neither:
// an op only checks its arguments.
#if TRAIN70B_CUDA
#define DISPATCH_CUDA(call) cuda::call
#else  // allocate() has already refused the tensor with a usage error
#define DISPATCH_CUDA(call) CHECK(false, "{}", why_no_cuda())
#endif

#define DISPATCH(device, call)                         \
    switch (device) {                                  \
        case Device::meta: break;                      \
        case Device::cpu: cpu::call; break;            \
        case Device::cuda: DISPATCH_CUDA(call); break; \
    }

namespace train70b {

using List = std::initializer_list<std::reference_wrapper<const Tensor>>;

// The device of all these tensors (CHECKed).
inline Device device_of(List tensors) {
    const Device device = tensors.begin()->get().device();
    for (const Tensor& tensor : tensors)
        CHECK(tensor.device() == device, "tensors on {} and {}", name_of(device), name_of(tensor.device()));
    return device;
}

inline double bytes_of(List tensors) {
    double bytes = 0;
    for (const Tensor& tensor : tensors) bytes += tensor.bytes();
    return bytes;
}

inline bool is_float(DType dtype) { return dtype == DType::f32 || dtype == DType::bf16 || dtype == DType::f64; }

inline void expect(const char* name, const Tensor& tensor, const Shape& shape, DType dtype) {
    CHECK(tensor.shape() == shape && tensor.dtype() == dtype, "{} is {} {}, expected {} {}", name,
          name_of(tensor.dtype()), to_string(tensor.shape()), name_of(dtype), to_string(shape));
}

// Activations may have any shape with these rows and columns: (B*T, E) or (B, T, E).
inline void expect_rows(const char* name, const Tensor& tensor, int64_t rows, int64_t cols, DType dtype) {
    CHECK(tensor.rows() == rows && tensor.cols() == cols && tensor.dtype() == dtype,
          "{} is {} {}, expected {} rows of {} {}", name, name_of(tensor.dtype()), to_string(tensor.shape()), rows,
          cols, name_of(dtype));
}

}  // namespace train70b
