#include "03_zero/complete/offload.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>

#include "01_single_gpu/core/platform/platform.h"
#include "01_single_gpu/core/say.h"

namespace train70b {

HostCopy::HostCopy(Tensor to, const Tensor& from) {
#if TRAIN70B_CUDA
    if (to.device() == Device::cuda || from.device() == Device::cuda) {
        const CopyKind kind = from.device() == Device::cuda ? CopyKind::to_host : CopyKind::to_device;
        on_device_ = std::make_shared<CudaCopy>(to.raw(), from.raw(), from.bytes(), kind);
        to_ = to, from_ = from;
        return;
    }
#endif
    copy(to, from);
}
void HostCopy::host_waits() {
#if TRAIN70B_CUDA
    if (on_device_) on_device_->host_waits();
#endif
}
void HostCopy::device_waits() {
#if TRAIN70B_CUDA
    if (on_device_) on_device_->stream_waits();
#endif
}

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

std::shared_ptr<void> map_file(const std::string& folder, int64_t bytes) {
    std::string path = std::filesystem::path(folder) / "train70b-XXXXXX";
    const size_t size = size_t(std::max<int64_t>(bytes, 1));
    void* memory = MAP_FAILED;
    if (const int file = ::mkstemp(path.data()); file >= 0) {
        ::unlink(path.c_str());
        if (platform::reserve(file, int64_t(size)))  // otherwise a full disk would show as SIGBUS, in the update
            memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        ::close(file);
    }
    if (memory == MAP_FAILED)
        usage_error("--offload-dir {}: {} cannot be mapped there: {} (must be a writable folder on a disk with room)",
                    folder, human_bytes(double(bytes)), std::strerror(errno));
    return {memory, [size](void* pages) { ::munmap(pages, size); }};
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
