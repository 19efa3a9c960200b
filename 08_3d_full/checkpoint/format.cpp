#include "08_3d_full/checkpoint/format.h"

#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <memory>

#include "01_single_gpu/complete/hf/hf.h"
#include "01_single_gpu/core/json.h"
#include "01_single_gpu/core/json_object.h"
#include "01_single_gpu/core/registry.h"
#include "07_fp8/complete/adamw8bit.h"
#include "07_fp8/complete/optimizers.h"

namespace train70b {

namespace fs = std::filesystem;
using nlohmann::json;

// ---- names of rectangles -------------------------------------------------------------------------------------------

std::string Piece::name() const {
    const std::string rows = fmt::format("{}:{}", rect.row_begin, rect.row_begin + rect.rows);
    return matrix ? fmt::format("{}/{}[{},{}:{}]", state, param, rows, rect.col_begin, rect.col_begin + rect.cols)
                  : fmt::format("{}/{}[{}]", state, param, rows);
}

std::optional<Piece> Piece::parse(const std::string& name) {
    const size_t slash = name.find('/'), open = name.find('[');
    if (slash == 0 || slash == name.npos || open == name.npos || open < slash + 2) return {};
    Piece piece{.state = name.substr(0, slash), .param = name.substr(slash + 1, open - slash - 1), .rect = {}};
    long long r0 = 0, r1 = 0, c0 = 0, c1 = 1;
    const int numbers = std::sscanf(name.c_str() + open, "[%18lld:%18lld,%18lld:%18lld]", &r0, &r1, &c0, &c1);
    if (numbers != 2 && numbers != 4) return {};
    piece.rect = {.row_begin = r0, .rows = r1 - r0, .col_begin = c0, .cols = c1 - c0};
    piece.matrix = numbers == 4;
    if (r0 < 0 || c0 < 0 || piece.rect.rows < 1 || piece.rect.cols < 1 || piece.name() != name) return {};
    return piece;
}

std::vector<Rect> rectangles(const Rect& local, int64_t offset, int64_t size) {
    std::vector<Rect> list;
    const int64_t cols = local.cols;
    while (size > 0) {
        const int64_t row = offset / cols, col = offset % cols;
        const int64_t rows = col == 0 ? std::max<int64_t>(size / cols, 1) : 1;
        const int64_t width = col == 0 && size >= cols ? cols : std::min(cols - col, size);
        list.push_back({local.row_begin + row, rows, local.col_begin + col, width});
        offset += rows * width;
        size -= rows * width;
    }
    return list;
}

// ---- the manifest --------------------------------------------------------------------------------------------------

std::vector<std::string> Manifest::states_of(const Param& param) const {
    if (kind == "weights") return {"weight"};
    if (find_optimizer(optimizer).moments_of(param) == 1) return {"weight", "exp_avg"};
    return {"weight", "exp_avg", "exp_avg_sq"};
}

namespace {

CheckpointFile read_file_entry(const std::string& path, const std::string& folder, const json& entry) {
    if (!entry.is_object()) usage_error("{}: \"files\" must be a list of objects", path);
    const JsonObject read(path, entry);
    CheckpointFile file{.name = read.text("name"),
                        .bytes = read.integer("bytes", INT64_MAX, 8),
                        .crc32 = uint32_t(read.integer("crc32", UINT32_MAX, 0)),
                        .tensors = {}};
    constexpr const char* kPlain = "-_.0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    if (file.name.empty() || file.name.find_first_not_of(kPlain) != file.name.npos || file.name.front() == '.')
        usage_error("{}: {} is not the name of a file in this folder", path, quoted(file.name));
    for (const json& name : read.list("tensors")) {
        if (!name.is_string()) read.refuse("tensors", "must be a list of names");
        file.tensors.push_back(name.get<std::string>());
    }
    std::error_code error;
    const std::string at = folder + "/" + file.name;
    if (!fs::is_regular_file(at, error)) usage_error("{}: missing, or not a regular file; {} lists it", at, path);
    if (const auto bytes = int64_t(fs::file_size(at, error)); error || bytes != file.bytes)
        usage_error("{}: has {} bytes, but {} says {}: truncated, or of another checkpoint", at, bytes, path,
                    file.bytes);
    return file;
}

// N of "step-N"; empty: not such a name.
std::optional<int64_t> number_after(const std::string& prefix, const std::string& name) {
    if (!name.starts_with(prefix)) return {};
    const std::string digits = name.substr(prefix.size());
    if (digits.empty() || digits.size() > 18 || digits.find_first_not_of("0123456789") != digits.npos) return {};
    return std::stoll(digits);
}

// Every element of every parameter once per state.
void check_coverage(const std::string& path, const Manifest& manifest) {
    int64_t tensors = 0;  // fewer than layers: what a corrupt config may ask for is not built
    for (const CheckpointFile& file : manifest.files) tensors += int64_t(file.tensors.size());
    if (tensors < manifest.model.layers)
        usage_error("{}: lists {} tensors of a model of {} layers: elements are in no file", path, tensors,
                    manifest.model.layers);
    std::map<std::string, std::vector<Rect>> found;  // "state/param"
    std::map<std::string, Param> params;
    for (const Param& param : all_params(manifest.model)) params[param.name] = param;
    for (const CheckpointFile& file : manifest.files)
        for (const std::string& name : file.tensors) {
            if (name.starts_with("fp8/") || name.starts_with("skip_step/") || name.starts_with("loss_scale/") ||
                name.starts_with("scale/") || is_row_of_other_part(name))
                continue;
            const auto piece = Piece::parse(name);
            const auto known = params.find(piece ? piece->param : "");
            if (piece && known == params.end())
                usage_error("{}: {} lists {}, which is not a parameter of the model", path, file.name, quoted(name));
            if (!piece || std::ranges::count(manifest.states_of(known->second), piece->state) == 0)
                usage_error("{}: {} lists tensor {}, which is not part of a {} checkpoint", path, file.name,
                            quoted(name), manifest.kind);
            const Param& param = known->second;
            const int64_t cols = param.is_matrix() ? param.global_shape[1] : 1;
            if (piece->matrix != param.is_matrix() ||
                piece->rect.row_begin + piece->rect.rows > param.global_shape[0] ||
                piece->rect.col_begin + piece->rect.cols > cols)
                usage_error("{}: {} lists {}, but the parameter is {}", path, file.name, quoted(name),
                            to_string(param.global_shape));
            found[piece->state + "/" + piece->param].push_back(piece->rect);
        }
    for (const auto& [name, param] : params)
        for (const std::string& state : manifest.states_of(param)) {
            std::vector<Rect>& rects = found[state + "/" + name];
            std::ranges::sort(rects, {}, [](const Rect& rect) { return std::pair(rect.row_begin, rect.col_begin); });
            int64_t covered = 0;
            const int64_t all = param.global_size();
            for (size_t i = 0; i < rects.size(); ++i) {
                covered += rects[i].size();
                for (size_t j = i + 1; j < rects.size(); ++j) {
                    const Rect &a = rects[i], &b = rects[j];
                    if (b.row_begin >= a.row_begin + a.rows) break;
                    if (b.col_begin < a.col_begin + a.cols && a.col_begin < b.col_begin + b.cols)
                        usage_error("{}: two rectangles of {}/{} overlap: {} and {}", path, state, name,
                                    Piece{state, name, a, param.is_matrix()}.name(),
                                    Piece{state, name, b, param.is_matrix()}.name());
                }
            }
            if (covered != all)
                usage_error("{}: {}/{}: {} of {} elements are in no file", path, state, name, all - covered, all);
        }
}

}  // namespace

Manifest read_manifest(const std::string& folder) {
    const std::string path = folder + "/manifest.json";
    std::error_code error;
    if (!fs::is_directory(folder, error)) usage_error("{}: is not a folder (must be a checkpoint, DIR/step-N)", folder);
    if (!fs::exists(path, error))
        usage_error("{}: is not a checkpoint: it has no manifest.json (must be DIR/step-N)", folder);
    Manifest manifest;
    manifest.folder = folder;
    manifest.json = std::make_shared<const json>(read_json(path, path, "must be a checkpoint's manifest"));
    if (!manifest.json->is_object()) usage_error("{}: truncated or corrupt: not a JSON object", path);
    const JsonObject read(path, *manifest.json);
    if (const std::string format = read.text("format"); format != kCheckpointFormat)
        usage_error("{}: its format is {}, not {}", path, quoted(format), quoted(kCheckpointFormat));
    if (const int64_t version = read.integer("version", INT64_MAX, 0); version != kCheckpointVersion)
        usage_error("{}: format version {}, but this program reads version {} (use the program that wrote it: {})",
                    path, version, kCheckpointVersion, manifest.json->value("commit", json("unknown")).dump());
    manifest.kind = read.text("kind", {"full", "weights"});
    manifest.step = read.integer("step", int64_t(1) << 40);
    const auto named = number_after("step-", fs::path(folder).filename().string());
    if (named && *named != manifest.step)
        read.refuse("step", fmt::format("the folder is step-{} (rename it to step-{}, or move it away)", *named,
                                        manifest.step));
    manifest.ranks = read.integer("ranks", INT64_MAX);
    manifest.optimizer = read.text("optimizer", names_of(optimizers()));
    manifest.dtype = read.text("dtype", {"fp32", "bf16", "fp16", "fp64"});
    manifest.model = parse_hf_config(read.inner("model").json(), path);
    read_other_part(path, *manifest.json, manifest.model);
    for (const json& entry : read.list("files")) manifest.files.push_back(read_file_entry(path, folder, entry));
    check_coverage(path, manifest);
    if (manifest.ranks != int64_t(manifest.files.size()))
        read.refuse("ranks", fmt::format("\"files\" lists {}", manifest.files.size()));
    const auto has = [&](const char* key) { return read.json().contains(key); };  // null, too, which is refused
    for (const json& entry : has("batches") ? read.list("batches") : json::array()) {
        const JsonObject from(path, entry);
        const int64_t before = manifest.batches.empty() ? 0 : manifest.batches.back().step;
        manifest.batches.push_back(
            {from.integer("from_step", before > 0 ? manifest.step : 1, before + 1), from.integer("global_batch")});
    }
    for (const char* key : {"commit", "blas_core"})
        if (has(key)) read.text(key);
    if (has("layout"))
        for (const char* key : {"tp", "cp", "dp", "pp"}) read.inner("layout").integer(key, manifest.ranks);
    if (has("flags")) {
        const JsonObject flags = read.inner("flags");
        for (const auto& [name, value] : flags.json().items()) flags.text(name.c_str());
    }
    return manifest;
}

// Dtypes and shapes, so that whoever reads the tensors can rely on them.
static void check_tensors(const Manifest& manifest, const SafetensorsFile& file) {
    std::map<std::string, Shape> shapes;
    for (const Param& param : all_params(manifest.model)) shapes[param.name] = param.global_shape;
    const DType stats = manifest.dtype == "fp64" ? DType::f64 : DType::f32;
    const OptimizerEntry& optimizer = find_optimizer(manifest.optimizer);
    const DType moments = optimizer.moments(stats);
    const DType weights = optimizer.masters ? stats : DType::bf16;
    for (const auto& [name, tensor] : file.tensors()) {
        const auto expect = [&, &name = name, &tensor = tensor](DType dtype, const Shape& shape) {
            if (tensor.dtype != dtype || tensor.shape != shape)
                usage_error("{}: tensor {} is {} of {}, but must be {} of {}", file.path(), quoted(name),
                            name_of(tensor.dtype), to_string(tensor.shape), name_of(dtype), to_string(shape));
        };
        auto piece = Piece::parse(name);
        const auto global = piece ? shapes.find(piece->param) : shapes.end();
        if (global == shapes.end()) {
            expect(DType::f32, {tensor.size()});  // of FP8
            continue;
        }
        const Rect& rect = piece->rect;
        const bool of_codes = piece->state == "scale";
        if (!of_codes)
            expect(piece->state == "weight" ? weights : moments,
                   piece->matrix ? Shape{rect.rows, rect.cols} : Shape{rect.rows});
        else if (optimizer.scale_block == 0)
            usage_error("{}: tensor {} is not part of a checkpoint of {}", file.path(), quoted(name),
                        manifest.optimizer);
        if (!of_codes && (piece->state == "weight" || optimizer.scale_block == 0)) continue;
        piece->state = of_codes ? "exp_avg" : "scale";  // what must be there too
        if (!file.tensors().contains(piece->name()))
            usage_error("{}: tensor {} needs {}, which is missing", file.path(), quoted(name), quoted(piece->name()));
        if (of_codes) expect(DType::f32, {2, blocks_of(rect, global->second).blocks()});
    }
}

void verify_file(const Manifest& manifest, const CheckpointFile& file, const std::string& advice) {
    const std::string path = manifest.folder + "/" + file.name;
    const std::unique_ptr<FILE, int (*)(FILE*)> stream(std::fopen(path.c_str(), "rb"), std::fclose);
    if (!stream) usage_error("{}: cannot be read ({}){}", path, std::strerror(errno), advice);
    std::vector<unsigned char> buffer(8 << 20);
    uLong crc = 0;
    int64_t bytes = 0;
    for (size_t got; (got = std::fread(buffer.data(), 1, buffer.size(), stream.get())) > 0; bytes += int64_t(got))
        crc = crc32_z(crc, buffer.data(), got);
    if (bytes != file.bytes || crc != file.crc32)
        usage_error("{}: corrupt: its CRC-32 is {}, but must be {}{}", path, fmt::format("{:08x}", crc),
                    fmt::format("{:08x}", file.crc32), advice);
    const SafetensorsFile opened(path);
    std::vector<std::string> names = file.tensors, stored;
    std::sort(names.begin(), names.end());
    for (const auto& [name, tensor] : opened.tensors()) stored.push_back(name);  // sorted
    if (names != stored) usage_error("{}: does not hold the tensors that manifest.json lists{}", path, advice);
    check_tensors(manifest, opened);
}

std::vector<int64_t> checkpoint_steps(const std::string& dir, const std::string& prefix) {
    std::vector<int64_t> steps;
    std::error_code error, unknown;
    for (auto it = fs::directory_iterator(dir, error); !error && it != fs::directory_iterator(); it.increment(error)) {
        const auto step = number_after(prefix, it->path().filename().string());
        if (step && fs::exists(it->path() / "manifest.json", unknown)) steps.push_back(*step);
    }
    std::sort(steps.begin(), steps.end());
    return steps;
}

}  // namespace train70b
