#pragma once
// Between the host and a device; copy() in elementwise.h crosses devices as well.
#include <cstdint>
#include <vector>

#include "01_single_gpu/core/cuda_device.h"
#include "01_single_gpu/core/tensor.h"

namespace train70b {

std::vector<double> read(const Tensor& x);  // all floats or i32, on the host, exactly; of a meta tensor: ones

// An i32 tensor of this shape with these values, booked as `kind`.
Tensor upload(const std::vector<int32_t>& values, Shape shape, Device device, Memory kind = Memory::activations);

void synchronize(Device device);  // waits until everything issued to the device so far is done

}  // namespace train70b
