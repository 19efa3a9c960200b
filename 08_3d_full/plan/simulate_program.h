#pragma once
// A sequence as the simulation runs it: computation between two calls or waits is one item.
#include "08_3d_full/plan/simulate.h"

namespace train70b {

// Ops one after another, each launched by the host at least host_s after the one before. If the device is free at t and
// the host at h, they end at max(t + seconds, h + launched), and the host is free again at h + count * host_s.
struct Run {
    double seconds = 0;         // of the device
    double launched = 0;        // max over i of: i launches, then ops i, i + 1, ...
    double squares = 0;         // sum of the squares of the ops' seconds
    int32_t count = 0, op = 0;  // op: the first
};

struct Item {
    enum class Kind : uint8_t { compute, call, wait, book };
    Kind kind = Kind::compute;
    int16_t family = 0;  // of wait
    int32_t what = 0;    // a run, a call, calls of the family ago, a booking
};

struct SimulationProgram {
    struct Part {
        int32_t segment;
        int32_t part;  // of the sequence
    };
    struct Booking {
        Memory memory;
        int64_t bytes;
    };
    std::vector<std::vector<Item>> segments;
    std::vector<Run> runs;
    std::vector<Booking> bookings;
    std::vector<Part> parts;  // those that are simulated
    MemoryBytes held{};       // before them
    std::map<std::string, SimulatedStep::Op> ops;
};

// slow: its ops take this many times longer. every_op: a run per op, and bookings, for a trace.
SimulationProgram simulation_program(const Sequence& sequence, const SimulationModel& model, double slow,
                                     bool every_op);

}  // namespace train70b
