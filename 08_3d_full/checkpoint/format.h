#pragma once
// The format of checkpoints (docs/checkpoint-format.md describes it for readers in any language):
//
//     DIR/step-12/                   complete: renamed when all of it was on disk
//         manifest.json              what was trained, and every file with its size, CRC-32 and tensors
//         rank-00000.safetensors     the rectangles of weights and optimizer states that a rank has written
//         ...
//     DIR/weights-10/                the same with the weights, and the model's buffers, only
//     DIR/step-16.tmp/               being written, or left by a crash
//
// A rectangle's name says what it is: "exp_avg/model.layers.0.mlp.down_proj.weight[0:64,32:64]", rows 0 to 63 and
// columns 32 to 63 of the parameter's first moment. Every element of every parameter is in exactly one rectangle per
// state, so any layout can read what any other has written.
#include <nlohmann/json_fwd.hpp>
#include <optional>

#include "01_single_gpu/complete/hf/safetensors.h"
#include "01_single_gpu/complete/llama.h"

namespace train70b {

inline constexpr const char* kCheckpointFormat = "train70b checkpoint";
inline constexpr int kCheckpointVersion = 1;

// One rectangle of one state of a parameter.
struct Piece {
    std::string state, param;  // "weight", "exp_avg", ...
    Rect rect;
    bool matrix = true;

    std::string name() const;                                    // "weight/model.norm.weight[0:64]"
    static std::optional<Piece> parse(const std::string& name);  // empty: not such a name
};

// Whether a tensor that is no rectangle is of the model, not of its training: a buffer.
bool is_of_model(const std::string& name);

// The rectangles, at most three, of elements [offset, offset + size) of a row-major rectangle `local` of a parameter:
// the end of a row, full rows, the beginning of a row. One after another they are the run.
std::vector<Rect> rectangles(const Rect& local, int64_t offset, int64_t size);

struct CheckpointFile {
    std::string name;
    int64_t bytes = 0;
    uint32_t crc32 = 0;
    std::vector<std::string> tensors;
};

struct BatchFrom {  // a --global-batch, and the first step that has it
    int64_t step = 1, batch = 0;
};

struct Manifest {
    std::string folder;         // where it was read
    std::string kind = "full";  // or "weights"
    int64_t step = 0, ranks = 0;
    LlamaConfig model;
    std::string optimizer, dtype;
    std::vector<CheckpointFile> files;
    std::vector<BatchFrom> batches;              // empty: the flag's in every step
    std::shared_ptr<const nlohmann::json> json;  // all of it

    // The states of every element: "weight", and with the optimizer's "exp_avg", "exp_avg_sq".
    std::vector<std::string> states_of(const Param& param) const;
};

// The model whose config.json a manifest has: with dense layers only, because no family has all that there is here.
LlamaConfig dense_part(LlamaConfig config);
// What a manifest has beside it, if there are other layers: {key: {flag: value, ...}}; flags without their dashes.
nlohmann::ordered_json other_part(const LlamaConfig& config);
void read_other_part(const std::string& path, const nlohmann::json& manifest, LlamaConfig& model);
std::vector<const char*> fixed_flags_of_other_part();  // that a resumed run must have, too
bool is_row_of_other_part(const std::string& name);    // of a StepState

// Usage error, naming the manifest and the entry, for a folder that is no checkpoint or is named for another step,
// another format version, files that are missing, of another size, or outside the folder, rectangles that overlap or do
// not cover a parameter, and values of another type. Does not read the files.
Manifest read_manifest(const std::string& folder);

// Usage error, naming the file and `advice`, if a file's CRC-32 or its list of tensors is not the manifest's. Reads all
// of the file.
void verify_file(const Manifest& manifest, const CheckpointFile& file, const std::string& advice);

// The steps of the complete checkpoints ("step-") or weights ("weights-") in a folder, ascending.
std::vector<int64_t> checkpoint_steps(const std::string& dir, const std::string& prefix = "step-");

}  // namespace train70b
