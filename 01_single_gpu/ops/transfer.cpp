#include "01_single_gpu/ops/transfer.h"

#include "01_single_gpu/ops/elementwise.h"

namespace train70b {

std::vector<double> read(const Tensor& x) {
    if (x.device() == Device::meta) return std::vector<double>(x.size(), 1.0);
    const Tensor here = converted(x, x.dtype(), Device::cpu);
    if (x.dtype() == DType::i32) return std::vector<double>(here.data<int32_t>(), here.data<int32_t>() + x.size());
    Tensor stats({x.size()}, DType::f64, Device::cpu, Memory::workspace);
    copy(stats, here);
    return std::vector<double>(stats.data<double>(), stats.data<double>() + stats.size());
}

Tensor upload(const std::vector<int32_t>& values, Shape shape, Device device, Memory kind) {
    Tensor tensor(std::move(shape), DType::i32, device, kind);
    CHECK(tensor.size() == int64_t(values.size()), "{} values for {}", values.size(), to_string(tensor.shape()));
    if (device == Device::cpu) std::copy(values.begin(), values.end(), tensor.data<int32_t>());
#if TRAIN70B_CUDA
    if (device == Device::cuda) cuda_upload(tensor.raw(), values.data(), tensor.bytes());
#endif
    return tensor;
}

Tensor upload(const std::vector<double>& values, Shape shape, DType dtype, Device device, Memory kind) {
    Tensor tensor(std::move(shape), dtype, device, kind);
    CHECK(tensor.size() == int64_t(values.size()), "{} values for {}", values.size(), to_string(tensor.shape()));
    if (device == Device::meta) return tensor;
    Tensor host(tensor.shape(), DType::f64, Device::cpu, Memory::workspace);
    std::copy(values.begin(), values.end(), host.data<double>());
    copy(tensor, host);
    return tensor;
}

Tensor converted(const Tensor& x, DType dtype, Device device) {
    if (x.dtype() == dtype && x.device() == device) return x;
    Tensor y(x.shape(), dtype, device, Memory::workspace);
    copy(y, x);
    return y;
}

void synchronize([[maybe_unused]] Device device) {
#if TRAIN70B_CUDA
    if (device == Device::cuda) cuda_synchronize();
#endif
}

}  // namespace train70b
