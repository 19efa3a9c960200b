#include "01_single_gpu/core/tensor.h"

#include <cstdlib>
#include <cstring>
#include <new>

#include "01_single_gpu/core/cuda_device.h"
#include "01_single_gpu/core/platform/platform.h"

namespace train70b {

std::string to_string(const Shape& shape) {
    std::string text = "(";
    for (size_t i = 0; i < shape.size(); ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
    return text + ")";
}

namespace {
int64_t elements(const Shape& shape) {
    int64_t count = 1;
    for (int64_t dim : shape) {
        CHECK(dim >= 0, "shape {}", to_string(shape));
        CHECK(!__builtin_mul_overflow(count, dim, &count), "{} has more than 2^63 - 1 elements", to_string(shape));
    }
    return count;
}

// Without CUDA, an allocation on Device::cuda is a usage error.
std::shared_ptr<void> allocate(Device device, Memory kind, int64_t bytes) {
    if (device == Device::meta) return nullptr;
    if (kind == Memory::disk) return allocate_on_disk(bytes);
#if TRAIN70B_CUDA
    if (device == Device::cuda) return {cuda_allocate(bytes), cuda_release};
    // Pinned, for copies at full speed.
    if (kind == Memory::host && why_no_cuda().empty()) return {cuda_allocate_host(bytes), cuda_release_host};
#endif
    if (device == Device::cuda) usage_error("--device cuda: {} (try --device cpu)", why_no_cuda());
    platform::keep_freed_memory();
    constexpr int64_t kAlignment = 64;  // a cache line, and the widest vector register
    void* pointer = std::aligned_alloc(kAlignment, (bytes + kAlignment) / kAlignment * kAlignment);
    if (!pointer) throw std::bad_alloc();
#ifdef TRAIN70B_POISON
    std::memset(pointer, 0xff, bytes);  // NaN in every float format: makes reads of uninitialized memory visible
#endif
    return {pointer, std::free};
}
}  // namespace

struct Tensor::Storage {
    const std::shared_ptr<void> pointer;
    const int64_t bytes;
    const Device device;
    const Memory kind;

    Storage(int64_t bytes, Device device, Memory kind)
        : pointer(allocate(device, kind, bytes)), bytes(bytes), device(device), kind(kind) {
        ledger().book(kind, bytes);
    }
    ~Storage() { ledger().book(kind, -bytes); }
    Storage(const Storage&) = delete;
};

Tensor::Tensor(Shape shape, DType dtype, Device device, Memory kind)
    : size_(elements(shape)), shape_(std::move(shape)), dtype_(dtype) {
    int64_t bytes = 0;
    CHECK(!__builtin_mul_overflow(size_, size_of(dtype), &bytes), "{} of {} has more than 2^63 - 1 bytes",
          to_string(shape_), name_of(dtype));
    CHECK(kind < Memory::host || device != Device::cuda, "{} cannot be on {}", kMemoryNames[int(kind)],
          name_of(device));
    storage_ = std::make_shared<Storage>(bytes, device, kind);
}

Device Tensor::device() const {
    CHECK(storage_, "an empty tensor has no device");
    return storage_->device;
}

Memory Tensor::kind() const {
    CHECK(storage_, "an empty tensor has no kind");
    return storage_->kind;
}

bool Tensor::overlaps(const Tensor& other) const {
    return same_memory(other) && size_ > 0 && other.size_ > 0 && offset_ < other.offset_ + other.bytes() &&
           other.offset_ < offset_ + bytes();
}

void* Tensor::raw() const {
    CHECK(storage_ && storage_->device != Device::meta, "this tensor of shape {} has no data", to_string(shape_));
    return static_cast<char*>(storage_->pointer.get()) + offset_;
}

Tensor Tensor::view(Shape shape) const {
    CHECK(elements(shape) == size_, "view of {} as {}", to_string(shape_), to_string(shape));
    return element_slice(0, std::move(shape));
}

Tensor Tensor::row_slice(int64_t begin, int64_t end) const {
    CHECK(!shape_.empty() && 0 <= begin && begin <= end && end <= shape_[0], "rows [{}, {}) of {}", begin, end,
          to_string(shape_));
    const int64_t per_row = shape_[0] ? size_ / shape_[0] : 0;
    Shape shape = shape_;
    shape[0] = end - begin;
    return element_slice(begin * per_row, std::move(shape));
}

Tensor Tensor::element_slice(int64_t begin, Shape shape) const {
    const int64_t count = elements(shape);
    CHECK(begin >= 0 && begin + count <= size_, "elements [{}, {}) of {}", begin, begin + count, size_);
    Tensor slice = *this;
    slice.offset_ += begin * size_of(dtype_);
    slice.size_ = count;
    slice.shape_ = std::move(shape);
    return slice;
}

Tensor Tensor::stack_neighbors(const std::vector<Tensor>& parts) {
    CHECK(!parts.empty() && !parts[0].shape_.empty());
    Tensor stacked = parts[0];
    for (size_t i = 1; i < parts.size(); ++i) {
        const Tensor& part = parts[i];
        CHECK(part.storage_ == stacked.storage_ && part.offset_ == stacked.offset_ + stacked.bytes() &&
                  part.dtype_ == stacked.dtype_ && part.cols() == stacked.cols(),
              "part {} of shape {} is not adjacent to {}", i, to_string(part.shape_), to_string(stacked.shape_));
        stacked.size_ += part.size_;
        stacked.shape_[0] += part.shape_[0];
    }
    return stacked;
}

}  // namespace train70b
