#pragma once
// The flags shared by all chapters: typed, checked, and written to the metrics file.
#include <map>
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
    ModelFlags() = default;
    ModelFlags(const ModelFlags&) = delete;       // replace_ refers to values_
    void add_to(Flags& flags);                    // under the heading "Model"; this outlives the flags
    LlamaConfig shape(const Flags& flags) const;  // after Flags::parse(); usage error for an invalid shape
    static std::vector<std::string> names();      // "--model", ...
    ExpertFlags experts;

  private:
    std::string model_ = "tiny";
    int64_t window_every_ = 1;
    LlamaConfig values_;                                                // of the flags
    std::map<std::string, std::function<void(LlamaConfig&)>> replace_;  // by flag: the preset's value by its own
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
    Flag add_output(OptionalOutput& file, const std::string& text) { return add_output(file.flag, file.path, text); }
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
    void check_path_flags() const;

    std::vector<PathFlag> path_flags_;
    TrainOptions& options_;
    ModelFlags model_;
};

}  // namespace train70b
