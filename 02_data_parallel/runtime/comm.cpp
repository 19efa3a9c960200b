#include "02_data_parallel/comm.h"

#include <cmath>
#include <deque>
#include <utility>

#include "01_single_gpu/core/profile.h"
#include "01_single_gpu/io/files.h"
#include "01_single_gpu/ops/ops.h"
#include "02_data_parallel/all_reduce.h"
#include "02_data_parallel/runtime/watchdog.h"

namespace train70b {

namespace {
constexpr const char* kAlgorithms[] = {"naive", "ring", "pipelined", "halving", "library"};  // in the enum's order
}

AllReduce all_reduce_of(const std::string& name) {
    for (int i = 0; i < 5; ++i)
        if (name == kAlgorithms[i]) return AllReduce(i);
    CHECK(false, "all-reduce {}", name);
    return AllReduce::library;
}
const char* name_of(AllReduce algorithm) { return kAlgorithms[int(algorithm)]; }

// What a rank is about to do.
struct Comm::Call {
    enum class Kind { collective, point_to_point, numbers };

    const char* operation;
    Kind kind = Kind::collective;
    std::string details;          // what must be the same on every rank of a collective
    int64_t wire_bytes = 0;       // of the formula in comm.h, without its division by N
    std::vector<Tensor> tensors;  // kept alive until the end of the operation
    std::function<Handle(Transport&)> run;
    Where where;
};

// What all groups of a rank share.
struct Comm::Engine {
    CommSettings settings;
    std::deque<std::shared_ptr<Work::State>> queue;  // begun, but not yet executed: see Comm::start
    struct OnDevice {
        std::weak_ptr<Group> group;
        const char* operation;
        Handle handle;
    };
    std::deque<OnDevice> on_device;  // waited for; the device's clock is still to be read
    std::vector<std::weak_ptr<Group>> groups;
    double waited = 0;

    void run_queue();
    void read_clocks(size_t leave);  // of all but so many of the latest, waiting for them to end
};

struct Comm::Group {
    std::shared_ptr<Engine> engine;
    std::unique_ptr<Transport> transport;
    std::string name;
    Transport::Channel channel = Transport::Channel::user;  // of messages
    uint64_t collectives = 0, messages = 0;                 // calls so far; only the first are the same on every rank
    struct Sums {
        int64_t calls = 0, wire_bytes = 0;
        double seconds = 0;
    };
    std::map<std::string, Sums> sums;  // by operation

    void compare(const std::string& what, const Where& where);
};

struct Work::State {
    std::shared_ptr<Comm::Group> group;
    Comm::Call call;
    std::string what;
    uint64_t id = 0;
    bool executed = false;
    Handle handle;

    // Nobody waited: then this does, before the tensors go. When an error ends the rank it must not, since its peer may
    // never come: what MPI or the device may still write to is left where it is.
    ~State() {
        if (handle && std::uncaught_exceptions() == 0) {
            wait();
        } else if (handle) {
            new Handle(std::move(handle));
            new std::vector<Tensor>(std::move(call.tensors));
        }
    }
    void execute();
    void wait();    // executes all that is in the queue before it
    void settle();  // the rest of that: what has been executed ends

