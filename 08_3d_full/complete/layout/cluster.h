#pragma once
// A cluster as a file: the device, the node, the network. Whole training steps are simulated on it (plan/simulate.h);
// plan/tp_efficiency.h needs its links only. Examples: 08_3d_full/plan/clusters/*.json, links.json beside this file.
#include <string_view>

#include "08_3d_full/complete/layout/device_model.h"

namespace train70b {

struct ClusterModel {
    std::string name;
    DeviceModel device;
    int64_t nodes = 1, gpus_per_node = 8;
    struct Link {
        double bytes_per_s = 0;  // that a rank sends while it receives as much, as reached; 0: there is no such link
        double seconds = 0;      // of a hop, before the first byte
        std::string name;        // "NVLink 4"
    };
    Link nvlink;                  // of one device, inside a node
    bool nvls = false;            // its switches add (NVLink SHARP)
    Link rail;                    // of one network adapter
    int64_t rails = 8;            // adapters per node
    double oversubscription = 1;  // of the network above a node's adapters
    int64_t cores = 0;            // CPU ranks: cores of a node that its ranks share; 0: every rank has its own device
    bool one_machine = false;     // the nodes are parts of one machine: all ranks share these cores
    Link host;                    // of one rank through host memory: messages of MPI, sums of host numbers
    std::string all_reduce;       // CPU ranks: --all-reduce of the run, not of the file

    int64_t devices() const { return nodes * gpus_per_node; }
};

// The text or the file of a cluster. where, flag: "--simulate". Usage error "--simulate FILE: rail.bytes_per_s: must be
// above 0" for a value, "--simulate FILE: ..." for what is no such file.
ClusterModel parse_cluster(std::string_view text, const std::string& where);
ClusterModel read_cluster(const std::string& path, const std::string& flag);

// The same cluster with as many nodes as this many devices need (with fewer than a node has: a part of one node). Usage
// error if that is more than one node and there is no rail. where: "--gpus 16".
ClusterModel resized(ClusterModel cluster, int64_t devices, const std::string& where);

}  // namespace train70b
