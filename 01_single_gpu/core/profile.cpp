#include "01_single_gpu/core/profile.h"

#include <ctime>

#include "01_single_gpu/core/cuda_device.h"
#include "01_single_gpu/core/recorder.h"

namespace train70b {

static double cpu_seconds() {
    timespec now{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return double(now.tv_sec) + 1e-9 * double(now.tv_nsec);
}

Profile& profile() {
    static Profile instance;
    return instance;
}

Span::Span(const char* name, const char* category, double flops, double bytes, const OpSizes& sizes)
    : name_(name), category_(category), flops_(flops), bytes_(bytes) {
    if (recorder && std::string_view(category) == "op") recorder->op(name, sizes.dims, sizes.dtype, flops, bytes);
    if (!profile().on()) return;
    begin_ = now_seconds();
    cpu_begin_ = cpu_seconds();
#if TRAIN70B_CUDA
    if (profile().sums_on && profile().device == Device::cuda && std::string_view(category) == "op")
        timer_ = std::make_shared<CudaTimer>();
#endif
}

Span::~Span() {
    Profile& p = profile();
    if (begin_ < 0 || !p.on()) return;
    const double seconds = now_seconds() - begin_;
    if (p.events_on) p.events.push_back({name_, category_, begin_, seconds, std::move(detail_)});
    if (p.sums_on && std::string_view(category_) == "op") {
        Profile::Sum& sum = p.sums[name_];
        ++sum.calls;
#if TRAIN70B_CUDA
        if (timer_) {
            timer_->stop();
            p.timed.emplace_back(name_, [timer = std::move(timer_)] { return timer->seconds(); });
        } else
#endif
            sum.seconds += seconds;
        sum.cpu_seconds += cpu_seconds() - cpu_begin_;
        sum.flops += flops_;
        sum.bytes += bytes_;
    }
}

namespace {
// TFLOP/s from the data sheets: bf16 tensor cores without sparsity (half of the printed figure), and fp32 without
// tensor cores. Names must match exactly: an H200 NVL is not an H200, and a MIG slice is neither.
struct Peak {
    std::string_view name;  // as CUDA reports it
    double bf16, fp32;      // 0: unknown
};
constexpr Peak kPeaks[] = {
    {"NVIDIA B300 SXM6 AC", 2250, 75},
    {"NVIDIA GB300", 2500, 0},
    {"NVIDIA B200", 2250, 75},
    {"NVIDIA GB200", 2500, 80},
    {"NVIDIA H200", 989, 67},
    {"NVIDIA H200 NVL", 835, 60},
    {"NVIDIA GH200 480GB", 989, 67},
    {"NVIDIA GH200 144G HBM3e", 989, 67},
    {"NVIDIA H100 80GB HBM3", 989, 67},
    {"NVIDIA H100 NVL", 835, 60},
    {"NVIDIA H100 PCIe", 756, 51},
    {"NVIDIA A100-SXM4-40GB", 312, 19.5},
    {"NVIDIA A100-SXM4-80GB", 312, 19.5},
    {"NVIDIA A100-PCIE-40GB", 312, 19.5},
    {"NVIDIA A100 80GB PCIe", 312, 19.5},
    {"NVIDIA L40S", 362, 91.6},
};

std::string name_of_device(Device device) { return device == Device::cuda ? cuda_info().name : ""; }
}  // namespace

std::string device_text(Device device) {
    return device == Device::cuda ? fmt::format("{}, {} visible", cuda_info().name, cuda_device_count()) : "";
}

std::string versions_text(Device device) { return device == Device::cuda ? cuda_versions() : ""; }

std::optional<DeviceMemory> device_memory(Device device) {
    return device == Device::cuda ? std::make_optional(cuda_memory()) : std::nullopt;
}

std::optional<double> peak_flops_of(std::string_view device_name, DType dtype) {
    for (const Peak& peak : kPeaks) {
        if (peak.name != device_name) continue;
        const double value = dtype == DType::bf16 ? peak.bf16 : dtype == DType::f32 ? peak.fp32 : 0;
        if (value > 0) return 1e12 * value;
    }
    return {};
}

std::string mfu_text_of(std::string_view device_name, DType dtype, bool documents) {
    const auto peak = peak_flops_of(device_name, dtype);
    if (!peak) return "";
    return fmt::format(
        "mfu: model FLOPs per second ({}{}) of {:.4g} TFLOP/s, the dense {} peak in the data sheet of {}", kModelFlops,
        documents ? fmt::format("; {}", kDocumentFlops) : "", *peak / 1e12, name_of(dtype), device_name);
}

std::optional<double> peak_flops(Device device, DType dtype) { return peak_flops_of(name_of_device(device), dtype); }
std::string mfu_text(Device device, DType dtype, bool documents) {
    return mfu_text_of(name_of_device(device), dtype, documents);
}

}  // namespace train70b
