#pragma once
// The trainer's groups and runtime (01_single_gpu/complete/roles.h) over Comm.
#include "01_single_gpu/complete/report/report.h"
#include "01_single_gpu/complete/roles.h"
#include "02_data_parallel/comm.h"
#include "02_data_parallel/runtime/trace_merge.h"

namespace train70b {

// A group of the trainer, over a Comm.
GroupPtr group_of(const Comm& comm);

// Rank 0 writes what takes long; the others wait for it, and meanwhile the watchdog does not count.
void write_files(const Comm& world, const std::function<void()>& body);

// The memory of all ranks, in rank order. Collective.
std::vector<MemoryPeak> gather_peaks(const Comm& ranks, const MemoryPeak& local);

// Bytes that this rank sent in a step by the operations whose name begins and ends so, but for scalars (losses, norms).
int64_t sent_bytes(const StepReport& step, const std::string& prefix = "", const std::string& suffix = "");

// Reports each step's communication, and in the summary the memory of all ranks.
class CommRuntime : public Runtime {
  public:
    explicit CommRuntime(const Comm& world) : world_(world) {}
    int64_t ranks() const override { return world_.size(); }
    void begin_step() override { world_.take_stats(); }  // what lies between two steps belongs to neither
    void end_step(StepReport& report) override;
    bool has_peers() const override { return world_.has_peers() && world_.size() > 1; }
    void write_files(const std::function<void()>& body) override { train70b::write_files(world_, body); }
    void start_trace() override;
    void merge_traces(GrowingFile* file, EventFile& events, const std::string& title) override;
    nlohmann::ordered_json memory_per_rank(const MemoryPeak& local) const override;

  private:
    const Comm world_;
    std::optional<TraceMerge> trace_;
};

}  // namespace train70b
