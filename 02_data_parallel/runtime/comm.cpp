// Groups and operations. What world.all_reduce(x).wait() does, on a CPU with --all-reduce ring:
//
//   Comm::all_reduce        describes the call as an Operation: its bytes, its tensors, a function of the Backend
//   Comm::start             numbers, logs and books it, and puts it into the queue
//   Work::wait              launches the queue in the order of the calls (work_queue.cpp), which calls that function:
//   ring_all_reduce         2 (N-1) exchanges and the additions between them (all_reduce.cpp)
//   MpiBackend::exchange    MPI_Irecv, MPI_Isend (backend_mpi.cpp, mpi_group.cpp)
//
// With --all-reduce library the function is Backend::all_reduce: MPI_Allreduce or ncclAllReduce. With nccl start()
// launches at once, and wait() lets the compute stream wait for the stream of the group.
#include <cmath>
#include <utility>

#include "01_single_gpu/core/recorder.h"
#include "01_single_gpu/ops/ops.h"
#include "02_data_parallel/complete/all_reduce.h"
#include "02_data_parallel/runtime/watchdog.h"
#include "02_data_parallel/runtime/work_queue.h"

namespace train70b {

// A peer's number in the world in place of that in its group, for people; recordings compare the latter.
static std::string in_world(std::string details, const std::vector<int>& ranks) {
    constexpr std::string_view kPeer = " rank ";
    for (size_t at = details.find(kPeer); at != details.npos; at = details.find(kPeer, at)) {
        at += kPeer.size();
        const size_t digits = std::min(details.find_first_not_of("0123456789", at), details.size()) - at;
        details.replace(at, digits, std::to_string(ranks[size_t(std::stoi(details.substr(at, digits)))]));
    }
    return details;
}

Work Comm::start(Operation operation) const {
    Group& group = *group_;
    auto work = std::make_shared<Work::State>();
    uint64_t& count = operation.message ? group.messages : group.collectives;
    ++count;
    if (recorder) {  // of a dry run: nothing can hang
        work->recorded = recorder->call({operation, group.family, group.tag == Tag::p2p_channel});
    } else {
        work->label =
            fmt::format("{}.{} #{}{}", group.name, operation.name, count, in_world(operation.details, group.ranks));
        work->log_id = collective_log().add(work->label, operation.where);
    }
    CommStats::Entry& sums = group.sums[operation.name];
    ++sums.calls;
    sums.bytes += operation.wire_bytes;
    const bool at_once = operation.message || group.backend->on_stream();
    work->group = group_;
    work->operation = std::move(operation);
    group.shared->queue.check_tensors(work);
    if (at_once)
        work->launch();
    else
        group.shared->queue.push(work);
    return Work(work);
}

// ---- collectives ----------------------------------------------------------------------------------------------------

namespace {

std::string describe(const Tensor& x) { return fmt::format(", {} {}", x.size(), name_of(x.dtype())); }
std::string describe(const Tensor& x, const char* preposition, int peer) {
    return fmt::format("{} {} rank {}", describe(x), preposition, peer);
}

void check_slice(const Tensor& part, const Tensor& whole, int64_t ranks) {
    CHECK(part.dtype() == whole.dtype() && part.size() * ranks == whole.size(), "{} {} is not 1/{} of {} {}",
          part.size(), name_of(part.dtype()), ranks, whole.size(), name_of(whole.dtype()));
}

// A slice of x for each rank.
std::vector<Tensor> slices(const Tensor& x, const std::vector<int64_t>& counts, int64_t ranks) {
    std::vector<Tensor> list;
    int64_t begin = 0;
    for (const int64_t count : counts) {
        list.push_back(x.element_slice(begin, {count}));
        begin += count;
    }
    CHECK(int64_t(counts.size()) == ranks && begin == x.size(), "{} counts of {} elements for {} ranks and {} elements",
          counts.size(), begin, ranks, x.size());
    return list;
}

// What an operation of one rank comes to.
Work copy_to(Tensor to, const Tensor& from) {
    if (!to.starts_with(from)) copy(to, from);
    return {};
}

}  // namespace

Work Comm::all_reduce(Tensor x, Reduce reduce, Where where) const {
    const int64_t n = size();
    if (n == 1) return {};
    const bool library = reduce == Reduce::max || x.dtype() == DType::i32 || !has_peers();
    const auto by_hand = library ? nullptr : group_->shared->algorithm->all_reduce;
    return start({.name = "all_reduce",
                  .details = describe(x) + (reduce == Reduce::max ? " max" : ""),
                  .wire_bytes = 2 * x.bytes() * (n - 1),
                  .tensors = {x},
                  .written = 1,
                  .run = [x, reduce, by_hand](Backend& peers) -> RequestPtr {
                      if (!by_hand) return peers.all_reduce(x, reduce);
                      return peers.on_side_stream([&] { by_hand(peers, x.view({x.size()})); });
                  },
                  .where = where});
}

Work Comm::reduce_scatter(Tensor part, Tensor whole, Where where) const {
    const int64_t n = size();
    check_slice(part, whole, n);
    if (n == 1) return copy_to(part, whole);
    const auto by_hand = has_peers() ? group_->shared->algorithm->reduce_scatter : nullptr;
    return start({.name = "reduce_scatter",
                  .details = describe(whole),
                  .wire_bytes = whole.bytes() * (n - 1),
                  .tensors = {part, whole},
                  .written = 2,
                  .run = [part, whole, by_hand](Backend& peers) -> RequestPtr {
                      if (!by_hand) return peers.reduce_scatter(part, whole);
                      return peers.on_side_stream([&] {
                          by_hand(peers, whole.view({whole.size()}));
                          copy_to(part, whole.element_slice(peers.rank() * part.size(), part.shape()));
                      });
                  },
                  .where = where});
}

Work Comm::all_gather(Tensor whole, Tensor part, Where where) const {
    const int64_t n = size();
    check_slice(part, whole, n);
    if (n == 1) return copy_to(whole, part);
    const auto by_hand = has_peers() ? group_->shared->algorithm->all_gather : nullptr;
    return start({.name = "all_gather",
                  .details = describe(whole),
                  .wire_bytes = whole.bytes() * (n - 1),
                  .tensors = {whole, part},
                  .written = 1,
                  .run = [part, whole, by_hand](Backend& peers) -> RequestPtr {
                      if (!by_hand) return peers.all_gather(whole, part);
                      return peers.on_side_stream([&] {
                          copy_to(whole.element_slice(peers.rank() * part.size(), part.shape()), part);
                          by_hand(peers, whole.view({whole.size()}));
                      });
                  },
                  .where = where});
}

Work Comm::broadcast(Tensor x, int root, Where where) const {
    const int64_t n = size();
    CHECK(0 <= root && root < n, "root {} of {} ranks", root, n);
    if (n == 1) return {};
    return start({.name = "broadcast",
                  .details = describe(x, "from", root),
                  .wire_bytes = x.bytes() * (n - 1),
                  .tensors = {x},
                  .written = rank() == root ? 0u : 1u,
                  .run = [x, root](Backend& peers) { return peers.broadcast(x, root); },
                  .where = where});
}

Work Comm::all_to_all(Tensor to, Tensor from, Where where) const {
    const int64_t n = size();
    CHECK(to.dtype() == from.dtype() && to.size() == from.size() && to.size() % n == 0, "{} {} to {} {} on {} ranks",
          from.size(), name_of(from.dtype()), to.size(), name_of(to.dtype()), n);
    CHECK(!to.overlaps(from), "all_to_all does not work in place");
    if (n == 1) return copy_to(to, from);
    return start({.name = "all_to_all",
                  .details = describe(from),
                  .wire_bytes = from.bytes() * (n - 1),
                  .tensors = {to, from},
                  .written = 1,
                  .run = [to, from](Backend& peers) { return peers.all_to_all(to, from); },
                  .where = where});
}

Work Comm::all_to_all(Tensor to, std::vector<int64_t> received, Tensor from, std::vector<int64_t> sent,
                      Where where) const {
    const int64_t n = size();
    const std::vector<Tensor> in = slices(to, received, n), out = slices(from, sent, n);
    const Tensor &kept = in[size_t(rank())], &own = out[size_t(rank())];
    CHECK(to.dtype() == from.dtype() && kept.size() == own.size(), "{} {} for this rank itself, received as {} {}",
          own.size(), name_of(from.dtype()), kept.size(), name_of(to.dtype()));
    CHECK(!to.overlaps(from), "all_to_all does not work in place");
    if (n == 1) return copy_to(to, from);
    const bool by_hand = has_peers() && group_->shared->algorithm->all_reduce;
    const int64_t to_others = from.bytes() - own.bytes();
    return start({.name = "all_to_all",
                  .details = fmt::format(", {} by counts", name_of(from.dtype())),
                  .wire_bytes = to_others * n,
                  .tensors = {to, from},
                  .written = 1,
                  .bytes = to_others * n / (n - 1),
                  .sent = std::move(sent),
                  .received = std::move(received),
                  .run = [in, out, by_hand](Backend& peers) -> RequestPtr {
                      if (!by_hand) return peers.all_to_all_v(in, out);
                      return peers.on_side_stream([&] { pairwise_all_to_all(peers, in, out); });
                  },
                  .where = where});
}

Work Comm::barrier(Where where) const {
    if (size() == 1) return {};
    const auto run = [](Backend& peers) {
        peers.barrier();
        return nullptr;
    };
    return start({.name = "barrier", .run = run, .where = where});
}

// ---- messages -------------------------------------------------------------------------------------------------------

// To, from, or both: `out` or `in` may be empty.
static Operation message(const char* name, const Tensor& out, int to, const Tensor& in, int from, Tag tag, int ranks,
                         Comm::Where where) {
    Operation operation{.name = name,
                        .message = true,
                        .wire_bytes = out.bytes() * ranks,
                        .written = in ? 1u : 0u,
                        .to = out ? to : -1,
                        .from = in ? from : -1,
                        .run = [=](Backend& peers) { return peers.exchange(out, to, in, from, tag); },
                        .where = where};
    if (out) operation.details += describe(out, "to", to);
    if (in) operation.details += describe(in, "from", from);
    for (const Tensor& x : {in, out})
        if (x) operation.tensors.push_back(x);
    return operation;
}

Work Comm::send(Tensor x, int to, Where where) const {
    CHECK(0 <= to && to < size() && to != rank(), "rank {} sends to {} of {}", rank(), to, size());
    return start(message("send", x, to, {}, to, group_->tag, size(), where));
}

Work Comm::recv(Tensor x, int from, Where where) const {
    CHECK(0 <= from && from < size() && from != rank(), "rank {} receives from {} of {}", rank(), from, size());
    return start(message("recv", {}, from, x, from, group_->tag, size(), where));
}

Work Comm::send_recv(Tensor out, int to, Tensor in, int from, Where where) const {
    CHECK(0 <= to && to < size() && 0 <= from && from < size(), "to {}, from {} of {}", to, from, size());
    return size() == 1 ? copy_to(in, out) : start(message("send_recv", out, to, in, from, Tag::user, size(), where));
}

Operation Comm::shift_operation(const Tensor& out, const Tensor& in, int by, Where where) const {
    CHECK(out.dtype() == in.dtype() && out.size() == in.size() && !out.overlaps(in), "{} and {}", out.size(),
          in.size());
    const int n = size(), to = ((rank() + by) % n + n) % n, from = ((rank() - by) % n + n) % n;
    Operation shift = message("send_recv", out, to, in, from, Tag::ring_shift, n, where);
    shift.details = describe(out, "shifted to", to);
    shift.shift = true;
    return shift;
}

Work Comm::ring_shift(Tensor out, Tensor in, int by, Where where) const {
    Operation shift = shift_operation(out, in, by, where);
    return shift.to == rank() ? copy_to(in, out) : start(std::move(shift));
}

bool Comm::shifts_in_order() const { return group_ && group_->backend->on_stream(); }

Work Comm::add_and_shift(Tensor sum, Tensor received, Where where) const {
    CHECK(size() > 1, "a ring of one rank");
    Operation shift = shift_operation(sum, received, 1, where);
    shift.written = 2;
    // The side stream waits for the group's, and then that for the side stream: so the shift's request stands for both.
    shift.run = [sum, received, exchange = std::move(shift.run)](Backend& peers) {
        peers.on_side_stream([&] {
            Tensor total = sum;
            add(total, total, received);
        });
        return exchange(peers);
    };
    return start(std::move(shift));
}

// ---- host numbers ---------------------------------------------------------------------------------------------------

std::vector<double> Comm::numbers(const std::vector<double>& local, int64_t wire_bytes, Where where) const {
    if (size() == 1) return local;
    std::vector<double> all;
    const auto run = [&](Backend& peers) {
        all = peers.gather(local);
        return nullptr;
    };
    start({.name = "scalar",
           .details = fmt::format(", {} numbers", local.size()),
           .wire_bytes = wire_bytes,
           .bytes = 8 * int64_t(local.size()),
           .run = run,
           .where = where})
        .wait();
    return all;
}

std::vector<double> Comm::gather(const std::vector<double>& local, Where where) const {
    return numbers(local, 8 * int64_t(local.size()) * size() * (size() - 1), where);  // bytes of an all-gather
}

std::vector<double> Comm::sum(const std::vector<double>& x, Where where) const {
    const size_t count = x.size();
    const std::vector<double> all = numbers(x, 2 * 8 * int64_t(count) * (size() - 1), where);  // bytes of an all-reduce
    std::vector<double> totals(count);
    for (size_t i = 0; i < all.size(); ++i) totals[i % count] += all[i];
    return totals;
}

double Comm::sum(double x, Where where) const { return sum(std::vector<double>{x}, where)[0]; }

double Comm::max(double x, Where where) const {
    double largest = x;
    for (const double part : numbers({x}, 2 * 8 * (size() - 1), where))
        if (!std::isnan(largest) && !(part <= largest)) largest = part;  // the first NaN stays
    return largest;
}

// ---- groups ---------------------------------------------------------------------------------------------------------

Comm make_comm(std::unique_ptr<Backend> backend, const CommSettings& settings) {
    if (settings.ranks_per_node > 0 && settings.all_reduce != "hierarchical" && settings.all_reduce != "tree")
        usage_error("--ranks-per-node {}: requires --all-reduce hierarchical or tree", settings.ranks_per_node);
    auto group = std::make_shared<Comm::Group>();
    group->shared = std::make_shared<Comm::Shared>(
        Comm::Shared{.queue = WorkQueue(settings.check), .algorithm = &find_all_reduce(settings.all_reduce)});
    group->backend = std::move(backend);
    if (settings.ranks_per_node > 0) group->backend->ranks_per_node = settings.ranks_per_node;
    group->name = "world";
    for (int i = 0; i < group->backend->size(); ++i) group->ranks.push_back(i);
    group->shared->groups.push_back(group);
    return Comm(group);
}

int Comm::rank() const { return group_ ? group_->backend->rank() : 0; }
int Comm::size() const { return group_ ? group_->backend->size() : 1; }
const std::string& Comm::name() const {
    static const std::string alone = "alone";
    return group_ ? group_->name : alone;
}
bool Comm::has_peers() const { return !group_ || group_->backend->has_peers(); }
const char* Comm::backend() const { return group_ ? group_->backend->name() : "none"; }

Comm Comm::split(const std::function<int(int)>& color_of, const std::string& name, GroupLoad load, Where where,
                 const std::function<void(Backend&)>& open) const {
    if (!group_) return *this;
    auto group = std::make_shared<Group>();
    group->name = name;
    group->shared = group_->shared;
    std::vector<int> colors;
    for (int i = 0; i < size(); ++i) colors.push_back(color_of(i));
    for (int i = 0; i < size(); ++i)
        if (colors[size_t(i)] == colors[size_t(rank())]) group->ranks.push_back(group_->ranks[i]);
    if (recorder) group->family = recorder->split(group_->family, colors, name);
    const auto run = [&](Backend& peers) {
        group->backend = peers.split(colors, load);
        if (group->backend) group->backend->ranks_per_node = peers.ranks_per_node;
        if (open && group->backend) open(*group->backend);
        return nullptr;
    };
    start({.name = "split", .details = " into " + name, .run = run, .where = where}).wait();
    if (!group->backend) return {};
    group->shared->groups.push_back(group);
    return Comm(group);
}

Comm Comm::p2p_channel(int from, int to, Where where) const {
    const auto open = [=](Backend& pair) { pair.open_channel(from < to ? 0 : 1, from < to ? 1 : 0); };
    const Comm pair =
        split([=](int rank) { return rank == from || rank == to ? 0 : -1; }, name(), GroupLoad::channel, where, open);
    if (pair.group_) pair.group_->tag = Tag::p2p_channel;
    return pair;
}

std::string Comm::use(const std::string& all_reduce) const {
    const AllReduceAlgorithm& algorithm = find_all_reduce(all_reduce);
    return group_ ? std::exchange(group_->shared->algorithm, &algorithm)->name : all_reduce;
}

void Comm::finish() const {
    if (!group_) return;
    WorkQueue& queue = group_->shared->queue;
    queue.launch_all();
    if (!queue.check()) return;
    const std::vector<std::weak_ptr<Group>>& groups = group_->shared->groups;
    for (size_t i = groups.size(); i-- > 0;)  // newest first: a rank with further calls to make is in one of them
        if (const std::shared_ptr<Group> group = groups[i].lock(); group && group->backend->size() > 1)
            Comm(group).start({.name = "finish", .run = [](Backend&) { return nullptr; }}).wait();
}

}  // namespace train70b
