#include "02_data_parallel/runtime/transport.h"

namespace train70b {

Tensor Transport::scratch(int64_t count, DType dtype, Device device, size_t number) {
    const size_t place = number * 8 + size_t(dtype);
    if (place >= scratch_.size()) scratch_.resize(place + 1);
    Tensor& buffer = scratch_[place];
    if (!buffer || buffer.size() < count || buffer.device() != device) {
        synchronize();
        buffer = Tensor();
        buffer = Tensor({count}, dtype, device, Memory::comm);
    }
    return buffer;
}

}  // namespace train70b
