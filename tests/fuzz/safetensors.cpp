// A safetensors file: its header and every tensor in it.
// sources: hf/safetensors.cpp core/json.cpp core/files.cpp core/tensor.cpp core/memory.cpp core/cuda_absent.cpp
// sources: core/profile.cpp core/say.cpp ops/transfer.cpp ops/elementwise.cpp
#include "01_single_gpu/complete/hf/safetensors.h"

#include "tests/fuzz/fuzz.h"

namespace train70b::fuzz {

namespace {
std::string file(const std::string& header, size_t bytes, int64_t lie = 0) {
    const uint64_t size = header.size() + uint64_t(lie);
    return std::string(reinterpret_cast<const char*>(&size), 8) + header + std::string(bytes, '\x3f');
}
std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
    return R"({"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}";
}
}  // namespace

Target target() {
    const auto read = [](const Folder& folder, std::string_view input) {
        const SafetensorsFile file(folder.write("x.safetensors", input));
        for (const auto& [name, tensor] : file.tensors()) {
            Tensor values({tensor.size()}, DType::f64, Device::cpu, Memory::workspace);
            file.read(tensor, values);
        }
    };
    const std::string a = R"({"a":)" + entry("F32", "[2,3]", "[0,24]"), b = R"("b":)" + entry("BF16", "[4]", "[24,32]");
    const std::string deep = R"({"a":{"shape":)";
    return {
        read,
        {file(a + "," + b + "}", 32), file(a + "}", 24), file("{}", 0), file(R"({"__metadata__":{"format":"pt"}})", 0),
         file(R"({"a":)" + entry("F64", "[]", "[0,8]") + "}", 8), file(a + "}", 24, 1), file(a + "}", 23),
         file(R"({"a":)" + entry("F32", "[0,1152921504606846976]", "[0,0]") + "}", 0),
         file(R"({"a":)" + entry("F32", "[4294967296,4294967296]", "[0,0]") + "}", 0),
         file(a + "," + a.substr(1) + "}", 24), file(deep + nested(62) + "}}", 0), file(deep + nested(70) + "}}", 0),
         file(deep + repeat("[", 3000), 0), file(nested_objects(63), 0), file(nested_objects(5000), 0)},
        {R"("dtype")", R"("shape")", R"("data_offsets")", R"("__metadata__")", R"("F32")", R"("F64")", R"("BF16")",
         "[0,24]", "18446744073709551615", "9223372036854775807", "-1", "1e400", "NaN", "null", "[[[[", R"({"a":)"}};
}

}  // namespace train70b::fuzz
