#include "08_3d_full/plan/cluster.h"

#include <filesystem>

#include "01_single_gpu/core/files.h"

namespace train70b {

std::string cluster_path(const std::string& name) {
    std::error_code error;
    if (std::filesystem::exists(name, error) || name.find('/') != std::string::npos) return name;
    for (const char* ending : {"", ".json"}) {
        const std::string known = repository_file("08_3d_full/clusters/" + name + ending);
        if (!name.empty() && std::filesystem::is_regular_file(known, error)) return known;
    }
    return name;
}

}  // namespace train70b
