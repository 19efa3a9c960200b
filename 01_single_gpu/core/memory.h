#pragma once
// The memory ledger: every allocation is booked under one kind, so that the tables of this course are measured.
// Shapes and dtypes do not depend on the device: params, grads, optimizer and activations of a run on a laptop are
// those of the run on a GPU, byte for byte. (comm and workspace do depend on it.) host is what has left the device
// (chapter 03): it counts in no total, and is shown only where there is some.
#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace train70b {

enum class Memory : uint8_t { params, grads, optimizer, activations, comm, workspace, host };
inline constexpr int kMemoryKinds = 7, kDeviceMemoryKinds = 6;
inline constexpr std::array<const char*, kMemoryKinds> kMemoryNames = {
    "params", "grads", "optimizer", "activations", "comm", "workspace", "host"};

using MemoryBytes = std::array<int64_t, kMemoryKinds>;  // indexed by Memory

struct MemoryPeak {
    MemoryBytes kind{};  // the highest bytes of each kind
    int64_t total = 0;   // the highest sum on the device: at most the sum of the above, which peak at different times

    void merge(const MemoryPeak& other);
};

class MemoryLedger {
  public:
    struct Sample {
        double seconds;     // since the timeline began
        std::string phase;  // what the trainer was doing
        MemoryBytes now;
    };

    void book(Memory kind, int64_t bytes);  // bytes < 0: a release
    const MemoryBytes& now() const { return now_; }
    int64_t total() const { return total_; }
    const MemoryPeak& peak() const { return peak_; }  // since reset_peak
    void reset_peak();

    void start_timeline();  // from here on every booking is kept
    void phase(std::string name) { phase_ = std::move(name); }
    const std::vector<Sample>& timeline() const { return timeline_; }
    std::string timeline_csv() const;  // event,seconds,phase,params,...,workspace,total: one line per booking

  private:
    MemoryBytes now_{};
    int64_t total_ = 0;
    MemoryPeak peak_;
    bool keep_timeline_ = false;
    double timeline_start_ = 0;
    std::string phase_ = "start";
    std::vector<Sample> timeline_;
};

MemoryLedger& ledger();  // this rank's

}  // namespace train70b
