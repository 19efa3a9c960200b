#pragma once
// A registry is a vector of entries, each with a `name`: the single place to add an algorithm, a schedule or a recipe.
// Flags, checks, tests, tables and plots iterate over it.
#include <string>
#include <vector>

#include "01_single_gpu/core/check.h"

namespace train70b {

// An entry that is no more than a value.
template <class T>
struct Named {
    const char* name;
    T value;
};

template <class Entry>
std::vector<std::string> names_of(const std::vector<Entry>& registry) {
    std::vector<std::string> names;
    for (const Entry& entry : registry) names.push_back(entry.name);
    return names;
}

// Help text of a flag that selects an entry: TEXT, then one line "NAME: DESCRIPTION" per entry.
template <class Entry>
std::string help_of(std::string text, const std::vector<Entry>& registry) {
    for (const Entry& entry : registry) text += std::string("\n") + entry.name + ": " + entry.description;
    return text;
}

// The entry with this name. Usage error, naming the flag and listing the registry, for an unknown name.
template <class Entry>
const Entry& find_entry(const std::vector<Entry>& registry, const std::string& flag, const std::string& name) {
    std::string known;
    for (const Entry& entry : registry) {
        if (name == entry.name) return entry;
        known += std::string(known.empty() ? "" : " ") + entry.name;
    }
    usage_error("{} {}: unknown; must be one of {}", flag, name, known);
}

// The items of "a,b,c"; at least one.
inline std::vector<std::string> items_of(const std::string& list, char separator = ',') {
    std::vector<std::string> items;
    for (size_t begin = 0, end = 0; end != list.npos; begin = end + 1)
        items.push_back(list.substr(begin, (end = list.find(separator, begin)) - begin));
    return items;
}

}  // namespace train70b
