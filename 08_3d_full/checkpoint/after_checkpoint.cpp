#include "08_3d_full/checkpoint/after_checkpoint.h"

#include <filesystem>
#include <nlohmann/json.hpp>

#include "05_pipeline/complete/plot_script.h"

namespace train70b {

void AfterCheckpoint::complete(const std::string& folder) {
    if (command_.empty()) return;
    std::string& waiting = waiting_[std::filesystem::path(folder).filename().string()[0]];
    if (!waiting.empty()) note(fmt::format("skipped, while that for {} runs", folder_), waiting, nullptr);
    waiting = folder;
    look();
}

void AfterCheckpoint::look(bool wait) {
    do {
        if (running_.valid()) {
            if (!wait && running_.wait_for(std::chrono::seconds(0)) != std::future_status::ready) return;
            const auto [status, said] = running_.get();
            note(status == 0 ? "" : fmt::format("exit status {}: {}", status, said), folder_, status);
        }
        if (waiting_.empty()) return;
        folder_ = waiting_.extract(waiting_.begin()).mapped();
        running_ = std::async(std::launch::async, [this]() -> Ended {
            const std::string variable = "TRAIN70B_CHECKPOINT=" + std::filesystem::absolute(folder_).string();
            try {
                std::string said;
                const int status = run_program({"env", variable, "/bin/sh", "-c", command_}, said);
                return {status, said};
            } catch (const std::runtime_error& error) { return {127, error.what()}; }
        });
    } while (wait);
}

void AfterCheckpoint::note(const std::string& what, const std::string& folder, const nlohmann::ordered_json& status) {
    const nlohmann::ordered_json event = {{"event", "after_checkpoint"}, {"folder", folder}, {"status", status}};
    if (what.empty()) return trainer_.record(event);
    trainer_.note(fmt::format("warning: --after-checkpoint for {}: {}", folder, what), event);
}

}  // namespace train70b
