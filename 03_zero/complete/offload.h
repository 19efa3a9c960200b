#pragma once
// Offload (Ren et al. 2021, ZeRO-Offload): the optimizer and its states live in host memory; with nvme (Rajbhandari et
// al. 2021, ZeRO-Infinity) the states lie in files that are mapped into it, of which it holds what there is room for.
#include "03_zero/complete/flat_param.h"

namespace train70b {

// A copy between device and host, on its own stream if there is a device. On the CPU it is synchronous.
class HostCopy {
  public:
    HostCopy(Tensor to, const Tensor& from);
    HostCopy(HostCopy&&) = default;
    void host_waits();    // returns when the copy is complete: the host may read or reuse the memory
    void device_waits();  // later work on the device sees the copy

  private:
    std::shared_ptr<class CudaCopy> on_device_;  // null: it has been made
    Tensor to_, from_;                           // kept alive until then
};

Device host_of(Device device);  // where offloaded shards live; meta for meta tensors

// Updates the shards on the host. Copies of gradients to the host and of parameters to the device overlap the updates
// of other units.
void update_on_host(std::vector<FlatParam>& flats, int64_t step, double lr, double grad_scale, Device device);

// Memory of a new file in the folder, where it has no name: it vanishes with the last reference, or with the process.
// Usage error, naming --offload-dir, if it cannot be made or does not fit on the disk.
std::shared_ptr<void> map_file(const std::string& folder, int64_t bytes);

int64_t available_host_memory();  // bytes that can be allocated without swapping (Linux)

}  // namespace train70b
