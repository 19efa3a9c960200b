#include "01_single_gpu/complete/hf/safetensors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <optional>

#include "01_single_gpu/core/bf16.h"
#include "01_single_gpu/core/json.h"
#include "01_single_gpu/core/registry.h"

namespace train70b {

using nlohmann::json;
using nlohmann::ordered_json;

static_assert(std::endian::native == std::endian::little, "safetensors are little-endian");

std::string quoted(const std::string& name) { return json_text(json(name)); }

namespace {

constexpr Named<DType> kDTypes[] = {  // by their names in the file's header
    {"F64", DType::f64},
    {"F32", DType::f32},
    {"BF16", DType::bf16},
    {"U8", DType::u8}};

const char* stored_name(DType dtype) {
    for (const Named<DType>& known : kDTypes)
        if (known.value == dtype) return known.name;
    CHECK(false, "{} cannot be stored", name_of(dtype));
    return nullptr;
}

// Parses one entry of the header; the caller checks that entries do not overlap.
StoredTensor parse_entry(const std::string& path, const std::string& name, const json& entry, uint64_t data_bytes,
                         Holds holds) {
    const auto refuse = [&](const std::string& why) { usage_error("{}: tensor {}: {}", path, quoted(name), why); };
    const auto integers = [&](const char* key) {
        const json list = entry.is_object() ? entry.value(key, json()) : json();
        if (!list.is_array()) refuse(fmt::format("\"{}\" is missing", key));
        std::vector<uint64_t> values;
        for (const json& value : list) {
            if (!value.is_number_unsigned())
                refuse(fmt::format("\"{}\" {} must be a list of integers", key, list.dump()));
            values.push_back(value.get<uint64_t>());
        }
        return values;
    };
    const std::vector<uint64_t> shape = integers("shape"), offsets = integers("data_offsets");
    const json dtype = entry.value("dtype", json());
    StoredTensor tensor{.name = name, .fp16 = holds == Holds::model && dtype == "F16"};
    const auto known =
        std::find_if(std::begin(kDTypes), std::end(kDTypes), [&](const auto& d) { return dtype == d.name; });
    if (!tensor.fp16 && (known == std::end(kDTypes) || (holds == Holds::model && known->value == DType::u8)))
        refuse(fmt::format("dtype {} is not supported (must be F64, F32, {})", dtype.dump(),
                           holds == Holds::model ? "F16 or BF16" : "BF16 or U8"));
    if (!tensor.fp16) tensor.dtype = known->value;

    uint64_t bytes = tensor.width();
    int64_t extent = int64_t(bytes);  // as if no dimension were 0: the product of any of them fits
    for (uint64_t dim : shape) {
        bytes *= dim;
        if (__builtin_mul_overflow(extent, std::max<uint64_t>(dim, 1), &extent))
            refuse(fmt::format("shape {} is too large", to_string(Shape(shape.begin(), shape.end()))));
        tensor.shape.push_back(static_cast<int64_t>(dim));
    }
    if (offsets.size() != 2 || offsets[0] > offsets[1]) refuse("data_offsets must be [begin, end]");
    if (offsets[1] > data_bytes)
        refuse(fmt::format("ends at byte {}, but the file has {} bytes of data", offsets[1], data_bytes));
    if (offsets[1] - offsets[0] != bytes)
        refuse(fmt::format("{} of {} is {} bytes, but data_offsets span {}", dtype.dump(), to_string(tensor.shape),
                           bytes, offsets[1] - offsets[0]));
    tensor.begin = static_cast<int64_t>(offsets[0]);
    tensor.bytes = static_cast<int64_t>(bytes);
    return tensor;
}

// Exact: 2^112 is the ratio of the exponents' offsets, and makes normal numbers of those that are not in fp16.
float from_fp16(uint16_t bits) {
    const float size = std::bit_cast<float>(uint32_t(bits & 0x7fff) << 13) * 0x1p112f;
    const float special = (bits & 0x3ff) != 0 ? NAN : INFINITY, value = (bits & 0x7c00) == 0x7c00 ? special : size;
    return (bits & 0x8000) != 0 ? -value : value;
}

// The first value that is not finite in the target's dtype.
template <class T>
std::optional<double> first_not_finite(const Tensor& values, DType target) {
    for (int64_t i = 0; i < values.size(); ++i) {
        const double value = values.data<T>()[i], cast = target == DType::bf16 ? bf16(float(value)) : float(value);
        if (!std::isfinite(target == DType::f64 ? value : cast)) return value;
    }
    return {};
}

}  // namespace

SafetensorsFile::SafetensorsFile(const std::string& path, Holds holds)
    : path_(path), file_(path, path, "must be a safetensors file") {
    const uint64_t bytes = uint64_t(file_.bytes());
    if (bytes < 8)
        usage_error("{}: truncated: {} bytes, but a safetensors file begins with 8 bytes of header length", path,
                    bytes);
    uint64_t header_bytes = 0;
    file_.read(0, &header_bytes, 8);
    constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the format
    if (header_bytes > bytes - 8 || header_bytes > kMaxHeaderBytes)
        usage_error("{}: truncated, corrupt, or not a safetensors file: a header of {} bytes in a file of {} bytes",
                    path, header_bytes, bytes);
    std::string text(header_bytes, '\0');
    file_.read(8, text.data(), int64_t(header_bytes));
    data_ = int64_t(8 + header_bytes);
    const uint64_t data_bytes = bytes - 8 - header_bytes;

    std::vector<const StoredTensor*> order;
    const json header = parse_json(text, path_);
    if (!header.is_object()) usage_error("{}: the header is not a JSON object", path_);
    for (const auto& [name, entry] : header.items()) {
        if (name == "__metadata__") continue;
        order.push_back(&tensors_.emplace(name, parse_entry(path_, name, entry, data_bytes, holds)).first->second);
    }
    std::stable_sort(order.begin(), order.end(), [](const StoredTensor* a, const StoredTensor* b) {
        return std::pair(a->begin, a->bytes) < std::pair(b->begin, b->bytes);  // empty ones first
    });
    int64_t end = 0;
    for (size_t i = 0; i < order.size(); ++i) {
        const StoredTensor& tensor = *order[i];
        if (tensor.begin < end)
            usage_error("{}: tensor {} overlaps {}", path_, quoted(tensor.name), quoted(order[i - 1]->name));
        if (tensor.begin > end)
            usage_error("{}: {} bytes before tensor {} belong to no tensor", path_, tensor.begin - end,
                        quoted(tensor.name));
        end = tensor.begin + tensor.bytes;
    }
    if (uint64_t(end) != data_bytes)
        usage_error("{}: {} bytes after the last tensor belong to no tensor", path_, data_bytes - uint64_t(end));
}

void SafetensorsFile::read(const StoredTensor& tensor, const Rect& part, Tensor& to, bool only_finite) const {
    CHECK(!tensor.shape.empty(), "{}", tensor.name);
    const int64_t cols = tensor.shape.size() == 1 ? 1 : tensor.shape.back(), width = tensor.width();
    CHECK(part.row_begin >= 0 && (part.row_begin + part.rows) * cols <= tensor.size() && part.col_begin >= 0 &&
              part.col_begin + part.cols <= cols && to.size() == part.size(),
          "{}: rows {}+{}, columns {}+{} of {}", tensor.name, part.row_begin, part.rows, part.col_begin, part.cols,
          to_string(tensor.shape));
    if (to.device() == Device::meta) return;
    constexpr int64_t kPieceBytes = 64 << 20;
    const int64_t at_once = std::max<int64_t>(1, kPieceBytes / std::max<int64_t>(1, part.cols * width));
    for (int64_t row = 0; row < part.rows; row += at_once) {
        const int64_t rows = std::min(at_once, part.rows - row);
        Tensor piece({rows, part.cols}, tensor.dtype, Device::cpu, Memory::workspace);
        const bool whole_rows = part.cols == cols;  // contiguous in the file
        for (int64_t r = 0; r < rows; r += whole_rows ? rows : 1)
            file_.read(data_ + tensor.begin + ((part.row_begin + row + r) * cols + part.col_begin) * width,
                       piece.data<char>() + r * part.cols * width, (whole_rows ? rows : 1) * part.cols * width);
        for (int64_t i = tensor.fp16 ? piece.size() : 0; i-- > 0;) {  // in place: from the end
            uint16_t half = 0;
            std::memcpy(&half, piece.data<char>() + 2 * i, 2);
            piece.data<float>()[i] = from_fp16(half);
        }
        const auto bad = !only_finite                  ? std::nullopt
                         : tensor.dtype == DType::f64  ? first_not_finite<double>(piece, to.dtype())
                         : tensor.dtype == DType::bf16 ? first_not_finite<bf16>(piece, to.dtype())
                                                       : first_not_finite<float>(piece, to.dtype());
        if (bad) usage_error("{}: tensor {} has {} (must be finite numbers)", path_, tensor.name, *bad);
        Tensor target = to.element_slice(row * part.cols, {rows, part.cols});
        copy(target, piece);
    }
}

void SafetensorsFile::read(const StoredTensor& tensor, Tensor& to) const {
    if (tensor.shape.size() == 2) return read(tensor, {0, tensor.shape[0], 0, tensor.shape[1]}, to);
    StoredTensor flat = tensor;
    flat.shape = {tensor.size()};
    read(flat, {.rows = tensor.size()}, to);
}

std::string safetensors_header(std::vector<StoredTensor>& tensors) {
    ordered_json header = {{"__metadata__", {{"format", "pt"}}}};  // Hugging Face requires it
    int64_t end = 0;
    for (StoredTensor& tensor : tensors) {
        tensor.begin = end;
        tensor.bytes = size_of(tensor.dtype);
        for (int64_t dim : tensor.shape) tensor.bytes *= dim;
        end += tensor.bytes;
        header[tensor.name] = {
            {"dtype", stored_name(tensor.dtype)}, {"shape", tensor.shape}, {"data_offsets", {tensor.begin, end}}};
    }
    std::string text = header.dump();
    text.resize((text.size() + 7) / 8 * 8, ' ');  // so that every tensor is aligned in the file
    const uint64_t length = text.size();
    return std::string(reinterpret_cast<const char*>(&length), sizeof(length)) + text;
}

SafetensorsWriter::SafetensorsWriter(const std::string& flag, const std::string& path,
                                     std::vector<StoredTensor> tensors)
    : file_(flag, path), tensors_(std::move(tensors)) {
    file_.write(safetensors_header(tensors_));
}

void SafetensorsWriter::write(const Tensor& values) {
    CHECK(next_ < tensors_.size(), "more tensors than the header lists");
    const StoredTensor& tensor = tensors_[next_++];
    CHECK(values.size() == tensor.size(), "{}: {} values for {}", tensor.name, values.size(), to_string(tensor.shape));
    const Tensor host = converted(values, tensor.dtype, Device::cpu);
    file_.write(host.raw(), host.bytes());
}

void SafetensorsWriter::commit() {
    CHECK(next_ == tensors_.size(), "{} of {} tensors were written", next_, tensors_.size());
    file_.commit();
}

}  // namespace train70b
