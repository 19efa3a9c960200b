#pragma once
// The memory ledger: every allocation is booked under one kind, so memory tables are measured. Shapes and dtypes do not
// depend on the device: the params, grads, optimizer and activations of a run on a laptop equal those on a GPU byte for
// byte. (comm and workspace depend on the device.) `host` and `disk` are offloaded: not part of the total, and
// shown only if there is some.
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace train70b {

enum class Memory : uint8_t { params, grads, optimizer, activations, comm, workspace, host, disk };
inline constexpr int kMemoryKinds = 8, kDeviceMemoryKinds = 6;
inline constexpr std::array<const char*, kMemoryKinds> kMemoryNames = {
    "params", "grads", "optimizer", "activations", "comm", "workspace", "host", "disk"};

using MemoryBytes = std::array<int64_t, kMemoryKinds>;  // indexed by Memory

struct MemoryPeak {
    MemoryBytes kind{};  // the peak of each kind
    int64_t total = 0;   // the peak of their sum on the device; kinds peak at different times

    void merge(const MemoryPeak& other);
    MemoryPeak above(const MemoryBytes& held) const;  // without what was held before the run began
};

// What the device itself counts, of which the ledger has only the tensors.
struct DeviceMemory {
    int64_t used = 0;  // bytes that are in use on the device, by all processes
    // Of them, outside of this process's pool for tensors, which keeps what it has released: the context, the kernels'
    // code, NCCL's buffers, other processes.
    int64_t other = 0;
};

class MemoryLedger {
  public:
    struct Sample {
        double seconds;     // since start_timeline()
        std::string phase;  // of the training step
        MemoryBytes now;
        int64_t total;
    };

    void book(Memory kind, int64_t bytes);  // bytes < 0: a release
    const MemoryBytes& now() const { return now_; }
    int64_t total() const { return total_; }
    const MemoryPeak& peak() const { return peak_; }  // since reset_peak
    void reset_peak() { peak_ = {now_, total_}; }

    void start_timeline();  // records every booking from here on
    void phase(std::string name);
    // event,seconds,phase,params,...,workspace,total: one line per booking since the last call, before them a head
    // once; host, disk: if there has been some before the first call.
    std::string take_timeline();

  private:
    MemoryBytes now_{};
    int64_t total_ = 0;
    MemoryPeak peak_;
    bool keep_timeline_ = false;
    int64_t timeline_events_ = 0;  // taken
    int timeline_kinds_ = 0;       // that the head names
    double timeline_start_ = 0;
    std::string phase_ = "start";
    std::vector<Sample> timeline_;
};

MemoryLedger& ledger();  // this rank's

}  // namespace train70b
