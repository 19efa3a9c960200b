#pragma once
// What the fronts of the ops share: from tensors to their device's kernel. Included by the files that dispatch only.
#include <functional>
#include <initializer_list>

#include "01_single_gpu/core/profile.h"
#include "01_single_gpu/core/tensor.h"

// RUN(device, kernel(arguments)): calls it in namespace cpu or cuda, and nothing for meta tensors.
#if TRAIN70B_CUDA
#define CUDA_CASE(call) \
    case Device::cuda:  \
        cuda::call;     \
        break;
#else
#define CUDA_CASE(call) \
    case Device::cuda:  \
        break;
#endif

#define RUN(device, call)         \
    switch (device) {             \
        case Device::meta: break; \
        case Device::cpu:         \
            cpu::call;            \
            break;                \
            CUDA_CASE(call)       \
    }

namespace train70b {

using List = std::initializer_list<std::reference_wrapper<const Tensor>>;

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

}  // namespace train70b
