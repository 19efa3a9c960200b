#pragma once
// Profiling: each op and each phase of a step opens a span; `--bench` sums spans by name, `--trace` writes them as
// Chrome trace events (chrome://tracing, ui.perfetto.dev). With both off, a span costs one branch.
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "01_single_gpu/core/files.h"
#include "01_single_gpu/core/tensor.h"

namespace train70b {

struct Profile {
    struct Sum {
        int64_t calls = 0;
        double seconds = 0, flops = 0, bytes = 0;
        double cpu_seconds = 0;  // of this thread, without the time of other processes
    };
    struct Event {
        std::string name, category;
        double begin, seconds;  // begin: now_seconds()
        std::string detail;     // of a collective: which call
    };
    bool sums_on = false, events_on = false;
    Device device = Device::cpu;      // cuda: an op's seconds are those between two events on its stream, see collect()
    std::map<std::string, Sum> sums;  // category "op" only
    std::vector<std::pair<std::string, std::function<double()>>> timed;  // ops whose seconds are not in the sums yet
    std::vector<Event> events;

    bool on() const { return sums_on || events_on; }
    void collect() {  // waits for the device, and adds the seconds of what it has run
        for (const auto& [name, seconds] : std::exchange(timed, {})) sums[name].seconds += seconds();
    }
};

class CudaTimer;
Profile& profile();

// Replaces the profile for the lifetime of the object, for separate measurements.
class ProfileScope {
  public:
    explicit ProfileScope(Profile during) : before_(std::exchange(profile(), std::move(during))) {}
    ~ProfileScope() { profile() = std::move(before_); }
    ProfileScope(const ProfileScope&) = delete;

  private:
    Profile before_;
};

// The sizes by which the cost of a product or of attention is estimated (08_3d_full/plan/sequence.h).
struct OpSizes {
    std::initializer_list<int64_t> dims;
    DType dtype = DType::f32;
};

class Span {
  public:
    // flops: floating-point operations; bytes: the minimum that must be read and written.
    explicit Span(const char* name, const char* category = "op", double flops = 0, double bytes = 0,
                  const OpSizes& sizes = {});
    ~Span();
    void detail(const std::string& text) {
        if (begin_ >= 0) detail_ = text;
    }
    Span(const Span&) = delete;

  private:
    const char *name_, *category_;
    double flops_, bytes_, begin_ = -1, cpu_begin_ = 0;
    std::string detail_;
    std::shared_ptr<CudaTimer> timer_;
};

// "NVIDIA H200, 8 visible": the name that CUDA reports, and how many devices there are; empty on the CPU. So is what it
// and the libraries can do.
std::string device_text(Device device);
std::string versions_text(Device device);
std::optional<DeviceMemory> device_memory(Device device);  // now; empty on the CPU

// Dense peak FLOP/s for matrix products in this dtype from the device's data sheet, by the name that CUDA reports;
// empty if unknown (any CPU, a name that is not in the table, fp64). FP8 runs are also measured against the bf16 peak,
// because attention, the head and the embedding stay in bf16, and so that all recipes are comparable.
std::optional<double> peak_flops_of(std::string_view device_name, DType dtype);
std::optional<double> peak_flops(Device device, DType dtype);

// The definition of MFU, printed with every MFU; empty if the peak is unknown. See flops_per_token (config.h).
inline constexpr const char* kModelFlops =
    "6 per parameter without the input embedding + 6 L H D T for causal attention, per token; no recomputation";
// With documents (data.h) instead of the last summand.
inline constexpr const char* kDocumentFlops =
    "inside documents and windows 12 L H D for every pair of a query and a key that it sees";
std::string mfu_text_of(std::string_view device_name, DType dtype, bool documents = false);
std::string mfu_text(Device device, DType dtype, bool documents = false);

}  // namespace train70b
