#pragma once
// The safetensors format: 8 bytes with the length of the header (little-endian), a JSON header, then the tensors' bytes
// without holes. Tensor "name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, offsets counted in
// bytes from the end of the header.
#include <map>
#include <memory>

#include "01_single_gpu/io/files.h"
#include "01_single_gpu/param.h"

namespace train70b {

struct StoredTensor {
    std::string name;
    DType dtype = DType::f32;  // f32 or bf16
    Shape shape;
    int64_t begin = 0, bytes = 0;  // place within the tensors' bytes

    int64_t size() const { return bytes / size_of(dtype); }  // elements
};

// A file to read, memory-mapped. Nothing of it is believed before all of it is checked: usage error, naming file and
// tensor, for sizes or offsets that do not add up, overlaps, gaps, and dtypes other than F32 and BF16.
class SafetensorsFile {
  public:
    explicit SafetensorsFile(const std::string& path);
    SafetensorsFile(SafetensorsFile&&) = default;

    const std::string& path() const { return path_; }
    const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }

    // to = the rectangle `part` of a stored matrix or vector (a vector of n is n x 1), cast to the dtype of `to`; piece
    // by piece, so that the host never holds a second copy of a large matrix. `to` may be on any device.
    void read(const StoredTensor& tensor, const Rect& part, Tensor& to) const;
    void read(const StoredTensor& tensor, Tensor& to) const;  // all of it

  private:
    void check_header(std::string_view header, uint64_t data_bytes);

    std::string path_;
    std::shared_ptr<const unsigned char> map_;
    const unsigned char* data_ = nullptr;  // where the tensors' bytes begin
    std::map<std::string, StoredTensor> tensors_;
};

// A file to write: the list of tensors first, then each one's values in that order. The same list and values give the
// same bytes.
class SafetensorsWriter {
  public:
    // Fills in begin and bytes of the list. Usage error naming the flag when the file cannot be written.
    SafetensorsWriter(const std::string& flag, const std::string& path, std::vector<StoredTensor> tensors);
    void write(const Tensor& values);  // of the next tensor; on any device, cast to the dtype promised
    void commit();                     // all were written: the file takes its name

  private:
    OutputFile file_;
    std::vector<StoredTensor> tensors_;
    size_t next_ = 0;
};

// A name out of a file, fit for a message of one line.
std::string quoted(const std::string& name);

}  // namespace train70b
