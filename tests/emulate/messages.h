#pragma once
// The messages of which nccl.cpp makes collectives: what both ends must agree on, and the bytes in a ring.
#include <nccl.h>

#include <vector>

#include "emulate.h"
#include "rings.h"

namespace emulate {

enum class Kind { message, all_reduce, reduce_scatter, all_gather, broadcast };

struct Header {  // what both ends of a message must agree on
    Kind kind;
    ncclDataType_t type;
    uint64_t count;
    ncclRedOp_t op = ncclSum;
    int root = 0;
    bool operator==(const Header&) const = default;
};

inline size_t size_of(ncclDataType_t type) {
    constexpr size_t kSizes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return unsigned(type) < ncclNumTypes ? kSizes[type] : 0;
}
inline std::string to_string(const Header& h, bool received = false) {
    static const char* const kNames[] = {"Send", "AllReduce", "ReduceScatter", "AllGather", "Broadcast"};
    static const char* const kTypes[ncclNumTypes] = {"int8", "uint8", "int32", "uint32", "int64", "uint64",
                                                     "fp16", "fp32",  "fp64",  "bf16",   "e4m3",  "e5m2"};
    std::string text = received ? "ncclRecv" : std::string("nccl") + kNames[size_t(h.kind)];
    text += "(" + std::to_string(h.count) + " " + kTypes[h.type];
    if (h.kind == Kind::all_reduce || h.kind == Kind::reduce_scatter) text += h.op == ncclMax ? ", max" : ", sum";
    if (h.kind == Kind::broadcast) text += ", root " + std::to_string(h.root);
    return text + ")";
}

struct Message {
    bool sent;
    int peer;
    Pair* pair;
    Header header;
    char* data;  // nullptr: received into `held`
    size_t bytes;
    size_t moved = 0;  // of the header and the data
    Header got{};
    std::vector<char> held{};

    bool complete() const { return moved == sizeof header + bytes; }
    // Moves what the ring takes or has; returns whether that was anything.
    bool move(int rank) {
        const size_t before = moved;
        const auto some = [&](char* p, size_t n) { moved += sent ? pair->ring.put(p, n) : pair->ring.take(p, n); };
        if (moved < sizeof header) {
            some(reinterpret_cast<char*>(sent ? &header : &got) + moved, sizeof header - moved);
            if (moved < sizeof header) return moved > before;
            if (!sent) begin_receive(rank);
        }
        some(data + (moved - sizeof header), sizeof header + bytes - moved);
        return moved > before;
    }

  private:
    void begin_receive(int rank) {
        if (got != header)
            fault("NCCL: rank " + std::to_string(peer) + "'s " + to_string(got) + " meets rank " +
                  std::to_string(rank) + "'s " + to_string(header, header.kind == Kind::message));
        if (!data) held.resize(bytes), data = held.data();
    }
};

}  // namespace emulate
