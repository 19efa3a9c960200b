#pragma once
// Tensor: a reference-counted block of memory with shape, dtype and device; row-major and contiguous. A slice of rows
// is a view. There are no strides and no broadcasting.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/dtype.h"
#include "01_single_gpu/core/memory.h"

namespace train70b {

using Shape = std::vector<int64_t>;
std::string to_string(const Shape& shape);  // "(2048, 128)"

class Tensor {
  public:
    Tensor() = default;  // empty: converts to false
    // Allocates uninitialized memory and books its bytes under `kind` until the last reference is destroyed.
    Tensor(Shape shape, DType dtype, Device device, Memory kind = Memory::activations);
    static Tensor like(const Tensor& other, Memory kind = Memory::activations) {
        return Tensor(other.shape(), other.dtype(), other.device(), kind);
    }

    explicit operator bool() const { return storage_ != nullptr; }
    const Shape& shape() const { return shape_; }
    int64_t size() const { return size_; }  // elements
    int64_t bytes() const { return size_ * size_of(dtype_); }
    int64_t cols() const { return shape_.empty() ? 1 : shape_.back(); }
    int64_t rows() const {  // all dimensions but the last
        int64_t count = 1;
        for (size_t i = 0; i + 1 < shape_.size(); ++i) count *= shape_[i];
        return count;
    }
    DType dtype() const { return dtype_; }
    Device device() const;
    Memory kind() const;

    // Views: another reference to the same memory.
    Tensor view(Shape shape) const;                          // the same elements under another shape
    Tensor row_slice(int64_t begin, int64_t end) const;      // rows [begin, end) of the first dimension
    Tensor element_slice(int64_t begin, Shape shape) const;  // from flat element `begin`
    // Tensors that are adjacent in one block of memory (CHECKed) as one tensor with all of their rows.
    static Tensor stack_neighbors(const std::vector<Tensor>& parts);

    // Whether no other tensor refers to this memory, so that it may be changed in place.
    bool sole_owner() const { return storage_.use_count() == 1; }
    bool same_memory(const Tensor& other) const { return storage_ == other.storage_; }
    bool overlaps(const Tensor& other) const;
    bool starts_with(const Tensor& other) const { return same_memory(other) && offset_ == other.offset_; }

    void* raw() const;  // meta tensors have no data (CHECKed)
    template <class T>
    T* data() const {
        return static_cast<T*>(raw());
    }

  private:
    struct Storage;
    std::shared_ptr<Storage> storage_;
    int64_t offset_ = 0;  // bytes into the storage
    int64_t size_ = 0;
    Shape shape_;
    DType dtype_ = DType::f32;
};

// Memory::disk lies in files, which chapter 03 makes (map_file in 03_zero/complete/offload.h).
inline std::function<std::shared_ptr<void>(int64_t bytes)> allocate_on_disk;

}  // namespace train70b
