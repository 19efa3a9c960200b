#include "02_data_parallel/runtime/backend.h"

namespace train70b {

RequestPtr Backend::all_to_all(const Tensor& to, const Tensor& from) {
    const int64_t part = from.size() / size();
    std::vector<Tensor> in, out;
    for (int peer = 0; peer < size(); ++peer) {
        in.push_back(to.element_slice(peer * part, {part}));
        out.push_back(from.element_slice(peer * part, {part}));
    }
    return all_to_all_v(in, out);
}

RequestPtr Backend::all_to_all_v(const std::vector<Tensor>& to, const std::vector<Tensor>& from) {
    std::vector<RequestPtr> messages;
    for (int peer = 0; peer < size(); ++peer)
        messages.push_back(exchange(from[size_t(peer)], peer, to[size_t(peer)], peer));
    for (const RequestPtr& message : messages)
        if (message) message->wait();
    return nullptr;
}

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
