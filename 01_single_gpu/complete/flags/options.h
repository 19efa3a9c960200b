#pragma once
// The flags shared by all chapters: typed, checked, and written to the metrics file.
#include <optional>
#include <string>
#include <vector>

#include "01_single_gpu/complete/experts/expert_flags.h"
#include "01_single_gpu/complete/flags/flags.h"
#include "01_single_gpu/complete/train_options.h"
#include "01_single_gpu/core/files.h"

namespace train70b {

// The flags that say which model: a preset, and its dimensions one by one.
class ModelFlags {
  public:
    void add_to(Flags& flags);                    // under the heading "Model"; this outlives the flags
    LlamaConfig shape(const Flags& flags) const;  // after Flags::parse(); usage error for an invalid shape
    static std::vector<std::string> names();      // "--model", ...
    ExpertFlags experts;

  private:
    std::string model_ = "tiny";
    std::optional<int64_t> layers_, hidden_, heads_, kv_heads_, ffn_, vocab_, head_dim_;
    Latent latent_;
    std::optional<bool> qkv_bias_, qk_norm_, sinks_, multi_token_;
    int64_t window_ = 0, window_every_ = 1;
    bool tied_ = false;
};

// The command line of a chapter: the shared flags, and those that the chapter adds.
class CommandLine : public Flags {
  public:
    CommandLine(const std::string& description, TrainOptions& options);

    void parse(int argc, char** argv);       // usage error for invalid values
    void check_batches(int64_t data_ranks);  // usage error if the global batch is not divisible

    // Flags whose values are paths. Before anything is opened, parse() checks that no output is also an input or
    // another output, and that outputs can be written. files: the names that will be written if the path is a folder.
    // text: "FILE.csv: what it is" shows FILE.csv as the value in --help.
    Flag add_output(const std::string& flag, std::string& path, const std::string& text,
                    std::vector<std::string> files = {});
    Flag add_output(OptionalOutput& file, const std::string& text);
    Flag add_input(const std::string& flag, std::string& path, const std::string& text);  // file or folder

  private:
    struct PathFlag {
        std::string flag;
        const std::string* path;
        bool output;
        std::vector<std::string> files;
    };
    Flag add_path(const std::string& flag, std::string& path, const std::string& text);
    LlamaConfig model_shape() const;
    void add_notes();
    void check_path_flags() const;

    std::vector<PathFlag> path_flags_;
    TrainOptions& options_;
    ModelFlags model_;
};

}  // namespace train70b
