#pragma once
// Where the time goes: each op and each phase of a step opens a span; `--bench` sums them by name, `--trace` writes
// them as Chrome trace events (chrome://tracing, ui.perfetto.dev). Both off: a span costs one branch.
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "01_single_gpu/files.h"
#include "01_single_gpu/tensor.h"

namespace train70b {

struct Profile {
    struct Sum {
        int64_t calls = 0;
        double seconds = 0, flops = 0, bytes = 0;
        double cpu_seconds = 0;  // of this thread: what another process on the same core took does not count
    };
    struct Event {
        std::string name, category;
        double begin, seconds;
    };
    bool sums_on = false, events_on = false;
    Device wait_for = Device::cpu;    // cuda: a span ends when its kernels have ended, so that sums mean something
    std::map<std::string, Sum> sums;  // category "op" only
    std::vector<Event> events;

    bool on() const { return sums_on || events_on; }
    std::string chrome_trace() const;  // JSON; one process per rank
};

Profile& profile();

class Span {
  public:
    // flops: floating-point operations; bytes: what has to be read and written at least once.
    explicit Span(const char* name, const char* category = "op", double flops = 0, double bytes = 0);
    ~Span();
    Span(const Span&) = delete;

  private:
    const char *name_, *category_;
    double flops_, bytes_, begin_ = -1, cpu_begin_ = 0;
};

// Dense peak of the device's data sheet in FLOP/s for products in this dtype; empty where it is not known (any CPU).
std::optional<double> peak_flops(Device device, DType dtype);

}  // namespace train70b
