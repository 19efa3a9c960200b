#include "02_data_parallel/runtime/trainer_runtime.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "01_single_gpu/io/report.h"
#include "02_data_parallel/runtime/watchdog.h"

namespace train70b {

void sum_norms(Trainer& trainer, const Comm& ranks) {
    for (auto* norm : {&trainer.gradient_norm, &trainer.parameter_norm})
        *norm = [ranks, mine = *norm] { return std::sqrt(ranks.sum(std::pow(mine(), 2))); };
}

void write_files(const Comm& world, const std::function<void()>& files) {
    const Watchdog::Pause pause(*watchdog);
    files();
    world.barrier().wait();
}

void report_communication(Trainer& trainer, const Comm& world) {
    trainer.ranks = world.size();
    trainer.start_step = [world, inner = trainer.start_step] {
        world.take_stats();  // what lies between two steps belongs to neither
        if (inner) inner();
    };
    trainer.writing = [world](const std::function<void()>& files) { write_files(world, files); };
    trainer.finish_report = [world](StepReport& report) {
        for (const auto& [name, entry] : world.take_stats().operations) {
            report.comm_bytes[name] = entry.bytes;
            report.comm_s += entry.seconds;
        }
    };
    trainer.memory_per_rank = [world](const MemoryPeak& peak) {
        auto list = nlohmann::ordered_json::array();
        if (std::string_view(world.backend()) == "fake") {
            list.push_back(to_json(peak));
            list.back()["rank"] = world.rank();
            return list;
        }
        std::vector<double> mine(peak.kind.begin(), peak.kind.end());  // whole numbers, exact up to 2^53 bytes
        mine.push_back(double(peak.total));
        const std::vector<double> all = world.gather(mine);
        for (int rank = 0; rank < world.size(); ++rank) {
            MemoryPeak other;
            const auto begin = all.begin() + rank * int64_t(mine.size());
            for (int i = 0; i < kMemoryKinds; ++i) other.kind[i] = int64_t(begin[i]);
            other.total = int64_t(begin[kMemoryKinds]);
            list.push_back(to_json(other));
        }
        return list;
    };
}

}  // namespace train70b
