#pragma once
// Tensor: a reference-counted block of memory with shape, dtype and device; row-major and contiguous. A slice of rows
// is a view. There are no strides and no broadcasting: what an op reads and writes is what its shapes say.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/memory.h"

namespace train70b {

enum class DType : uint8_t { f32, bf16, f64, e4m3, e5m2, i32, u8 };  // u8: places in a table (chapter 07)
enum class Device : uint8_t {
    cpu,
    cuda,
    meta  // shapes and bytes are booked, nothing is allocated, ops only check shapes: the dry run
};

int64_t size_of(DType dtype);  // bytes
// Of what is kept beside tensors of `dtype`: 1/rms, lse, sums of a softmax, the loss, AdamW's moments, accumulators.
inline DType stats_dtype(DType dtype) { return dtype == DType::f64 ? DType::f64 : DType::f32; }
const char* name_of(DType dtype);
const char* name_of(Device device);

using Shape = std::vector<int64_t>;
std::string to_string(const Shape& shape);  // "(2048, 128)"

class Tensor {
  public:
    Tensor() = default;  // empty: false in a condition
    // Allocates, uninitialised, and books the bytes under `kind` until the last reference goes.
    Tensor(Shape shape, DType dtype, Device device, Memory kind = Memory::activations);
    static Tensor like(const Tensor& other, Memory kind = Memory::activations);

    explicit operator bool() const { return storage_ != nullptr; }
    const Shape& shape() const { return shape_; }
    int64_t size() const { return size_; }  // elements
    int64_t bytes() const { return size_ * size_of(dtype_); }
    int64_t cols() const { return shape_.empty() ? 1 : shape_.back(); }
    int64_t rows() const { return shape_.empty() ? 1 : size_ / std::max<int64_t>(shape_.back(), 1); }
    DType dtype() const { return dtype_; }
    Device device() const;
    Memory kind() const;

    // Views: the same memory, counted as one more reference to it.
    Tensor view(Shape shape) const;                          // the same elements under another shape
    Tensor row_slice(int64_t begin, int64_t end) const;      // rows [begin, end) of the first dimension
    Tensor element_slice(int64_t begin, Shape shape) const;  // `shape` elements from flat element `begin`
    // Tensors that lie one behind another in one block, as a single one with their rows stacked (CHECKed).
    static Tensor stack_neighbours(const std::vector<Tensor>& parts);

    // True when nobody else holds this memory: only then may it be changed in place behind the holders' backs.
    bool sole_owner() const { return storage_.use_count() == 1; }
    bool same_memory(const Tensor& other) const { return storage_ == other.storage_; }  // of one block
    bool overlaps(const Tensor& other) const;
    bool starts_with(const Tensor& other) const { return same_memory(other) && offset_ == other.offset_; }

    void* raw() const;  // never of a meta tensor (CHECKed)
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

// What a device must offer to hold tensors. Without CUDA, an allocation on Device::cuda is a usage error.
void* allocate(Device device, int64_t bytes);
void release(Device device, void* pointer) noexcept;

}  // namespace train70b
