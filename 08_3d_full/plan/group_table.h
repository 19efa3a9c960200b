#pragma once
// The groups of a recording, for all ranks at once.
#include "08_3d_full/plan/sequence.h"

namespace train70b {

class GroupTable {
  public:
    struct Family {
        std::vector<int32_t> group_of;              // by world rank: an index into members; -1: in no group
        std::vector<int32_t> place;                 // by world rank: its rank in that group
        std::vector<std::vector<int32_t>> members;  // world ranks, in the group's order
    };

    explicit GroupTable(const Recording& recording);

    const Family& of(int family) const { return families_[size_t(family)]; }
    // World ranks of this rank's group; empty: it is in none.
    const std::vector<int32_t>& members(int family, int64_t rank) const;

  private:
    std::vector<Family> families_;
};

}  // namespace train70b
