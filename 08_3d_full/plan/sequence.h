#pragma once
// What every rank does in one training step, as data. A dry run records it (record.h) from the program that trains; it
// is then simulated (simulate.h), without any rank, tensor or communicator.
//
// A rank's sequence is a list of parts: the setup (without its ops), each micro-batch's data, each step of the pipeline
// schedule, the end of the gradients' reduction, the update. Parts that are equal refer to one list of events. An event
// is one of
//     compute   an op on the device             `what`: an index into ops
//     call      a collective or a message       `what`: an index into calls
//     wait      for a call of this rank         `what`: how many calls of `family` ago it was made; 1: the latest
//     book      memory is allocated or freed    `bytes`, under `memory`
// When a call begins, and what waits for it: simulate.h.
//
// Ranks that differ in nothing but the numbers of their peers have one sequence: `class_of` names it for every rank.
#include <compare>
#include <map>
#include <string>
#include <vector>

#include "01_single_gpu/core/memory.h"
#include "01_single_gpu/core/tensor.h"
#include "05_pipeline/complete/schedule.h"

namespace train70b {

// A computation, under the name of chapter 01's --bench table.
struct OpCall {
    std::string name;
    // matmul, scaled_matmul: m, n, k. attention, attention_backward: batch, query_len, key_len, heads, kv_heads,
    // head_dim, 1 if causal. Others: empty.
    std::vector<int64_t> shape;
    DType dtype = DType::f32;     // of the inputs
    double flops = 0, bytes = 0;  // bytes: the minimum that must be read and written
    auto operator<=>(const OpCall&) const = default;
};

// All groups that one Comm::split makes. Every rank makes the same splits in the same order (matched like any
// collective), so a family's index means the same on all ranks. Family 0 is the world.
struct GroupFamily {
    std::string name;         // "tp"
    int parent = -1;          // a family; -1: the world itself
    std::vector<int> colors;  // by rank in the parent's group; negative: in no group
    bool operator==(const GroupFamily&) const = default;
};

// A collective or message, as the rank calls it. A scalar's `bytes` are those of one rank's numbers.
struct CommCall {
    int family = 0;
    std::string operation;   // all_reduce reduce_scatter all_gather broadcast all_to_all barrier scalar split finish
                             // send recv send_recv
    std::string details;     // of a collective: must be equal on all its ranks: ", 4096 fp32"
    int64_t bytes = 0;       // of the whole tensor: comm.h's n; of a message: what this rank sends (recv: receives)
    int64_t wire_bytes = 0;  // what the call books (comm.h)
    int to = -1, from = -1;  // of a message: ranks in the group
    int64_t received = 0;    // of send_recv: bytes
    bool channel = false;    // a message on a channel of its own (Comm::p2p_channel)
    bool shift = false;      // Comm::ring_shift: matched with shifts only
    bool uneven = false;  // an all_to_all with counts: `bytes` of equal slices, as many sent; they may differ by rank
    std::string where;    // "03_zero/complete/zero.cpp:130"
    auto operator<=>(const CommCall&) const = default;
    bool message() const { return to >= 0 || from >= 0; }
    bool of_host() const {  // no tensor of a device
        return operation == "scalar" || operation == "barrier" || operation == "split" || operation == "finish";
    }
};

struct Event {
    enum class Kind : uint8_t { compute, call, wait, book };
    Kind kind = Kind::compute;
    Memory memory = Memory::activations;  // of book
    int16_t family = 0;                   // of wait
    int32_t what = 0;
    int64_t bytes = 0;  // of book: > 0 allocated, < 0 freed
    auto operator<=>(const Event&) const = default;
};

struct Sequence {
    // What the rank does between two points of the program.
    struct Part {
        enum class Kind { setup, begin, batch, schedule_step, release, gradients, update, end } kind = Kind::setup;
        Step step{};           // of schedule_step; of batch, release: its micro_batch
        int32_t segment = -1;  // index into segments
    };
    int64_t rank = 0;               // the one that was recorded
    bool derived = false;           // it was not run: alike_ranks.h
    int64_t micro_batches_run = 0;  // of the step's; the others repeat them
    std::vector<OpCall> ops;
    std::vector<CommCall> calls;
    std::vector<std::vector<Event>> segments;
    std::vector<Part> parts;
};
std::string to_string(const Sequence::Part& part);  // "F3", "update"
// What the ledger books from the beginning of the step to its end.
MemoryPeak peak_of(const Sequence& sequence);

struct Recording {
    int64_t ranks = 0;  // of the world
    std::vector<GroupFamily> families;
    std::vector<Sequence> sequences;
    std::vector<int32_t> class_of;  // by rank: an index into sequences

    const Sequence& of(int64_t rank) const { return sequences[size_t(class_of[size_t(rank)])]; }
};
// The recorded rank with the largest peak, and that.
std::pair<int64_t, MemoryPeak> largest_rank(const Recording& recording);

// The groups of a recording, for all ranks at once.
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
    // The world rank that `peer`, the call's `to` or `from`, means where `rank` makes this call of the sequence; -1:
    // the group has no such rank. Ranks of one sequence share a ring shift's distance, of other messages the peer's
    // number.
    int64_t peer(const Sequence& sequence, const CommCall& call, int peer, int64_t rank) const;

  private:
    std::vector<Family> families_;
};

// Numbers equal values alike, from 0.
template <class T>
class Numbering {
  public:
    int32_t of(const T& value) {
        const auto [at, is_new] = numbers_.insert({value, int32_t(values.size())});
        if (is_new) values.push_back(value);
        return at->second;
    }
    std::vector<T> values;  // by number

  private:
    std::map<T, int32_t> numbers_;
};

}  // namespace train70b
