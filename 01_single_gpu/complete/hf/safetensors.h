#pragma once
// The safetensors format: 8 bytes with the length of the header (little-endian), a JSON header, then the tensors' bytes
// without gaps. An entry is "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, with offsets in
// bytes from the end of the header.
#include <map>

#include "01_single_gpu/complete/param.h"
#include "01_single_gpu/core/files.h"

namespace train70b {

struct StoredTensor {
    std::string name;
    DType dtype = DType::f32;  // f64, f32, bf16 or u8
    Shape shape;
    int64_t begin = 0, bytes = 0;  // offset from the end of the header
    bool fp16 = false;             // read as fp32, which is exact

    int64_t width() const { return fp16 ? 2 : size_of(dtype); }  // bytes of an element
    int64_t size() const { return bytes / width(); }             // elements
    const char* type_name() const { return fp16 ? "fp16" : name_of(dtype); }
};

enum class Holds { states, model };  // a checkpoint's: F64, F32, BF16 or U8; a model's: F64, F32, F16 or BF16

// A file for reading. Construction validates the header: usage error, naming file and tensor, for inconsistent sizes or
// offsets, overlaps, gaps, and other dtypes.
class SafetensorsFile {
  public:
    explicit SafetensorsFile(const std::string& path, Holds holds = Holds::states);
    SafetensorsFile(SafetensorsFile&&) = default;

    const std::string& path() const { return path_; }
    const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }

    // Reads the rectangle `part` of a stored matrix, vector (n x 1) or stack of matrices (all rows, one after another),
    // cast to the dtype of `to`, which may be on any device. Copies in pieces, so the host does not hold a second copy
    // of a large matrix. only_finite: usage error, naming the tensor, for NaN and infinity, also from the cast.
    void read(const StoredTensor& tensor, const Rect& part, Tensor& to, bool only_finite = false) const;
    void read(const StoredTensor& tensor, Tensor& to) const;  // all of it
    void read_bytes(const StoredTensor& tensor, int64_t begin, void* to, int64_t count) const {
        file_.read(data_ + tensor.begin + begin, to, count);
    }

  private:
    std::string path_;
    InputFile file_;
    int64_t data_ = 0;  // where the tensors' bytes begin
    std::map<std::string, StoredTensor> tensors_;
};

// The beginning of a file with these tensors: the length of the header and the header. Computes their begin and bytes.
std::string safetensors_header(std::vector<StoredTensor>& tensors);

// A file for writing: first the list of tensors, then their values in the same order. Equal input gives equal bytes.
class SafetensorsWriter {
  public:
    // Computes begin and bytes of the tensors. Usage error, naming the flag, if the file cannot be written.
    SafetensorsWriter(const std::string& flag, const std::string& path, std::vector<StoredTensor> tensors);
    void write(const Tensor& values);  // the next tensor, on any device; cast to the dtype in the list
    void commit();                     // after all were written: renames the file

  private:
    OutputFile file_;
    std::vector<StoredTensor> tensors_;
    size_t next_ = 0;
};

// A name read from a file, escaped for a one-line message.
std::string quoted(const std::string& name);

}  // namespace train70b
