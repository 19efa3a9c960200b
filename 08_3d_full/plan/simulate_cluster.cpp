// The simulation on a cluster file's devices and links.
#include <algorithm>
#include <memory>

#include "08_3d_full/plan/simulate.h"

namespace train70b {

SimulatedStep simulate_step(const Recording& recording, const ClusterModel& cluster, const SimulationOptions& options) {
    const auto network = std::make_shared<Network>(cluster, recording.ranks);
    SimulationModel model{.op_seconds = [device = cluster.device](const OpCall& op) { return op_seconds(device, op); },
                          .transfer = [network](const CommCall& call, const std::vector<int64_t>& members,
                                                int64_t sender) { return network->transfer(call, members, sender); },
                          .host_s = cluster.device.host_s,
                          .streams = cluster.device.streams,
                          .cores = cluster.cores,
                          .ranks_per_node = cluster.gpus_per_node};
    for (int link = 0; link < network->links(); ++link) model.links.push_back(network->bytes_per_s(link));
    return simulate_step(recording, model, options);
}

}  // namespace train70b
