#pragma once
// The kernels of each device, as quantize.cpp and adamw8bit.cpp call them once shapes and devices have been checked.
#include "07_fp8/adamw8bit.h"
#include "07_fp8/quantize.h"

namespace train70b::cpu {
#include "07_fp8/kernels.inc"
}
namespace train70b::cuda {
#include "07_fp8/kernels.inc"
}
