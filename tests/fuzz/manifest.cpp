// The manifest of a checkpoint, beside the file that it lists.
// sources: 08_3d_full/checkpoint/format.cpp 08_3d_full/experts/manifest_fields.cpp 07_fp8/complete/moments.cpp
// sources: 07_fp8/complete/optimizers.cpp
// sources: hf/hf.cpp hf/hf_config.cpp hf/families.cpp hf/safetensors.cpp core/json.cpp core/files.cpp config.cpp
// sources: llama.cpp layers.cpp param.cpp core/tensor.cpp core/memory.cpp core/cuda_absent.cpp core/profile.cpp
// sources: ops/transfer.cpp experts/experts.cpp experts/hf_experts.cpp ops/rope.cpp core/say.cpp
// sources: latent_attention.cpp multi_token.cpp
#include <zlib.h>

#include <nlohmann/json.hpp>

#include "01_single_gpu/complete/hf/hf.h"
#include "08_3d_full/checkpoint/format.h"
#include "tests/fuzz/fuzz.h"
#include "tests/fuzz/llama.h"

namespace train70b::fuzz {

namespace {
constexpr const char* kFile = "rank-00000.safetensors";

// All parameters in the states of a checkpoint, zeros.
std::vector<StoredTensor> tensors(const std::vector<std::string>& states) {
    std::vector<StoredTensor> list;
    for (const std::string& state : states)
        for (const Param& param : all_params(small()))
            list.push_back(
                {Piece{state, param.name, param.local, param.is_matrix()}.name(), DType::f32, param.global_shape});
    return list;
}

std::string content(std::vector<StoredTensor> list) {
    const std::string header = safetensors_header(list);
    return header + std::string(size_t(list.back().begin + list.back().bytes), '\0');
}
}  // namespace

// An input is manifest.json; what it can list is there.
Target target() {
    const std::string file = content(tensors({"weight", "exp_avg", "exp_avg_sq"}));
    const auto read = [file](const Folder& folder, std::string_view input) {
        folder.write("manifest.json", input);
        folder.write(kFile, file);
        const Manifest manifest = read_manifest(folder.path());
        for (const CheckpointFile& entry : manifest.files) verify_file(manifest, entry, "");
    };
    nlohmann::ordered_json names = nlohmann::ordered_json::array();
    for (const StoredTensor& tensor : tensors({"weight", "exp_avg", "exp_avg_sq"})) names.push_back(tensor.name);
    const uint32_t crc = uint32_t(crc32_z(0, reinterpret_cast<const Bytef*>(file.data()), file.size()));
    const nlohmann::ordered_json manifest = {
        {"format", kCheckpointFormat},
        {"version", kCheckpointVersion},
        {"kind", "full"},
        {"step", 1},
        {"ranks", 1},
        {"dtype", "fp32"},
        {"optimizer", "adamw"},
        {"model", hf_config(small(), DType::f32)},
        {"files", {{{"name", kFile}, {"bytes", file.size()}, {"crc32", crc}, {"tensors", names}}}}};
    const std::string good = manifest.dump();
    const auto with = [&](const std::string& from, const std::string& to) {
        std::string changed = good;
        changed.replace(changed.find(from), from.size(), to);
        return changed;
    };
    std::vector<std::string> words = {kFile,
                                      "../",
                                      "[0:8,0:8]",
                                      "[0:8]",
                                      "exp_avg/",
                                      "exp_avg_sq/",
                                      "weight/",
                                      "scale/",
                                      "fp8/",
                                      "weights",
                                      "adamw8bit",
                                      "bf16",
                                      "fp64",
                                      "-1",
                                      "18446744073709551615",
                                      "9223372036854775807",
                                      "1e400",
                                      "null",
                                      "[[[[",
                                      "{\"a\":",
                                      "[0:4,0:8]",
                                      "[4:8,0:8]"};
    for (const auto& [key, value] : manifest.items()) words.push_back('"' + key + '"');
    for (const char* key : {"name", "bytes", "crc32", "tensors"}) words.push_back(std::string("\"") + key + '"');
    return {
        read,
        {good, with("\"full\"", "\"weights\""), with("\"version\":1", "\"version\":2"), with("[0:8,0:8]", "[0:4,0:8]"),
         with("[0:8,0:8]", "[0:99999999999999999999,0:8]"), with(kFile, "../x"), with("\"step\":1", "\"step\":-1"),
         with("\"files\":[", "\"files\":[" + nested(62) + ","), with("\"crc32\":" + std::to_string(crc), "\"crc32\":0"),
         with("\"fp32\"", nested_objects(62)), with("\"num_hidden_layers\":1", "\"num_hidden_layers\":10000"),
         repeat("[", 5000), nested_objects(5000), with("exp_avg/", "exp_avg_sq/"), with("\"bytes\":", "\"bytes\":1")},
        words};
}

}  // namespace train70b::fuzz