  private:
    void book(double seconds) {
        group->sums[call.operation].seconds += seconds;
        group->engine->waited += seconds;
    }
};

// --comm-check: everyone tells everyone what comes next.
void Comm::Group::compare(const std::string& what, const Where& where) {
    const std::string mine = fmt::format("{}\n{}:{}", what, where.file_name(), where.line());
    const std::vector<std::string> all = transport->gather_text(mine);
    const auto call = [](const std::string& text) { return text.substr(0, text.find('\n')); };
    bool equal = true;
    for (const std::string& text : all) equal = equal && call(text) == call(all[0]);
    if (equal) return;
    std::string report =
        fmt::format("mismatch: the ranks of group {} disagree about what comes next (--comm-check)\n", name);
    for (size_t i = 0; i < all.size(); ++i)
        report += fmt::format("  rank {} of {}: {}  at {}\n", i, all.size(), call(all[i]),
                              all[i].substr(all[i].find('\n') + 1));
    if (transport->rank() == 0) {
        fmt::print(stderr, "{}rank {}: {}", report, this_rank, collective_log().text());
        std::fflush(stderr);
    } else {
        std::this_thread::sleep_for(std::chrono::seconds(2));  // for rank 0 of the group to say it, and end all
    }
    end_all_ranks(1);
    throw std::runtime_error(report);  // where end_all_ranks is a test's
}

void Work::State::execute() {
    executed = true;
    Comm::Group& g = *group;
    collective_log().set(id, CollectiveLog::State::running);
    const double begin = now_seconds();
    const std::string span_name = g.name + "." + call.operation;
    const Span span(span_name.c_str(), "comm");
    if (g.engine->settings.check && call.kind != Comm::Call::Kind::point_to_point) g.compare(what, call.where);
    handle = call.run(*g.transport);
    call.run = nullptr;
    if (!handle) {
        call.tensors.clear();
        collective_log().set(id, CollectiveLog::State::done);
        book(now_seconds() - begin);
    } else {
        using State = CollectiveLog::State;
        collective_log().set(id, g.transport->on_stream() ? State::running : State::posted, handle);
    }
}

void Work::State::wait() {
    group->engine->run_queue();
    settle();
}

void Work::State::settle() {
    Comm::Engine& engine = *group->engine;
    if (!handle) return;
    const Handle ended = std::move(handle);
    handle = nullptr;
    if (group->transport->on_stream()) {
        ended->wait();  // orders streams; the host goes on
        engine.on_device.push_back({group, call.operation, ended});
        if (engine.on_device.size() > 1000) engine.read_clocks(500);
    } else {
        collective_log().set(id, CollectiveLog::State::running);
        const double begin = now_seconds();
        ended->wait();
        collective_log().set(id, CollectiveLog::State::done);
        book(now_seconds() - begin);
    }
    call.tensors.clear();
}

void Comm::Engine::run_queue() {
    while (!queue.empty()) {
        const std::shared_ptr<Work::State> next = std::move(queue.front());
        queue.pop_front();
        next->execute();
    }
}

void Comm::Engine::read_clocks(size_t leave) {
    for (; on_device.size() > leave; on_device.pop_front()) {
        const auto times = on_device.front().handle->times();
        const std::shared_ptr<Group> group = on_device.front().group.lock();
        if (!times || !group) continue;
        group->sums[on_device.front().operation].seconds += times->busy;
        waited += times->stalled;
    }
}

bool Work::done() {
    if (!state_) return true;
    if (!state_->executed || (state_->handle && !state_->handle->test())) return false;
    std::exchange(state_, nullptr)->settle();
    return true;
}

void Work::wait() {
    if (const auto state = std::exchange(state_, nullptr)) state->wait();
}

// On a stream collectives are issued at once. Without one, collectives wait in a queue and are executed in the order of
// their calls as soon as this rank waits for anything: what a stream is to a GPU, the queue is to MPI. So the order of
// operations is the same on both, and a forgotten wait() shows on a laptop. Messages are posted at once: two ranks that
// send before they receive must not stand still.
Work Comm::start(Call call) const {
    Group& g = *group_;
    auto state = std::make_shared<Work::State>();
    state->group = group_;
    uint64_t& count = call.kind == Call::Kind::point_to_point ? g.messages : g.collectives;
    state->what = fmt::format("{}.{} #{}{}", g.name, call.operation, ++count, call.details);
    state->id = collective_log().add(state->what, call.where);
    Group::Sums& sums = g.sums[call.operation];
    ++sums.calls;
    sums.wire_bytes += call.wire_bytes;
    state->call = std::move(call);
    if (g.transport->on_stream() || state->call.kind == Call::Kind::point_to_point)
        state->execute();
    else
        g.engine->queue.push_back(state);
    return Work(state);
}

// ---- the operations -------------------------------------------------------------------------------------------------

int Comm::rank() const { return group_ ? group_->transport->rank() : 0; }
int Comm::size() const { return group_ ? group_->transport->size() : 1; }
const std::string& Comm::name() const {
    static const std::string alone = "alone";
    return group_ ? group_->name : alone;
}
bool Comm::has_peers() const { return !group_ || group_->transport->has_peers(); }
const char* Comm::transport() const { return group_ ? group_->transport->name() : "none"; }

namespace {
std::string describe_tensor(const Tensor& x) { return fmt::format(", {} {}", x.size(), name_of(x.dtype())); }
std::string describe_peer(const Tensor& x, const char* preposition, int peer) {
    return fmt::format("{} {} rank {}", describe_tensor(x), preposition, peer);
}
void check_part(const Tensor& part, const Tensor& whole, int ranks) {
    CHECK(part.dtype() == whole.dtype() && part.size() * ranks == whole.size(), "{} {} of {} {} on {} ranks",
          part.size(), name_of(part.dtype()), whole.size(), name_of(whole.dtype()), ranks);
}
void copy_if_apart(Tensor to, const Tensor& from) {
    if (!to.starts_with(from)) copy(to, from);
}
}  // namespace

Work Comm::all_reduce(Tensor x, Reduce reduce, Where where) const {
    const int64_t n = size();
    if (n == 1) return {};
    const AllReduce algorithm = reduce == Reduce::sum ? group_->engine->settings.all_reduce : AllReduce::library;
    return start({.operation = "all_reduce",
                  .details = describe_tensor(x) + (reduce == Reduce::max ? " max" : ""),
                  .wire_bytes = 2 * x.bytes() * (n - 1),
                  .tensors = {x},
                  .run = [x, reduce, algorithm](Transport& peers) -> Handle {
                      const bool by_hand = algorithm != AllReduce::library && x.dtype() != DType::i32;
                      if (!by_hand || !peers.has_peers()) return peers.all_reduce(x, reduce);
                      return peers.aside([&] { all_reduce_by_hand(algorithm, peers, x); });
                  },
                  .where = where});
}

Work Comm::reduce_scatter(Tensor part, Tensor whole, Where where) const {
    const int64_t n = size();
    check_part(part, whole, int(n));
    if (n == 1) return copy_if_apart(part, whole), Work();
    return start({.operation = "reduce_scatter",
                  .details = describe_tensor(whole),
                  .wire_bytes = whole.bytes() * (n - 1),
                  .tensors = {part, whole},
                  .run = [part, whole, algorithm = group_->engine->settings.all_reduce](Transport& peers) -> Handle {
                      const bool ring = algorithm == AllReduce::ring || algorithm == AllReduce::pipelined;
                      if (!ring || !peers.has_peers()) return peers.reduce_scatter(part, whole);
                      return peers.aside([&] {
                          ring_reduce_scatter(peers, whole.view({whole.size()}));
                          copy_if_apart(part, whole.element_slice(peers.rank() * part.size(), part.shape()));
                      });
                  },
                  .where = where});
}

Work Comm::all_gather(Tensor whole, Tensor part, Where where) const {
    const int64_t n = size();
    check_part(part, whole, int(n));
    if (n == 1) return copy_if_apart(whole, part), Work();
    return start({.operation = "all_gather",
                  .details = describe_tensor(whole),
                  .wire_bytes = whole.bytes() * (n - 1),
                  .tensors = {part, whole},
                  .run = [part, whole](Transport& peers) { return peers.all_gather(whole, part); },
                  .where = where});
}

Work Comm::broadcast(Tensor x, int root, Where where) const {
    const int64_t n = size();
    CHECK(0 <= root && root < n, "root {} of {} ranks", root, n);
    if (n == 1) return {};
    return start({.operation = "broadcast",
                  .details = describe_peer(x, "from", root),
                  .wire_bytes = x.bytes() * (n - 1),
                  .tensors = {x},
                  .run = [x, root](Transport& peers) { return peers.broadcast(x, root); },
                  .where = where});
}

Work Comm::all_to_all(Tensor to, Tensor from, Where where) const {
    const int64_t n = size();
    CHECK(to.dtype() == from.dtype() && to.size() == from.size() && to.size() % n == 0, "{} {} to {} {} on {} ranks",
          from.size(), name_of(from.dtype()), to.size(), name_of(to.dtype()), n);
    CHECK(!to.overlaps(from), "all_to_all does not work in place");
    if (n == 1) return copy_if_apart(to, from), Work();
    return start({.operation = "all_to_all",
                  .details = describe_tensor(from),
                  .wire_bytes = from.bytes() * (n - 1),
                  .tensors = {to, from},
                  .run = [to, from](Transport& peers) { return peers.all_to_all(to, from); },
                  .where = where});
}

Work Comm::send(Tensor x, int to, Where where) const {
    CHECK(0 <= to && to < size() && to != rank(), "rank {} sends to {} of {}", rank(), to, size());
    return start(
        {.operation = "send",
         .kind = Call::Kind::point_to_point,
         .details = describe_peer(x, "to", to),
         .wire_bytes = x.bytes() * size(),
         .tensors = {x},
         .run = [x, to, channel = group_->channel](Transport& t) { return t.exchange(x, to, {}, to, channel); },
         .where = where});
}

Work Comm::recv(Tensor x, int from, Where where) const {
    CHECK(0 <= from && from < size() && from != rank(), "rank {} receives from {} of {}", rank(), from, size());
    return start(
        {.operation = "recv",
         .kind = Call::Kind::point_to_point,
         .details = describe_peer(x, "from", from),
         .tensors = {x},
         .run = [x, from, channel = group_->channel](Transport& t) { return t.exchange({}, from, x, from, channel); },
         .where = where});
}

Work Comm::send_recv(Tensor out, int to, Tensor in, int from, Where where) const {
    CHECK(0 <= to && to < size() && 0 <= from && from < size(), "to {}, from {} of {}", to, from, size());
    if (size() == 1) return copy_if_apart(in, out), Work();
    return start(
        {.operation = "send_recv",
         .kind = Call::Kind::point_to_point,
         .details = describe_peer(out, "to", to) + describe_peer(in, "from", from),
         .wire_bytes = out.bytes() * size(),
         .tensors = {out, in},
         .run = [out, to, in, from](Transport& t) { return t.exchange(out, to, in, from, Transport::Channel::user); },
         .where = where});
}

Work Comm::ring_shift(Tensor out, Tensor in, int by, Where where) const {
    CHECK(out.dtype() == in.dtype() && out.size() == in.size() && !out.overlaps(in), "{} and {}", out.size(),
          in.size());
    const int n = size(), to = ((rank() + by) % n + n) % n, from = ((rank() - by) % n + n) % n;
    if (to == rank()) return copy_if_apart(in, out), Work();
    return start(
        {.operation = "send_recv",
         .kind = Call::Kind::point_to_point,
         .details = describe_peer(out, "shifted to", to),
         .wire_bytes = out.bytes() * n,
         .tensors = {out, in},
         .run = [out, to, in, from](Transport& t) { return t.exchange(out, to, in, from, Transport::Channel::shift); },
         .where = where});
}

Work Comm::barrier(Where where) const {
    if (size() == 1) return {};
    return start({.operation = "barrier",
                  .run =
                      [](Transport& peers) {
                          peers.barrier();
                          return nullptr;
                      },
                  .where = where});
}

std::vector<double> Comm::gather(const std::vector<double>& mine, Where where) const {
    return numbers(mine, 8 * int64_t(mine.size()) * size() * (size() - 1), where);  // an all-gather
}

std::vector<double> Comm::numbers(const std::vector<double>& mine, int64_t wire_bytes, Where where) const {
    if (size() == 1) return mine;
    std::vector<double> all;
    start({.operation = "scalar",
           .kind = Call::Kind::numbers,
           .details = fmt::format(", {} numbers", mine.size()),
           .wire_bytes = wire_bytes,
           .run =
               [&](Transport& peers) {
                   all = peers.gather(mine);
                   return nullptr;
               },
           .where = where})
        .wait();
    return all;
}

double Comm::sum(double x, Where where) const {
    double total = 0;
    for (const double part : numbers({x}, 2 * 8 * (size() - 1), where)) total += part;  // an all-reduce
    return total;
}

double Comm::max(double x, Where where) const {
    double most = x;
    for (const double part : numbers({x}, 2 * 8 * (size() - 1), where))
        if (!std::isnan(most) && !(part <= most)) most = part;  // the first NaN stays
    return most;
}

Comm Comm::split(const std::function<int(int)>& colour_of, const std::string& name, Where where) const {
    auto group = std::make_shared<Group>();
    group->name = name;
    if (!group_) return *this;
    std::vector<int> colours;
    for (int i = 0; i < size(); ++i) colours.push_back(colour_of(i));
    start({.operation = "split",
           .details = " into " + name,
           .run =
               [&](Transport& peers) {
                   group->transport = peers.split(colours);
                   return nullptr;
               },
           .where = where})
        .wait();
    if (!group->transport) return {};
    group->engine = group_->engine;
    group->engine->groups.push_back(group);
    return Comm(group);
}

Comm Comm::p2p_channel(int from, int to, Where where) const {
    const Comm pair = split([from, to](int rank) { return rank == from || rank == to ? 0 : -1; }, name(), where);
    if (pair.group_) pair.group_->channel = Transport::Channel::link;
    return pair;
}

CommStats Comm::take_stats() const {
    CommStats stats;
    if (!group_) return stats;
    Engine& engine = *group_->engine;
    engine.read_clocks(0);
    for (const std::weak_ptr<Group>& weak : engine.groups) {
        const std::shared_ptr<Group> group = weak.lock();
        if (!group) continue;
        for (auto& [operation, sums] : group->sums) {
            if (sums.calls == 0) continue;
            CommStats::Entry& entry = stats.operations[group->name + "." + operation];
            entry.calls += sums.calls;
            entry.bytes += sums.wire_bytes / group->transport->size();
            entry.seconds += sums.seconds;
            sums = {};
        }
    }
    stats.waited = std::exchange(engine.waited, 0);
    return stats;
}

AllReduce Comm::use(AllReduce algorithm) const {
    return group_ ? std::exchange(group_->engine->settings.all_reduce, algorithm) : algorithm;
}

void Comm::finish() const {
    if (!group_) return;
    Engine& engine = *group_->engine;
    engine.run_queue();
    if (!engine.settings.check) return;
    for (size_t i = engine.groups.size(); i-- > 0;)  // the newest first: whoever still has something to say is there
        if (const std::shared_ptr<Group> group = engine.groups[i].lock(); group && group->transport->size() > 1)
            Comm(group).start({.operation = "finish", .run = [](Transport&) { return nullptr; }, .where = {}}).wait();
}

Comm make_comm(std::unique_ptr<Transport> transport, const CommSettings& settings) {
    auto group = std::make_shared<Comm::Group>();
    group->engine = std::make_shared<Comm::Engine>(Comm::Engine{.settings = settings});
    group->transport = std::move(transport);
    group->name = "world";
    group->engine->groups.push_back(group);
    return Comm(group);
}

}  // namespace train70b
