#include "02_data_parallel/runtime/backend_over_mpi.h"

#include <unistd.h>

#include <algorithm>

#include "01_single_gpu/core/say.h"

namespace train70b {

// A node is a machine, told by its name, or so many neighbours among all ranks; its number is its first rank here.
std::vector<int> BackendOverMpi::nodes() {
    if (nodes_.empty()) {
        char machine[256] = {};
        ::gethostname(machine, sizeof machine - 1);
        const std::vector<std::string> names =
            gather_text(ranks_per_node > 0 ? std::to_string(this_rank / ranks_per_node) : machine);
        for (const std::string& name : names)
            nodes_.push_back(int(std::find(names.begin(), names.end(), name) - names.begin()));
    }
    return nodes_;
}

}  // namespace train70b
