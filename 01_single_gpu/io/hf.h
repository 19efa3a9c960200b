#pragma once
// Llama checkpoints as Hugging Face stores them: a folder with config.json and either model.safetensors or several
// shards with model.safetensors.index.json. Parameter names and the rotate-half RoPE are this course's own as well, so
// no weight changes place on its way in or out.
#include <nlohmann/json_fwd.hpp>

#include "01_single_gpu/io/safetensors.h"
#include "01_single_gpu/llama.h"

namespace train70b {

// The shape that DIR/config.json describes. Usage error, naming file and key, for a missing or ill-typed key and for
// everything that this Llama is not: tied embeddings, biases, another activation, another kind of RoPE.
LlamaConfig read_hf_config(const std::string& dir);
nlohmann::ordered_json hf_config(const LlamaConfig& config, DType dtype);  // what config.json says

// Every parameter of the whole model, in order, with name, shape and place but without memory.
std::vector<Param> all_params(const LlamaConfig& config);

// The weights in DIR, all of them checked on construction and none loaded: usage error, naming file and tensor, for a
// missing shard, and for a tensor that is missing, too many, or of another shape than `config` asks for.
class HfWeights {
  public:
    HfWeights(const std::string& dir, const LlamaConfig& config);
    // data of each = this rank's rectangle, cast to the dtype of data. Of all of the model, or any part of it.
    void load(const std::vector<Param*>& params) const;

  private:
    void open_shards(const std::string& index_path);
    void add(const std::string& path);

    std::string dir_;
    std::vector<SafetensorsFile> files_;
    std::map<std::string, std::pair<size_t, const StoredTensor*>> where_;  // name -> file, entry
};

// The whole of a parameter's data or gradient on rank 0, whatever layout it lies in; empty on the other ranks. All
// ranks call it, for the same parameters in the same order: it may communicate.
using Whole = std::function<Tensor(const Param&, Which)>;
Whole whole_on_one_rank(Llama& model);  // the one-rank default: nothing to gather
// Writes them one by one, in order.
void write_whole(SafetensorsWriter* file, const std::vector<Param>& params, const Whole& whole, Which which);

// A folder for output, made when it is not there. Usage error naming the flag when it cannot be made. A folder that it
// made and that is still empty in the end goes away again.
class OutputFolder {
  public:
    OutputFolder(const std::string& flag, const std::string& path);
    ~OutputFolder();
    OutputFolder(const OutputFolder&) = delete;
    std::string file(const std::string& name) const { return path_ + "/" + name; }

  private:
    std::string path_;
    std::vector<std::string> made_;  // innermost last
};

std::vector<std::string> hf_files();  // the names in a checkpoint's folder that HfSaver may give to a file

// Writes a checkpoint, in two steps: construction (before training) shows that DIR can be written, save() writes. Rank
// 0 writes; the others take part in `whole`. No file has its name before all are complete.
class HfSaver {
  public:
    explicit HfSaver(const std::string& dir);
    // Beyond shard_bytes the weights are cut into shards of at most that (5 GB, as Hugging Face does).
    void save(const LlamaConfig& config, DType dtype, const Whole& whole, int64_t shard_bytes = 5'000'000'000);

  private:
    std::optional<OutputFolder> folder_;  // of rank 0, like the file
    std::optional<OutputFile> config_file_;
};

}  // namespace train70b
