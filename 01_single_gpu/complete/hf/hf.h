#pragma once
// Llama checkpoints in Hugging Face's format: a folder with config.json and either model.safetensors, or several shards
// with model.safetensors.index.json. The models of this course use the same parameter names and the same rotate-half
// RoPE, so weights are not permuted. Some parameters are stored in parts (hf_tensors); buffers (FeedForward), which
// are no parameters, are tensors in fp32.
#include <nlohmann/json_fwd.hpp>
#include <set>

#include "01_single_gpu/complete/hf/safetensors.h"
#include "01_single_gpu/complete/llama.h"

namespace train70b {

// Reads DIR/config.json. Usage error, naming file and key, if a key is missing, has the wrong type or is out of range;
// for unsupported models: biases, other activations, other kinds of RoPE; and for every key that is neither read nor
// known to be irrelevant, unless it says nothing (null, false, 0) or `ignored` (--hf-ignore) has it.
LlamaConfig read_hf_config(const std::string& dir, const std::vector<std::string>& ignored = {});
LlamaConfig parse_hf_config(const nlohmann::json& object, const std::string& path,
                            std::vector<std::string> ignored = {});        // the same of its content
nlohmann::ordered_json hf_config(const LlamaConfig& config, DType dtype);  // the content of config.json
// Keys of config.json in checkpoints and references, for what no family has.
inline constexpr const char *kOwnLayerTypes = "train70b_layer_types", *kOwnSinks = "train70b_sinks",
                            *kOwnMultiToken = "train70b_mtp";
// Usage error for what is no folder, and for one that has weights in another format only.
void check_hf_folder(const std::string& dir);
// Usage error, naming the flag that asks for such files, for attention or a feed-forward half that no family has.
void check_hf_attention(const LlamaConfig& config, const std::string& flag);
void check_hf_family(const LlamaConfig& config, const std::string& flag);

// Every parameter of the full model, in order, with name and shape but without data.
std::vector<Param> all_params(const LlamaConfig& config);
// With the buffers, as if they were parameters: fp32, without a gradient.
std::vector<Param> params_and_buffers(const LlamaConfig& config);

// What a file has of a parameter: consecutive rows, in another shape perhaps.
struct HfTensor {
    std::string name;
    Shape shape;
    int64_t row_begin = 0, rows = 0;  // of the full parameter
};
// A parameter as the Hub's files have it, in the order of its rows.
std::vector<HfTensor> hf_tensors(const Param& param, const LlamaConfig& config);
// As transformers 5 has it in memory, and a model saved by torch from there: in one tensor.
HfTensor hf_stacked(const Param& param, const LlamaConfig& config);

// The weights in DIR. Construction checks names and shapes, and loads none: usage error, naming file and tensor, if a
// shard or a tensor is missing, unexpected, or of another shape than `config` says, and for a buffer that is not
// finite, which no loss would show. Parameters may be in parts or in one tensor.
// With tied embeddings an lm_head.weight may be there, if it is bitwise the embedding's matrix; and a tensor may be in
// two shards, if it is the same in both.
class HfWeights {
  public:
    HfWeights(const std::string& dir, const LlamaConfig& config);
    // Loads this rank's rectangle of each parameter, cast to the dtype of its data. Usage error, naming the tensor, for
    // a value that is not finite.
    void load(const std::vector<Param*>& params) const;
    void load_buffers(Llama& model) const {  // of this stage
        for (Block& block : model.blocks)
            if (const std::string name = block.feed_forward->buffer_name(); !name.empty())
                block.feed_forward->set_buffer(buffer(name));
    }
    std::string dtypes() const;  // of the parameters: "bf16", or "bf16, fp32"

  private:
    using Location = std::pair<size_t, const StoredTensor*>;  // file, entry
    void open_shards(const std::string& index_path);
    void add(const std::string& path);
    void check(const HfTensor& part) const;
    void check_tied_head() const;
    bool same_bytes(const Location& a, const Location& b) const;
    std::string other_name_of(const std::string& name) const;
    std::vector<float> buffer(const std::string& name) const;

    std::string dir_;
    std::vector<SafetensorsFile> files_;
    std::map<std::string, Location> where_;               // by name
    std::set<std::string> doubles_;                       // names of tensors that two shards have
    std::map<std::string, std::vector<HfTensor>> parts_;  // of each parameter, by its name
};

// Returns the full parameter's data or gradient on rank 0, and an empty tensor on the other ranks. Collective: all
// ranks must call it for the same parameters in the same order.
using GetFullParam = std::function<Tensor(const Param&, Which)>;
GetFullParam local_full_params(Llama& model);  // of a model that one rank holds
// Calls write for each tensor of the Hub's files, in order; on rank 0 only. A buffer has no gradient.
void for_full_tensors(const LlamaConfig& config, Which which, const GetFullParam& get_full,
                      const std::function<void(const std::string& name, const Tensor& values)>& write);

// An output folder. Construction creates it if it does not exist; usage error, naming the flag, on failure. Destruction
// removes folders that it created and that are still empty.
class OutputFolder {
  public:
    OutputFolder(const std::string& flag, const std::string& path);
    ~OutputFolder();
    OutputFolder(const OutputFolder&) = delete;
    std::string file(const std::string& name) const { return path_ + "/" + name; }

  private:
    std::string path_;
    std::vector<std::string> made_;  // outermost first
};

std::vector<std::string> hf_files();  // the fixed file names that HfSaver may write

// Writes a checkpoint in two steps: construction (before training) verifies that DIR is writable, save() writes. Rank 0
// writes; the other ranks take part in get_full(). Files are renamed only when all of them are complete.
class HfSaver {
  public:
    // from: the folder that the model was loaded from, whose tokenizer and generation_config.json are copied; or "".
    explicit HfSaver(const std::string& dir, const std::string& from = "");
    // Splits the weights into shards of at most shard_bytes (5 GB, as Hugging Face does).
    void save(const LlamaConfig& config, DType dtype, const GetFullParam& get_full,
              int64_t shard_bytes = 5'000'000'000);

  private:
    std::optional<OutputFolder> folder_;  // on rank 0 only, like the file
    std::optional<OutputFile> config_file_;
    std::map<std::string, InputFile> copied_;  // by name
};

}  // namespace train70b
