#pragma once
// Offload (Ren et al. 2021, ZeRO-Offload): the optimizer and its states live in host memory.
#include "03_zero/flat_param.h"

namespace train70b {

// A copy between the device and the host, on a stream of its own where there is a device. On the CPU: done at once.
class HostCopy {
  public:
    HostCopy(Tensor to, const Tensor& from);
    ~HostCopy();
    HostCopy(HostCopy&&) noexcept;
    void host_waits();    // the host may read, or reuse, the memory
    void device_waits();  // what is issued to the device from here on sees the copy

  private:
    struct OnDevice;
    std::unique_ptr<OnDevice> on_device_;
};

Device host_of(Device device);  // where offloaded shards live; of meta tensors: meta

// Updates the shards on the host: gradients come down and parameters go up while the units between them are updated.
void update_on_host(std::vector<FlatParam>& flats, int64_t step, double lr, double grad_scale, Device device);

int64_t available_host_memory();  // bytes that can be allocated without swapping (Linux)

}  // namespace train70b
