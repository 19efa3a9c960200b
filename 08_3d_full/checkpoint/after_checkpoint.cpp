#include "08_3d_full/checkpoint/after_checkpoint.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "05_pipeline/complete/plot_script.h"

namespace train70b {

static char kind_of(const std::string& folder) { return folder[folder.rfind('/') + 1]; }

void AfterCheckpoint::complete(const std::string& folder) {
    if (command_.empty()) return;
    std::string& waiting = waiting_[kind_of(folder)];
    if (!waiting.empty()) note(fmt::format("skipped, while that for {} runs", folder_), waiting, nullptr);
    waiting = folder;
}

void AfterCheckpoint::look(bool wait) {
    do {
        if (running_.valid()) {
            if (!wait && running_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return;
            const auto [status, said] = running_.get();
            note(status == 0 ? "" : fmt::format("exit status {}: {}", status, said), folder_, status);
        }
        if (waiting_.empty()) return;
        auto next = waiting_.begin();
        if (waiting_.size() > 1 && next->first == kind_of(folder_)) ++next;  // the kinds take turns
        folder_ = waiting_.extract(next).mapped();
        running_ = std::async(std::launch::async, [command = command_, folder = folder_] {
            const std::string variable = "TRAIN70B_CHECKPOINT=" + std::filesystem::absolute(folder).string();
            std::pair<int, std::string> ended{127, ""};
            try {
                ended.first = run_child({"env", variable, "/bin/sh", "-c", command}, ended.second);
            } catch (const std::runtime_error& error) { ended.second = error.what(); }
            return ended;
        });
    } while (wait);
}

void AfterCheckpoint::note(const std::string& what, const std::string& folder, const nlohmann::ordered_json& status) {
    const nlohmann::ordered_json event = {{"event", "after_checkpoint"}, {"folder", folder}, {"status", status}};
    if (what.empty()) return trainer_.record(event);
    trainer_.note(fmt::format("warning: --after-checkpoint for {}: {}", folder, what), event);
}

}  // namespace train70b
