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
// The same of any float dtype, on the host rounded to it.
Tensor upload(const std::vector<double>& values, Shape shape, DType dtype, Device device, Memory kind);

// x in this dtype and on this device: x itself if it is that, else a copy, booked as workspace.
Tensor converted(const Tensor& x, DType dtype, Device device);

void synchronize(Device device);  // waits until everything issued to the device so far is done

}  // namespace train70b
