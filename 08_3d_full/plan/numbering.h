#pragma once
#include <cstddef>
#include <cstdint>
#include <map>

namespace train70b {

// Numbers equal values alike, from 0.
template <class T>
class Numbering {
  public:
    int32_t of(const T& value) { return numbers_.insert({value, int32_t(numbers_.size())}).first->second; }
    size_t size() const { return numbers_.size(); }

  private:
    std::map<T, int32_t> numbers_;
};

}  // namespace train70b
