#pragma once
// A registry is a vector of entries, each with a `name`: the one place to add an algorithm, a schedule or a recipe. Flags,
// checks, tests, tables and plots iterate over it.
#include <string>
#include <vector>

#include "01_single_gpu/core/check.h"

namespace train70b {

template <class Entry>
std::vector<std::string> names_of(const std::vector<Entry>& registry) {
    std::vector<std::string> names;
    for (const Entry& entry : registry) names.push_back(entry.name);
    return names;
}

// The entry of that name; usage error, naming the flag and listing the registry, for an unknown one.
template <class Entry>
const Entry& find_entry(const std::vector<Entry>& registry, const std::string& flag, const std::string& name) {
    std::string known;
    for (const Entry& entry : registry) {
        if (name == entry.name) return entry;
        known += std::string(known.empty() ? "" : " ") + entry.name;
    }
    usage_error("{} {}: unknown; must be one of {}", flag, name, known);
}

}  // namespace train70b
