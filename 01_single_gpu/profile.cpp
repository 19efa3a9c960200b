#include "01_single_gpu/profile.h"

#include <ctime>
#include <nlohmann/json.hpp>

#include "01_single_gpu/ops.h"

namespace train70b {

namespace {
double cpu_seconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}
}  // namespace

Profile& profile() {
    static Profile instance;
    return instance;
}

std::string Profile::chrome_trace() const {
    nlohmann::ordered_json trace;
    trace["traceEvents"] = nlohmann::ordered_json::array();
    for (const Event& event : events)
        trace["traceEvents"].push_back({{"name", event.name},
                                        {"cat", event.category},
                                        {"ph", "X"},
                                        {"ts", event.begin * 1e6},
                                        {"dur", event.seconds * 1e6},
                                        {"pid", this_rank},
                                        {"tid", 0}});
    return trace.dump(1) + "\n";
}

Span::Span(const char* name, const char* category, double flops, double bytes)
    : name_(name), category_(category), flops_(flops), bytes_(bytes) {
    if (!profile().on()) return;
    begin_ = now_seconds();
    cpu_begin_ = cpu_seconds();
}

Span::~Span() {
    Profile& p = profile();
    if (begin_ < 0 || !p.on()) return;
    if (p.wait_for == Device::cuda) synchronize(Device::cuda);
    const double seconds = now_seconds() - begin_;
    if (p.events_on) p.events.push_back({name_, category_, begin_, seconds});
    if (p.sums_on && std::string_view(category_) == "op") {
        Profile::Sum& sum = p.sums[name_];
        ++sum.calls;
        sum.seconds += seconds;
        sum.cpu_seconds += cpu_seconds() - cpu_begin_;
        sum.flops += flops_;
        sum.bytes += bytes_;
    }
}

std::optional<double> peak_flops([[maybe_unused]] Device device, [[maybe_unused]] DType dtype) {
#if TRAIN70B_CUDA
    struct Peak {
        const char* name;  // part of the device's name
        double bf16, fp32;
    };
    static constexpr Peak kPeaks[] = {
        {"B200", 2250e12, 80e12}, {"H200", 989e12, 67e12},   {"H100 PCIe", 756e12, 51e12}, {"H100 NVL", 835e12, 60e12},
        {"H100", 989e12, 67e12},  {"A100", 312e12, 19.5e12}, {"L40S", 362e12, 91.6e12}};
    if (device != Device::cuda) return {};
    const std::string name = cuda_info().name;
    for (const Peak& peak : kPeaks)
        if (name.find(peak.name) != std::string::npos) return dtype == DType::bf16 ? peak.bf16 : peak.fp32;
#endif
    return {};
}

}  // namespace train70b
