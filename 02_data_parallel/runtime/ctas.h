#pragma once
// How many of a GPU's multiprocessors NCCL's kernels take (backend_nccl.cu): a block of them, a CTA, has one to itself.
#include <map>

#include "02_data_parallel/runtime/backend.h"

namespace train70b {

// The most blocks of a group's kernels. 16 are enough for the links of an H100 in a node; over a network fewer are.
int ctas_of(GroupLoad load);

// Whether a new group's collectives run beside those of the group that it was divided from. They need not: a part of a
// group (ring and Ulysses of cp, shards and replicas of dp) is used in its place, and one part after another.
inline bool has_own_lane(bool of_world, GroupLoad load) {
    return (of_world && load != GroupLoad::alone) || load == GroupLoad::channel;
}

// What one open group may take, for as long as it exists. Groups of one lane run one after another.
class CtaShare {
  public:
    CtaShare(int ctas, const void* lane);
    ~CtaShare() { shares().erase(this); }
    CtaShare(const CtaShare&) = delete;
    static int sum();            // the most that all open groups can take at once
    static inline int most = 0;  // of it, so far

  private:
    static std::map<const CtaShare*, std::pair<const void*, int>>& shares();
};

}  // namespace train70b
