#pragma once
// The kernels of each device, as ops.cpp calls them once shapes, dtypes and devices have been checked.
#include "01_single_gpu/ops.h"

namespace train70b::cpu {
#include "01_single_gpu/kernels.inc"
}
namespace train70b::cuda {
#include "01_single_gpu/kernels.inc"
}
