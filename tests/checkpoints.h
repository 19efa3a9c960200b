#pragma once
// Runs of chapter 08 that write checkpoints, in a folder that all ranks share.
#include <nlohmann/json.hpp>

#include "08_3d_full/checkpoint/checkpoint.h"
#include "tests/composed.h"
#include "tests/files.h"

namespace train70b::test {

// A folder that all ranks share, gone at the end.
struct SharedFolder {
    std::optional<Folder> made;
    std::string path;
    SharedFolder() {
        if (this_rank == 0) made.emplace();
        path = made ? made->text() : std::string();
        std::vector<double> bytes(256);
        for (size_t i = 0; i < path.size(); ++i) bytes[i] = path[i];
        bytes = world().sum(bytes);
        path.clear();
        for (const double byte : bytes)
            if (byte > 0) path += char(byte);
    }
    std::string operator/(const std::string& name) const { return path + "/" + name; }
};

// A run of chapter 08 with checkpoints, from its first step to its last.
struct CheckpointedRun {
    TrainOptions options;
    CheckpointOptions checkpoint;
    nlohmann::ordered_json flags = nlohmann::ordered_json::object();
    CheckpointFolder folder;
    ComposedRun run;
    Checkpoints control;

    CheckpointedRun(const TrainOptions& o, const ParallelConfig& config, const CheckpointOptions& c,
                    const Comm& ranks = world(), RunControl* watching = nullptr)
        : options(o),
          checkpoint(c),
          folder(checkpoint, options, ComposedRun::validated(config, o, ranks), flags, ranks),
          run(options, ranks, config),
          control(folder, options, run.config, flags, run.session.data, run.session.trainer, ranks) {
        run.session.trainer.controls.push_back(&control);
        if (watching) run.session.trainer.controls.push_back(watching);
        run.session.trainer.run();
    }
    std::vector<double> history() const { return run.session.history(); }
    std::vector<double> weights() {  // of the whole model, on rank 0
        std::vector<double> list;
        for (const Param& param : all_params(options.model)) {
            const Tensor full = run.session.trainer.full(param, Which::data);
            if (!full) continue;
            const std::vector<double> part = values(full);
            list.insert(list.end(), part.begin(), part.end());
        }
        return list;
    }
};

// The steps of one run, which has ended when this returns.
inline std::vector<double> history_of(const TrainOptions& o, const ParallelConfig& config, const CheckpointOptions& c,
                                      const Comm& ranks = world()) {
    return CheckpointedRun(o, config, c, ranks).history();
}

}  // namespace train70b::test
