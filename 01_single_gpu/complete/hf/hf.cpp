#include "01_single_gpu/complete/hf/hf.h"

#include <fmt/ranges.h>

#include <algorithm>
#include <deque>
#include <filesystem>

#include "01_single_gpu/core/json.h"
#include "01_single_gpu/core/say.h"

namespace train70b {

namespace fs = std::filesystem;
using nlohmann::json;
using nlohmann::ordered_json;

namespace {
constexpr const char* kSingle = "model.safetensors";
constexpr const char* kIndex = "model.safetensors.index.json";
constexpr const char *kHead = "lm_head.weight", *kTable = "model.embed_tokens.weight";

// Also a link that leads nowhere, which is reported when it is opened.
bool exists(const std::string& path) {
    std::error_code error;  // a name too long
    return fs::exists(fs::symlink_status(path, error));
}

// What --save-hf copies from the folder of --load-hf.
constexpr const char* kCopied[] = {"tokenizer.json",    "tokenizer_config.json",   "tokenizer.model",
                                   "added_tokens.json", "special_tokens_map.json", "vocab.json",
                                   "merges.txt",        "chat_template.jinja",     "generation_config.json"};

// What a folder without model.safetensors has instead, and what to do about it.
constexpr const char* kSaveAgain = "save it again with save_pretrained(DIR, safe_serialization=True)";
constexpr const char* kMerge = "an adapter: merge it first, with merge_and_unload(), and save the full model";
constexpr const char* kConvert = "another format: convert it to Hugging Face's with transformers";
constexpr std::pair<const char*, const char*> kInstead[] = {
    {"adapter_config.json", kMerge},    {"adapter_model.safetensors", kMerge},
    {"adapter_model.bin", kMerge},      {"pytorch_model.bin", kSaveAgain},
    {"tf_model.h5", kSaveAgain},        {"pytorch_model.bin.index.json", kSaveAgain},
    {"flax_model.msgpack", kSaveAgain}, {"consolidated.safetensors", kConvert},
    {"consolidated.00.pth", kConvert}};

// Older files contain RoPE's frequencies as a buffer, which follows from config.json.
bool is_table(const std::string& name) { return name.ends_with("rotary_emb.inv_freq"); }
}  // namespace

std::vector<Param> all_params(const LlamaConfig& config) {
    std::vector<Param> list = params_and_buffers(config);
    std::erase_if(list, [](const Param& param) { return is_buffer(param.name); });
    return list;
}

std::vector<Param> params_and_buffers(const LlamaConfig& config) {
    Llama model(config, {.device = Device::meta});      // never materialized: names and shapes only
    std::map<const Param*, const FeedForward*> before;  // what a half has in its block's unit stands before its buffer
    for (Block& block : model.blocks)
        if (!block.feed_forward->buffer_name().empty())
            before[block.feed_forward->undivided().back()] = block.feed_forward.get();
    std::vector<Param> list;
    for (const Param* param : model.params()) {
        list.push_back(*param);
        if (const auto at = before.find(param); at != before.end())
            list.push_back(make_bias(at->second->buffer_name(), int64_t(at->second->buffer().size())));
    }
    return list;
}

// ---- reading -------------------------------------------------------------------------------------------------------

void check_hf_folder(const std::string& dir) {
    std::error_code error;
    if (!fs::is_directory(dir, error))
        usage_error("--load-hf {}: is not a folder (must contain config.json and model.safetensors)", dir);
    if (exists(dir + "/" + kSingle) || exists(dir + "/" + kIndex)) return;
    for (const auto& [file, advice] : kInstead)
        if (exists(dir + "/" + file)) usage_error("--load-hf {}: has no {}, but {} ({})", dir, kSingle, file, advice);
}

HfWeights::HfWeights(const std::string& dir, const LlamaConfig& config) : dir_(dir) {
    if (exists(dir + "/" + kSingle))
        add(dir + "/" + kSingle);
    else if (exists(dir + "/" + kIndex))
        open_shards(dir + "/" + kIndex);
    else
        usage_error("--load-hf {}: has neither {} nor {}", dir, kSingle, kIndex);

    std::set<std::string> found;
    for (const Param& param : params_and_buffers(config)) {
        const HfTensor stacked = hf_stacked(param, config);
        parts_[param.name] = where_.contains(stacked.name) ? std::vector<HfTensor>{stacked} : hf_tensors(param, config);
        for (const HfTensor& part : parts_[param.name]) {
            check(part);
            found.insert(part.name);
        }
        if (is_buffer(param.name)) buffer(param.name);
    }
    if (config.tied && where_.contains(kHead)) {
        check_tied_head();
        where_.erase(kHead);
    }
    const auto is_module = [&](const std::string& name) {  // DeepSeek-V3's, behind the last layer
        return config.is_latent() && name.starts_with(fmt::format("model.layers.{}.", config.layers));
    };
    bool left_out = false;
    for (const auto& [name, location] : where_) {
        if (found.contains(name)) continue;
        if (!is_module(name))
            usage_error("{}: tensor {} is not part of this model", files_[location.first].path(), quoted(name));
        left_out = true;
    }
    if (left_out) say("{}: layer {}, which predicts further tokens, is left out\n", dir, config.layers);
}

void HfWeights::check(const HfTensor& part) const {
    const auto at = where_.find(part.name);
    if (at == where_.end())
        usage_error(
            "{}: tensor {} is missing{}", dir_, part.name,
            part.name == kHead ? ", but config.json does not have tie_word_embeddings true" : other_name_of(part.name));
    const auto& [file, tensor] = at->second;
    if (tensor->shape != part.shape)
        usage_error("{}: tensor {} is {}, but must be {} according to config.json", files_[file].path(), part.name,
                    to_string(tensor->shape), to_string(part.shape));
}

void HfWeights::add(const std::string& path) {
    const SafetensorsFile& file = files_.emplace_back(path, Holds::model);
    for (const auto& [name, tensor] : file.tensors()) {
        if (is_table(name)) continue;
        const Location here{files_.size() - 1, &tensor};
        const auto [at, is_new] = where_.try_emplace(name, here);
        if (is_new) continue;
        if (!same_bytes(at->second, here))
            usage_error("{}: tensor {} is also in {}, and differs", path, quoted(name),
                        files_[at->second.first].path());
        doubles_.insert(name);
    }
}

// Names that a wrapper's prefix has changed, or that lack "model.".
std::string HfWeights::other_name_of(const std::string& name) const {
    for (const auto& [other, location] : where_) {
        if (name == "model." + other)
            return fmt::format(", but {} is there: of a LlamaModel without its head (save LlamaForCausalLM)", other);
        for (const std::string prefix :
             {"_orig_mod.", "module.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "base_model.model."})
            if (const size_t at = other.find(prefix);
                at != other.npos && other.substr(0, at) + other.substr(at + prefix.size()) == name)
                return fmt::format(", but {} is there: the wrapper's prefix {} is in the way (save the inner model)",
                                   quoted(other), prefix);
    }
    return "";
}

bool HfWeights::same_bytes(const Location& a, const Location& b) const {
    const StoredTensor &x = *a.second, &y = *b.second;
    if (std::string_view(x.type_name()) != y.type_name() || x.shape != y.shape) return false;
    constexpr int64_t kPiece = 8 << 20;
    std::vector<char> of_a, of_b;
    for (int64_t begin = 0; begin < x.bytes; begin += kPiece) {
        const int64_t size = std::min(kPiece, x.bytes - begin);
        of_a.resize(size_t(size)), of_b.resize(size_t(size));
        files_[a.first].read_bytes(x, begin, of_a.data(), size);
        files_[b.first].read_bytes(y, begin, of_b.data(), size);
        if (of_a != of_b) return false;
    }
    return true;
}

void HfWeights::check_tied_head() const {
    const StoredTensor &head = *where_.at(kHead).second, &table = *where_.at(kTable).second;
    const auto refuse = [&](const std::string& why) {
        usage_error("{}: tensor {} {}, but config.json has tie_word_embeddings true",
                    files_[where_.at(kHead).first].path(), kHead, why);
    };
    if (std::string_view(head.type_name()) != table.type_name() || head.shape != table.shape)
        refuse(fmt::format("is {} {} and {} is {} {}", head.type_name(), to_string(head.shape), kTable,
                           table.type_name(), to_string(table.shape)));
    if (!same_bytes(where_.at(kHead), where_.at(kTable))) refuse(fmt::format("is not equal to {}", kTable));
}

void HfWeights::open_shards(const std::string& index_path) {
    const json index = read_json(index_path, index_path, "must list the shards of the weights");
    const json map = index.is_object() ? index.value("weight_map", json()) : json();
    if (!map.is_object() || map.empty()) usage_error("{}: weight_map is missing or not an object", index_path);
    std::map<std::string, std::string> shard_of;  // tensor -> file name
    std::map<std::string, std::string> shards;    // file name -> one of its tensors
    for (const auto& [name, shard] : map.items()) {
        const std::string file = shard.is_string() ? shard.get<std::string>() : "";
        if (file.empty() || file == "." || file == ".." || file.find_first_of(std::string_view("/\0", 2)) != file.npos)
            usage_error("{}: weight_map maps {} to {}, which is not the name of a file in this folder", index_path,
                        quoted(name), shard.dump());
        shard_of[name] = file;
        shards.try_emplace(file, name);
    }
    for (const auto& [shard, tensor] : shards)
        if (!exists(dir_ + "/" + shard))
            usage_error("{}/{}: missing; {} maps tensor {} to it", dir_, shard, kIndex, quoted(tensor));
    files_.reserve(shards.size());
    for (const auto& [shard, tensor] : shards) add(dir_ + "/" + shard);
    for (const auto& [name, shard] : shard_of)
        if (!where_.contains(name) && !is_table(name))
            usage_error("{}/{}: tensor {} is missing; {} maps it to this file", dir_, shard, quoted(name), kIndex);
    for (const auto& [name, location] : where_) {
        const std::string& path = files_[location.first].path();
        const auto at = shard_of.find(name);
        if (at == shard_of.end()) usage_error("{}: tensor {} is not in {}", path, quoted(name), kIndex);
        if (path != dir_ + "/" + at->second && !doubles_.contains(name))
            usage_error("{}: has tensor {}, which {} maps to {}", path, quoted(name), kIndex, at->second);
    }
}

void HfWeights::load(const std::vector<Param*>& params) const {
    for (Param* param : params) {
        const Rect real = param->real();  // padding stays 0
        for (const HfTensor& part : parts_.at(param->name)) {
            const int64_t begin = std::max(real.row_begin, part.row_begin);
            const int64_t rows = std::min(real.row_begin + real.rows, part.row_begin + part.rows) - begin;
            if (rows <= 0 || real.cols == 0) continue;
            Tensor values = param->data.element_slice((begin - real.row_begin) * real.cols, {rows * real.cols});
            const auto& [file, tensor] = where_.at(part.name);
            files_[file].read(*tensor, {begin - part.row_begin, rows, real.col_begin, real.cols}, values, true);
        }
    }
}

std::string HfWeights::dtypes() const {
    std::set<std::string> names;
    for (const auto& [param, parts] : parts_)
        for (const HfTensor& part : parts)
            if (!is_buffer(param)) names.insert(where_.at(part.name).second->type_name());
    return fmt::format("{}", fmt::join(names, ", "));
}

std::vector<float> HfWeights::buffer(const std::string& name) const {
    const auto& [file, tensor] = where_.at(name);
    const int64_t size = tensor->size();
    Tensor values({size}, DType::f32, Device::cpu, Memory::workspace);
    files_[file].read(*tensor, {0, size, 0, 1}, values, true);
    return {values.data<float>(), values.data<float>() + size};
}

// ---- writing -------------------------------------------------------------------------------------------------------

GetFullParam local_full_params(Llama& model) {
    return [&model](const Param& wanted, Which which) {
        for (const Param* param : model.params())
            if (param->name == wanted.name) return which == Which::data ? param->data : param->grad;
        if (const FeedForward* owner = model.with_buffer(wanted.name)) return buffer_tensor(*owner, Device::cpu);
        CHECK(false, "{} is not a parameter of this model", wanted.name);
        return Tensor();
    };
}

void for_full_tensors(const LlamaConfig& config, Which which, const GetFullParam& get_full,
                      const std::function<void(const std::string& name, const Tensor& values)>& write) {
    for (const Param& param : params_and_buffers(config)) {
        if (which == Which::grad && is_buffer(param.name)) continue;
        const Tensor values = get_full(param, which);
        if (this_rank != 0) continue;
        for (const HfTensor& part : hf_tensors(param, config))
            write(part.name, values.row_slice(part.row_begin, part.row_begin + part.rows));
    }
}

OutputFolder::OutputFolder(const std::string& flag, const std::string& path) : path_(path) {
    std::error_code error;
    if (fs::exists(path, error) && !fs::is_directory(path, error)) usage_error("{} {}: is not a folder", flag, path);
    std::vector<fs::path> missing;
    for (fs::path at = fs::absolute(path, error); !fs::exists(at, error) && at.has_relative_path();
         at = at.parent_path())
        missing.push_back(at);
    for (auto at = missing.rbegin(); at != missing.rend(); ++at)
        if (fs::create_directory(*at, error)) made_.push_back(at->string());
    if (!fs::is_directory(path, error)) {
        for (auto at = made_.rbegin(); at != made_.rend(); ++at) fs::remove(*at, error);
        usage_error("{} {}: cannot be created (must be in a writable folder)", flag, path);
    }
}

OutputFolder::~OutputFolder() {
    std::error_code not_empty;  // remove() leaves a folder that holds anything
    for (auto at = made_.rbegin(); at != made_.rend(); ++at) fs::remove(*at, not_empty);
}

std::vector<std::string> hf_files() {
    std::vector<std::string> names = {"config.json", kSingle, kIndex};
    names.insert(names.end(), std::begin(kCopied), std::end(kCopied));
    return names;
}

HfSaver::HfSaver(const std::string& dir, const std::string& from) {
    if (this_rank != 0) return;
    folder_.emplace("--save-hf", dir);
    config_file_.emplace("--save-hf", folder_->file("config.json"));
    for (const char* name : kCopied)
        if (const std::string path = from + "/" + name; !from.empty() && exists(path))
            copied_.emplace(name, InputFile(path, path, "is copied to --save-hf"));
}

void HfSaver::save(const LlamaConfig& config, DType dtype, const GetFullParam& get_full, int64_t shard_bytes) {
    std::vector<std::vector<StoredTensor>> shards(1);
    int64_t total = 0, in_shard = 0;
    for (const Param& param : params_and_buffers(config))
        for (const HfTensor& part : hf_tensors(param, config)) {
            const DType stored = stored_dtype(param.name, dtype);
            const int64_t bytes = param.global_size() / param.global_shape[0] * part.rows * size_of(stored);
            if (in_shard > 0 && in_shard + bytes > shard_bytes) shards.emplace_back(), in_shard = 0;
            shards.back().push_back({part.name, stored, part.shape});
            in_shard += bytes;
            total += bytes;
        }
    ordered_json index = {{"metadata", {{"total_size", total}}}, {"weight_map", ordered_json::object()}};
    std::deque<SafetensorsWriter> files;
    std::map<std::string, SafetensorsWriter*> file_of;
    for (size_t i = 0; folder_ && i < shards.size(); ++i) {
        const std::string name =
            shards.size() == 1 ? kSingle : fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
        SafetensorsWriter& file = files.emplace_back("--save-hf", folder_->file(name), shards[i]);
        for (const StoredTensor& tensor : shards[i]) {
            index["weight_map"][tensor.name] = name;
            file_of[tensor.name] = &file;
        }
    }
    for_full_tensors(config, Which::data, get_full,
                     [&](const std::string& name, const Tensor& values) { file_of.at(name)->write(values); });
    if (!folder_) return;
    std::optional<OutputFile> index_file;
    if (shards.size() > 1) {
        index_file.emplace("--save-hf", folder_->file(kIndex));
        index_file->write(index.dump(2) + "\n");
    }
    config_file_->write(hf_config(config, dtype).dump(2) + "\n");
    std::deque<OutputFile> copies;
    for (const auto& [name, file] : copied_) {
        std::string content(size_t(file.bytes()), '\0');
        file.read(0, content.data(), file.bytes());
        copies.emplace_back("--save-hf", folder_->file(name)).write(content);
    }
    // All files are complete: rename them. Remove an older checkpoint of the other form, which would be read instead.
    for (SafetensorsWriter& file : files) file.commit();
    fs::remove(folder_->file(index_file ? kSingle : kIndex));
    if (index_file) index_file->commit();
    for (OutputFile& copy : copies) copy.commit();
    config_file_->commit();
}

}  // namespace train70b
