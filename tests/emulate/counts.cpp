// With EMULATE_STATS=1: what a kernel's warps ask of memory. The n-th time that a lane comes by an access belongs to
// the n-th time of the other lanes of its warp: an access of the warp, if its lanes went the same way.
//
//   global memory    sectors of 32 bytes that the access touches; at best, those that its bytes fill
//   shared memory    turns: 32 banks, four bytes wide, give one word each in a turn, to any lanes that want it. 8 bytes
//                    take two turns of 16 lanes, 16 bytes (ldmatrix, too) four of 8; more are bank conflicts
#include <algorithm>
#include <cstdio>
#include <map>
#include <tuple>
#include <vector>

#include "internal.h"

namespace emulate {

bool counting = kStats;

namespace {

struct Access {
    const void* code;
    size_t offset, bytes;
    uint32_t warp, lane, turn;
    bool shared, write;
};
auto& of_block = *new std::vector<Access>;

struct Count {
    uint64_t accesses = 0, transfers = 0, at_best = 0;
};
auto& counts = *new std::map<const void*, Count[4]>;  // of each kernel: 2 * shared + write

void add(Count& count, const Access* begin, const Access* end) {  // one access of a warp
    ++count.accesses;
    const size_t unit = begin->shared ? 4 : 32, lanes = begin->shared ? std::max<size_t>(4, 128 / begin->bytes) : 32;
    std::vector<size_t> units[4], bytes;  // of each turn's lanes
    for (const Access* a = begin; a != end; ++a)
        for (size_t byte = a->offset; byte < a->offset + a->bytes; ++byte) {
            if (byte == a->offset || byte % unit == 0)
                units[std::min<size_t>(a->lane / lanes, 3)].push_back(byte / unit);
            if (!a->shared) bytes.push_back(byte);
        }
    const auto unique = [](std::vector<size_t>& list) {
        std::sort(list.begin(), list.end());
        list.erase(std::unique(list.begin(), list.end()), list.end());
        return list.size();
    };
    if (!begin->shared) {
        count.transfers += unique(units[0]);
        count.at_best += (unique(bytes) + 31) / 32;
        return;
    }
    for (std::vector<size_t>& words : units) {
        size_t banks[32] = {};
        unique(words);
        for (const size_t word : words) ++banks[word % 32];
        count.transfers += *std::max_element(banks, banks + 32);
        count.at_best += !words.empty();
    }
}

void print() {
    const char* names[] = {"global reads", "global writes", "shared reads", "shared writes"};
    for (const auto& [kernel, of] : counts)
        for (int i = 0; i < 4; ++i)
            if (const Count& c = of[i]; c.accesses > 0)
                std::fprintf(stderr, "emulate: %s: %s, %llu by warps: %llu %s, %llu at best\n", name_of(kernel).c_str(),
                             names[i], static_cast<unsigned long long>(c.accesses),
                             static_cast<unsigned long long>(c.transfers), i < 2 ? "sectors" : "turns",
                             static_cast<unsigned long long>(c.at_best));
}

}  // namespace

void count_access(size_t offset, size_t bytes, bool shared, Kind kind, const void* code) {
    of_block.push_back({code, offset, bytes, now.thread / 32u, now.thread % 32u, 0, shared, kind != Kind::read});
}

void count_block(const void* kernel) {
    if (counts.empty()) std::atexit(print);
    const auto sort = [](auto key) {
        std::stable_sort(of_block.begin(), of_block.end(),
                         [&](const Access& a, const Access& b) { return key(a) < key(b); });
    };
    sort([](const Access& a) { return std::tuple(a.code, a.write, a.shared, a.warp, a.lane); });
    for (size_t i = 1; i < of_block.size(); ++i) {
        const Access &before = of_block[i - 1], &a = of_block[i];
        const bool again = before.code == a.code && before.write == a.write && before.shared == a.shared &&
                           before.warp == a.warp && before.lane == a.lane;
        of_block[i].turn = again ? before.turn + 1 : 0;
    }
    const auto of_warp = [](const Access& a) { return std::tuple(a.code, a.write, a.shared, a.warp, a.turn); };
    sort(of_warp);
    for (size_t begin = 0, end; begin < of_block.size(); begin = end) {
        for (end = begin; end < of_block.size() && of_warp(of_block[end]) == of_warp(of_block[begin]);) ++end;
        const Access& first = of_block[begin];
        add(counts[kernel][2 * first.shared + first.write], &of_block[begin], &of_block[0] + end);
    }
    of_block.clear();
}

}  // namespace emulate
