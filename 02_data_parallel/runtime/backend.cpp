#include "02_data_parallel/runtime/backend.h"

namespace train70b {

Tensor Backend::scratch(int64_t count, DType dtype, Device device, size_t number) {
    const size_t index = number * 8 + size_t(dtype);
    if (index >= scratch_.size()) scratch_.resize(index + 1);
    Tensor& buffer = scratch_[index];
    if (!buffer || buffer.size() < count || buffer.device() != device) {
        buffer = Tensor();  // first, so that both never exist at the same time
        buffer = Tensor({count}, dtype, device, Memory::comm);
    }
    return buffer;
}

}  // namespace train70b
