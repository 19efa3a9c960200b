#pragma once
// Several sources of data, each with a weight: from which of them a sample of the run comes, and which sample of that
// source it is.
//
// Slot n of an endless line goes to the first source if the fixed-point product n * w_0 passes a whole number there, so
// that the first n slots hold n * w_0 of them to within one; the slots left over are divided in the same way among the
// other sources. The number of a source's slots before any n is therefore a product, not a count, and a run can begin
// anywhere. Sample i of the run is a slot of its block of 64, in an order that the seed draws for each block: sources
// do not follow a rhythm that data-parallel ranks could fall into.
#include <cstdint>
#include <string>
#include <vector>

namespace train70b {

class Mixture {
  public:
    static constexpr int64_t kBlock = 64;  // samples: over whole blocks, weights are met to within a few samples

    explicit Mixture(const std::vector<double>& weights);  // at least one is positive; those of 0 are never drawn

    struct Draw {
        int64_t source = 0, sample = 0;  // the sample-th (from 0) that the source gives to the run
        bool operator==(const Draw&) const = default;
    };
    // A pure function of (seed, index), in constant time.
    Draw draw(uint64_t seed, int64_t index) const;

  private:
    // Of slot n: its source, and how many slots before it have the same one.
    Draw slot(uint64_t seed, int64_t n) const;

    std::vector<uint64_t> shares_;  // of what the sources before it leave, in units of 2^-32
};

// A part of --data PATH:WEIGHT,PATH:WEIGHT,...
struct WeightedPath {
    std::string path;
    double weight = 1;
};
// One path if it exists, or if nothing in it looks like a weight. Usage error for weights that are missing, negative,
// not finite, or do not sum to 1.
std::vector<WeightedPath> parse_mixture(const std::string& data);

// The shortest ends of the paths, in whole components, that tell them apart: "a/train.bin", "b/train.bin".
std::vector<std::string> distinct_tails(const std::vector<std::string>& paths);

}  // namespace train70b
