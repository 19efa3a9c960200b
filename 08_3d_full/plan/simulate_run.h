#pragma once
// One simulation: ranks that advance up to what they must wait for, sites where their calls meet, and the events in the
// order of time.
#include <limits>
#include <queue>
#include <tuple>

#include "08_3d_full/plan/equal_ranks.h"

namespace train70b {

// ---- a sequence as the simulation runs it: computation between two calls or waits is one item ----

// Ops one after another, each launched by the host at least host_s after the one before. If the device is free at t and
// the host at h, they end at max(t + seconds, h + launched), and the host is free again at h + count * host_s.
struct Run {
    double seconds = 0;         // of the device
    double launched = 0;        // max over i of: i launches, then ops i, i + 1, ...
    double squares = 0;         // sum of the squares of the ops' seconds
    int32_t count = 0, op = 0;  // op: the first
};

struct SimulationProgram {
    std::vector<std::vector<Event>> segments;  // the sequence's; `what` of compute: an index into runs
    std::vector<Run> runs;
    std::vector<int32_t> parts;  // those of the sequence that are simulated
    MemoryBytes held{};          // before them
    std::map<std::string, SimulatedStep::Op> ops;
};

// slow: its ops take this many times longer. every_op: a run per op, and bookings, for a trace.
SimulationProgram simulation_program(const Sequence& sequence, const SimulationModel& model, double slow,
                                     bool every_op);

// ---- the simulation ----

class Simulation {
  public:
    // All outlive it. equal: find_equal_ranks() of the others.
    Simulation(const Recording& recording, const SimulationModel& model, const SimulationOptions& options,
               const EqualRanks& equal);
    SimulatedStep run();

  private:
    // A call of one rank, from the call to its completion.
    struct Made {
        double ready = 0;                          // its rank has reached it
        double head = 0;                           // and so has its stream
        double start = 0;                          // and all other ranks
        double end = -1;                           // -1: not known yet
        int32_t call = 0, instance[2] = {-1, -1};  // of the sites of its collective or send, and of its receive
        int32_t previous = -1, next = -1;          // on its stream
        int8_t pending = 0;                        // sites that have not ended
    };

    // One collective or message of a site.
    struct Instance {
        int32_t arrived = 0, transfer = -1;
        double start = 0;
        uint64_t content = 0;
    };

    struct Site {
        std::vector<EqualRanks::Participant> participants;
        std::vector<int32_t> calls;       // of each participant, so far
        std::vector<Instance> instances;  // in the order of the calls
        std::vector<int32_t> made;        // [instance][participant]: which of its rank's calls
    };

    struct Rank {
        const Sequence* sequence = nullptr;
        const SimulationProgram* program = nullptr;
        const std::vector<EqualRanks::Use>* uses = nullptr;
        int64_t rank = 0;
        bool traced = false;

        size_t part = 0, item = 0;
        double now = 0, host = 0;  // of the computation; of the host
        std::vector<Made> made;
        std::vector<std::vector<int32_t>> calls;  // by family: indices into `made`
        std::vector<int32_t> last;                // by stream: the latest call
        std::vector<int32_t> queue;               // without streams: collectives that have not begun
        size_t queued = 0;                        // the first of those
        int32_t after_queue = -1;                 // what to wait for after them
        int32_t blocked = -1;                     // the call it waits for
        bool blocks_host = false, done = false;
        double core_seconds = 0;  // that it computes on shared cores
        int32_t core_op = 0;
        size_t finished = 0;  // at the end: calls that have been waited for
        size_t polled = 0;    // at the end of the schedule: of the sends
        uint64_t jittered = 0;
        double begin_of_part = 0;
        MemoryBytes memory{};

        double compute = 0, host_wait = 0;
        std::vector<double> exposed, waiting;  // by family
    };

    static constexpr double kNever = std::numeric_limits<double>::infinity();
    static constexpr int kHost = -1, kAllGroups = 0;        // streams; from 1 on: of a family
    static constexpr int kComputation = 0, kFirstComm = 1;  // streams of a trace
    int first_message() const { return kFirstComm + 1 + int(recording_.families.size()); }
    static constexpr int32_t kCores = -1;

    struct What {
        int32_t site, instance;  // of kCores, `instance` is a rank that computes
        auto operator<=>(const What&) const = default;
    };
    struct Begin {
        double time;
        uint64_t order;
        What what;
        auto operator<=>(const Begin&) const = default;  // by time, then by order
    };

    void add_rank(size_t c);
    int stream_of(const CommCall& call) const;

    // Goes on with a rank up to what it must wait for. The times of its own computation may be ahead of the events.
    void advance(Rank& rank);
    double jitter(Rank& rank, const Run& run) const;
    bool compute(Rank& rank, const Run& run);
    bool call(Rank& rank, int32_t what);
    bool wait_for(Rank& rank, int32_t made);
    bool launch_queue(Rank& rank);
    void settle(Rank& rank, const Made& made);
    bool wait_for_rest(Rank& rank, size_t& next, bool all);

    int32_t make(Rank& rank, int32_t what);
    void arrive(Rank& rank, const Made& made, double time);
    void begins(double now, What what);
    void ends(double now, What what);
    const Sequence::Part& part_of(const Rank& rank) const {
        return rank.sequence->parts[size_t(rank.program->parts[rank.part])];
    }
    int32_t index_of(const Rank& rank) const { return int32_t(&rank - ranks_.data()); }

    void trace(Rank& rank, int stream, const std::string& name, double begin, double end) {
        if (rank.traced && end > begin) spans_.push_back({rank.rank, stream, name, begin, end});
    }
    std::string name_of(const CommCall& call) const {
        return recording_.families[size_t(call.family)].name + "." + call.operation;
    }
    [[noreturn]] void refuse() const;  // simulate_check.cpp: says why the simulation cannot go on
    friend class CallReport;
    SimulatedStep result();
    void spread_messages(std::vector<SimulatedStep::Span>& spans) const;
    std::string stream_name(int stream) const;

    const Recording& recording_;
    const SimulationModel& model_;
    const SimulationOptions& options_;
    const EqualRanks& equal_;
    Flows flows_;
    std::map<std::tuple<int32_t, double, bool>, SimulationProgram> programs_;
    std::vector<Site> sites_;
    std::vector<Rank> ranks_;
    std::priority_queue<Begin, std::vector<Begin>, std::greater<>> begins_;
    std::vector<What> running_;  // by flow
    std::vector<int32_t> resumed_;
    uint64_t order_ = 0;
    std::vector<SimulatedStep::Span> spans_;
    std::vector<SimulatedStep::MemorySample> memory_;
};

}  // namespace train70b
