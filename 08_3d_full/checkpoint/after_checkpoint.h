#pragma once
// --after-checkpoint: a command that rank 0 runs beside the training, for each checkpoint that is complete.
#include <future>
#include <map>

#include "01_single_gpu/complete/trainer.h"

namespace train70b {

// One at a time. Of the folders that come meanwhile the newest of each kind waits; others are reported as skipped. A
// command that fails is reported, and no error.
class AfterCheckpoint {
  public:
    AfterCheckpoint(const std::string& command, Trainer& trainer) : command_(command), trainer_(trainer) {}

    void complete(const std::string& folder);  // COMMAND gets it in TRAIN70B_CHECKPOINT; its output is not shown
    void look(bool wait = false);              // call it between steps; wait: until nothing is left to do

  private:
    void note(const std::string& what, const std::string& folder, const nlohmann::ordered_json& status);

    const std::string command_;
    Trainer& trainer_;
    std::future<std::pair<int, std::string>> running_;  // exit status, the last line on stderr
    std::string folder_;                                // of the one that runs
    std::map<char, std::string> waiting_;               // by kind: "s" of step-12, "w" of weights-12
};

}  // namespace train70b
