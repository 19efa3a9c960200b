#include "03_zero/complete/offload.h"

#include <deque>
#include <fstream>

namespace train70b {

#if TRAIN70B_CUDA
struct HostCopy::OnDevice {
    CudaCopy copy;
    Tensor to, from;  // kept alive until the copy has ended
};

HostCopy::HostCopy(Tensor to, const Tensor& from) {
    if (to.device() != Device::cuda && from.device() != Device::cuda) {
        copy(to, from);
        return;
    }
    const CopyKind kind = from.device() == Device::cuda ? CopyKind::to_host : CopyKind::to_device;
    on_device_.reset(new OnDevice{CudaCopy(to.raw(), from.raw(), from.bytes(), kind), to, from});
}
void HostCopy::host_waits() {
    if (on_device_) on_device_->copy.host_waits();
}
void HostCopy::device_waits() {
    if (on_device_) on_device_->copy.stream_waits();
}
#else
struct HostCopy::OnDevice {};

HostCopy::HostCopy(Tensor to, const Tensor& from) { copy(to, from); }
void HostCopy::host_waits() {}
void HostCopy::device_waits() {}
#endif
HostCopy::~HostCopy() = default;
HostCopy::HostCopy(HostCopy&&) noexcept = default;

Device host_of(Device device) { return device == Device::meta ? Device::meta : Device::cpu; }

void update_on_host(std::vector<FlatParam>& flats, int64_t step, double lr, double grad_scale, Device device) {
    std::deque<HostCopy> down, up;
    for (FlatParam& flat : flats)
        if (flat.grad_shard) down.emplace_back(flat.host_grads, flat.grad_shard);
    for (FlatParam& flat : flats) {
        if (!down.empty()) {
            down.front().host_waits();
            down.pop_front();
        }
        flat.optimizer->update(step, lr, grad_scale);
        if (flat.param_shard) up.emplace_back(flat.param_shard, flat.host_params);
    }
    for (HostCopy& copy : up) copy.device_waits();
    synchronize(device);  // until the host may write its buffers again
}

int64_t available_host_memory() {
    std::ifstream file("/proc/meminfo");
    std::string name, unit;
    for (int64_t kib = 0; file >> name >> kib;) {
        std::getline(file, unit);
        if (name == "MemAvailable:") return kib * 1024;
    }
    return INT64_MAX;
}

}  // namespace train70b
