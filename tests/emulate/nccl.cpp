// NCCL on the emulated GPU, between processes of one machine, by the definition of each operation.
//
// The ranks of a communicator share memory with a ring of bytes for each ordered pair of ranks. All data are messages
// through these rings: in a collective every rank sends its input to the others, then computes its result from all
// inputs in rank order. As in NCCL, the operations of a communicator run one after another in the order of their calls,
// whatever their streams. A send ends when it has been received; the calls of a group progress together.
#include <cuda_bf16.h>
#include <fcntl.h>
#include <nccl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "emulate.h"

namespace emulate {
namespace {

// ---- shared memory --------------------------------------------------------------------------------------------------

struct Ring {  // one process writes, one reads
    static constexpr uint64_t kBytes = 64 << 10;
    alignas(64) std::atomic<uint64_t> written;  // bytes since the beginning
    alignas(64) std::atomic<uint64_t> read;
    alignas(64) char data[kBytes];

    bool empty() const { return read.load(std::memory_order_acquire) == written.load(std::memory_order_relaxed); }
    // Both move at most n bytes and return how many.
    size_t put(const char* from, size_t n) {
        const uint64_t end = written.load(std::memory_order_relaxed);
        n = std::min<size_t>(n, kBytes - (end - read.load(std::memory_order_acquire)));
        const size_t before_wrap = std::min<size_t>(n, kBytes - end % kBytes);
        std::copy_n(from, before_wrap, data + end % kBytes);
        std::copy_n(from + before_wrap, n - before_wrap, data);
        written.store(end + n, std::memory_order_release);
        return n;
    }
    size_t take(char* to, size_t n) {
        const uint64_t begin = read.load(std::memory_order_relaxed);
        n = std::min<size_t>(n, written.load(std::memory_order_acquire) - begin);
        const size_t before_wrap = std::min<size_t>(n, kBytes - begin % kBytes);
        std::copy_n(data + begin % kBytes, before_wrap, to);
        std::copy_n(data, n - before_wrap, to + before_wrap);
        read.store(begin + n, std::memory_order_release);
        return n;
    }
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

struct Pair {  // of a sender and a receiver
    Ring ring;
    std::atomic<bool> sends, receives;  // whether the rank has called its first send (receive) of this pair
};
struct alignas(64) Member {
    std::atomic<bool> present;
    uint64_t gpu;  // a hash of its host and GPU
};
struct alignas(64) Start {
    std::atomic<int> present;  // ranks
};

template <class Condition>
void wait_until(const Condition& condition) {
    while (!condition()) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

}  // namespace
}  // namespace emulate

using namespace emulate;

struct ncclComm {
    int rank, ranks;
    char* memory;  // Start, a Member per rank, a Pair per pair of ranks
    std::mutex mutex;
    uint64_t issued = 0;                 // operations, by the host
    std::atomic<uint64_t> finished = 0;  // operations, on the device
    std::atomic<bool> aborted = false;

    static size_t bytes(int n) { return sizeof(Start) + size_t(n) * sizeof(Member) + size_t(n * n) * sizeof(Pair); }
    Start& start() const { return *reinterpret_cast<Start*>(memory); }
    Member& member(int r) const { return reinterpret_cast<Member*>(memory + sizeof(Start))[r]; }
    Pair& pair(int from, int to) const { return reinterpret_cast<Pair*>(&member(ranks))[from * ranks + to]; }

    ncclComm(int rank_, int ranks_, char* memory_) : rank(rank_), ranks(ranks_), memory(memory_) {}
    ncclComm(const ncclComm&) = delete;
    ~ncclComm() { munmap(memory, bytes(ranks)); }
};

namespace emulate {
namespace {

// ---- messages -------------------------------------------------------------------------------------------------------

enum class Kind { message, all_reduce, reduce_scatter, all_gather, broadcast };

struct Header {  // what both ends of a message must agree on
    Kind kind;
    ncclDataType_t type;
    uint64_t count;
    ncclRedOp_t op = ncclSum;
    int root = 0;
    bool operator==(const Header&) const = default;
};

size_t size_of(ncclDataType_t type) {
    constexpr size_t kSizes[ncclNumTypes] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return unsigned(type) < ncclNumTypes ? kSizes[type] : 0;
}
std::string to_string(const Header& h, bool received = false) {
    static const char* const kNames[] = {"Send", "AllReduce", "ReduceScatter", "AllGather", "Broadcast"};
    std::string text = received ? "ncclRecv" : std::string("nccl") + kNames[size_t(h.kind)];
    text += "(count " + std::to_string(h.count) + ", type " + std::to_string(h.type);
    if (h.kind == Kind::all_reduce || h.kind == Kind::reduce_scatter) text += h.op == ncclMax ? ", max" : ", sum";
    if (h.kind == Kind::broadcast) text += ", root " + std::to_string(h.root);
    return text + ")";
}

struct Message {
    int peer;
    Header header;
    char* data;  // nullptr: received into `held`
    size_t bytes;
    size_t moved = 0;  // of the header and the data
    Header got{};
    std::vector<char> held{};

    bool complete() const { return moved == sizeof header + bytes; }
    // Both move what they can; whether that was anything.
    bool send(Ring& ring) {
        const size_t before = moved;
        if (moved < sizeof header) moved += ring.put(reinterpret_cast<char*>(&header) + moved, sizeof header - moved);
        if (moved >= sizeof header) moved += ring.put(data + (moved - sizeof header), sizeof header + bytes - moved);
        return moved > before;
    }
    bool receive(Ring& ring, int rank) {
        const size_t before = moved;
        if (moved < sizeof header) {
            moved += ring.take(reinterpret_cast<char*>(&got) + moved, sizeof header - moved);
            if (moved < sizeof header) return moved > before;
            if (got != header)
                fault("NCCL: rank " + std::to_string(peer) + "'s " + to_string(got) + " meets rank " +
                      std::to_string(rank) + "'s " + to_string(header, header.kind == Kind::message));
            if (!data) held.resize(bytes), data = held.data();
        }
        moved += ring.take(data + (moved - sizeof header), sizeof header + bytes - moved);
        return moved > before;
    }
};

// ---- calls and their groups -----------------------------------------------------------------------------------------

struct Range {
    const char* begin = nullptr;
    size_t bytes = 0;
    bool overlaps(const Range& x) const {
        return bytes > 0 && x.bytes > 0 && begin < x.begin + x.bytes && x.begin < begin + bytes;
    }
};
struct Call {
    std::string name;
    Kind kind;
    Range reads, writes;
    std::vector<Message> out{}, in{};  // a collective's: one per peer
    std::function<void(const std::vector<Message>& in)> finish{};
};
struct Group {
    int depth = 0;
    std::shared_ptr<ncclComm> comm;
    cudaStream_t stream = nullptr;
    std::vector<Call> calls;
    ncclResult_t error = ncclSuccess;
};
thread_local Group group;
std::mutex communicators_mutex;
std::map<ncclComm_t, std::shared_ptr<ncclComm>> communicators;

ncclResult_t fail(ncclResult_t result, const std::string& why) {
    refuse("NCCL: " + why);
    if (group.depth > 0) group.error = result;
    return result;
}
std::shared_ptr<ncclComm> find(ncclComm_t comm) {
    const std::lock_guard lock(communicators_mutex);
    const auto found = communicators.find(comm);
    return found == communicators.end() ? nullptr : found->second;
}

// Moves what can be moved; whether all messages have been sent and received. Per ring, in the order of the calls.
bool progress(const ncclComm& comm, std::vector<Call>& calls) {
    bool complete = true;
    for (bool moved = true; moved;) {
        moved = false, complete = true;
        std::vector<bool> sending(size_t(comm.ranks)), receiving(size_t(comm.ranks));
        const auto advance = [&](std::vector<bool>& busy, const Message& m, const auto& move) {
            if (!m.complete() && !busy[size_t(m.peer)] && move()) moved = true;
            if (!m.complete()) busy[size_t(m.peer)] = true, complete = false;
        };
        for (Call& call : calls) {
            for (Message& m : call.out) advance(sending, m, [&] { return m.send(comm.pair(comm.rank, m.peer).ring); });
            for (Message& m : call.in)
                advance(receiving, m, [&] { return m.receive(comm.pair(m.peer, comm.rank).ring, comm.rank); });
        }
    }
    for (const Call& call : calls)
        for (const Message& m : call.out) complete = complete && comm.pair(comm.rank, m.peer).ring.empty();
    return complete;
}

// NCCL connects a sender and a receiver in their first send and receive: each host waits for the other's call.
void connect(const ncclComm& comm, const std::vector<Call>& calls) {
    const auto for_each = [&](const auto& flag_mine, const auto& flag_peers) {
        for (const Call& call : calls) {
            if (call.kind != Kind::message) continue;
            for (const Message& m : call.out)
                flag_mine(comm.pair(comm.rank, m.peer).sends), flag_peers(comm.pair(comm.rank, m.peer).receives);
            for (const Message& m : call.in)
                flag_mine(comm.pair(m.peer, comm.rank).receives), flag_peers(comm.pair(m.peer, comm.rank).sends);
        }
    };
    const auto nothing = [](const std::atomic<bool>&) {};
    for_each([](std::atomic<bool>& flag) { flag = true; }, nothing);
    for_each(nothing, [&](const std::atomic<bool>& flag) { wait_until([&] { return flag || comm.aborted; }); });
}

// Issues the calls of the group.
ncclResult_t issue() {
    const Group whole = std::exchange(group, {});
    if (whole.error != ncclSuccess || whole.calls.empty()) return whole.error;
    const auto calls = std::make_shared<std::vector<Call>>(whole.calls);
    // The messages of a group may be called before or after its collectives, whatever their peers do.
    std::stable_partition(calls->begin(), calls->end(), [](const Call& call) { return call.kind != Kind::message; });
    int64_t to_self = 0;
    for (const Call& call : *calls) {
        for (const Message& m : call.out) to_self += m.peer == whole.comm->rank;
        for (const Message& m : call.in) to_self -= m.peer == whole.comm->rank;
        for (const Call& other : *calls)
            if (&call != &other && (call.writes.overlaps(other.reads) || call.writes.overlaps(other.writes)))
                return fail(ncclInvalidUsage, call.name + " writes what another call of its group uses");
    }
    if (to_self != 0) return fail(ncclInvalidUsage, "a rank's sends to itself are not its receives in a group");
    connect(*whole.comm, *calls);

    const std::lock_guard lock(whole.comm->mutex);
    const std::string name = calls->size() == 1 ? calls->front().name : std::to_string(calls->size()) + " NCCL calls";
    enqueue(whole.stream, name, [comm = whole.comm, calls, turn = whole.comm->issued++] {
        if (comm->aborted) return true;
        if (comm->finished != turn || !progress(*comm, *calls)) return false;
        for (const Call& call : *calls)
            if (call.finish) call.finish(call.in);
        comm->finished = turn + 1;
        return true;
    });
    return ncclSuccess;
}

ncclResult_t add(const std::shared_ptr<ncclComm>& comm, cudaStream_t stream, Call call) {
    for (const Range& each : {call.reads, call.writes})
        if (each.bytes > 0 && !on_device(each.begin, each.bytes))
            return fail(ncclInvalidArgument, call.name + ": memory that is not in one allocation of the device");
    if (!group.calls.empty() && (group.comm != comm || group.stream != stream))
        return fail(ncclInvalidUsage, "a group with several communicators or streams, which the emulator lacks");
    group.comm = comm;
    group.stream = stream;
    group.calls.push_back(std::move(call));
    return group.depth > 0 ? ncclSuccess : issue();
}

ncclResult_t message(bool sent, char* data, size_t count, ncclDataType_t type, int peer, ncclComm_t handle,
                     cudaStream_t stream) {
    const auto comm = find(handle);
    if (!comm || size_of(type) == 0) return fail(ncclInvalidArgument, "a message without communicator or type");
    const Header header{Kind::message, type, count};
    if (peer < 0 || peer >= comm->ranks)
        return fail(ncclInvalidArgument, to_string(header, !sent) + ": there is no rank " + std::to_string(peer));
    const Range range{data, count * size_of(type)};
    const std::vector<Message> one = {{peer, header, data, range.bytes}};
    const std::string name = to_string(header, !sent);
    return add(comm, stream,
               sent ? Call{name, Kind::message, range, {}, one, {}} : Call{name, Kind::message, {}, range, {}, one});
}

// ---- collectives ----------------------------------------------------------------------------------------------------

template <class T, class Wide>
void reduce(char* out, const std::vector<const char*>& in, const Header& header) {
    for (size_t i = 0; i < header.count; ++i) {
        const auto value = [&](size_t r) {
            T x;
            std::memcpy(&x, in[r] + i * sizeof x, sizeof x);
            return Wide(x);
        };
        Wide all = value(0);
        for (size_t r = 1; r < in.size(); ++r) {
            const Wide x = value(r);
            if (header.op == ncclSum)
                all += x;
            else if (x > all || all != all)  // as fmax: NaN only if all are
                all = x;
        }
        const T result = T(all);
        std::memcpy(out + i * sizeof result, &result, sizeof result);
    }
}

ncclResult_t collective(const Header& header, const void* in_, void* out_, ncclComm_t handle, cudaStream_t stream) {
    const auto comm = find(handle);
    if (!comm || size_of(header.type) == 0)
        return fail(ncclInvalidArgument, "a collective without communicator or type");
    const std::string name = to_string(header);
    const Kind kind = header.kind;
    const int me = comm->rank, ranks = comm->ranks, root = header.root;
    if (root < 0 || root >= ranks) return fail(ncclInvalidArgument, name + ": no such rank");
    using Reduce = void (*)(char*, const std::vector<const char*>&, const Header&);
    const Reduce reduce_all = header.type == ncclFloat32    ? reduce<float, float>
                              : header.type == ncclFloat64  ? reduce<double, double>
                              : header.type == ncclBfloat16 ? reduce<__nv_bfloat16, float>
                              : header.type == ncclInt32    ? reduce<int32_t, int64_t>
                                                            : Reduce(nullptr);
    const bool reduces = kind == Kind::all_reduce || kind == Kind::reduce_scatter;
    if (reduces && (!reduce_all || (header.op != ncclSum && header.op != ncclMax)))
        return fail(ncclInvalidArgument, name + ": a reduction that the emulator lacks");

    // Every rank sends `piece` bytes to every rank, those for rank r from in + r * stride; in a broadcast only the root.
    const size_t piece = header.count * size_of(header.type), stride = kind == Kind::reduce_scatter ? piece : 0;
    const auto gives = [=](int r) { return kind != Kind::broadcast || r == root; };
    char* const in = static_cast<char*>(const_cast<void*>(in_));
    char* const out = static_cast<char*>(out_);
    const Range reads{in, gives(me) ? piece * size_t(stride > 0 ? ranks : 1) : 0};
    const Range writes{out, piece * size_t(kind == Kind::all_gather ? ranks : 1)};
    const bool in_place = in + size_t(me) * stride == out + (kind == Kind::all_gather ? size_t(me) * piece : 0);
    if (reads.overlaps(writes) && !in_place) return fail(ncclInvalidArgument, name + ": its buffers overlap");

    Call call{name, kind, reads, writes};
    for (int r = 0; r < ranks; ++r) {
        if (r == me) continue;
        call.out.push_back({r, header, in + size_t(r) * stride, gives(me) ? piece : 0});
        call.in.push_back({r, header, nullptr, gives(r) ? piece : 0});
    }
    call.finish = [=](const std::vector<Message>& received) {
        if (piece == 0) return;
        std::vector<const char*> all;
        for (const Message& m : received) all.push_back(m.data);
        all.insert(all.begin() + me, in + size_t(me) * stride);
        if (reduces) return reduce_all(out, all, header);
        if (kind == Kind::broadcast) return void(std::memmove(out, all[size_t(root)], piece));
        for (size_t r = 0; r < all.size(); ++r) std::memmove(out + r * piece, all[r], piece);
    };
    return add(comm, stream, std::move(call));
}

}  // namespace
}  // namespace emulate

extern "C" {

const char* ncclGetErrorString(ncclResult_t result) {
    switch (result) {
        case ncclSuccess: return "no error";
        case ncclUnhandledCudaError: return "unhandled cuda error";
        case ncclSystemError: return "unhandled system error";
        case ncclInvalidArgument: return "invalid argument";
        case ncclInvalidUsage: return "invalid usage";
        default: return "internal error";
    }
}
ncclResult_t ncclGetVersion(int* version) { return *version = NCCL_VERSION_CODE, ncclSuccess; }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    static std::atomic<int> count = 0;
    const std::string name = "/emulated_nccl_" + std::to_string(getpid()) + "_" + std::to_string(count++) + "_" +
                             std::to_string(std::chrono::system_clock::now().time_since_epoch().count());
    *id = {};
    name.copy(id->internal, sizeof id->internal - 1);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRank(ncclComm_t* made, int ranks, ncclUniqueId id, int rank) {
    if (rank < 0 || rank >= ranks) return fail(ncclInvalidArgument, "no such rank: " + std::to_string(rank));
    int device = 0;
    char bus[32] = "";
    if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetPCIBusId(bus, sizeof bus, device) != cudaSuccess)
        return fail(ncclUnhandledCudaError, "no device");
    const char* host = std::getenv("NCCL_HOSTID");

    const size_t bytes = ncclComm::bytes(ranks);
    const int file = shm_open(id.internal, O_RDWR | O_CREAT, 0600);  // all zeros, which is what its content begins with
    if (file < 0 || ftruncate(file, off_t(bytes)) != 0)
        return fail(ncclSystemError, std::string("cannot create /dev/shm") + id.internal);
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (memory == MAP_FAILED) return fail(ncclSystemError, std::string("cannot map /dev/shm") + id.internal);
    const auto comm = std::make_shared<ncclComm>(rank, ranks, static_cast<char*>(memory));
    if (comm->member(rank).present.exchange(true)) fault("NCCL: two processes are rank " + std::to_string(rank));
    comm->member(rank).gpu = std::hash<std::string>()(std::string(host ? host : "") + " " + bus);
    if (++comm->start().present == ranks) shm_unlink(id.internal);
    wait_until([&] { return comm->start().present == ranks; });

    for (int r = 0; r < ranks; ++r)
        if (r != rank && comm->member(r).gpu == comm->member(rank).gpu)
            return fail(ncclInvalidUsage, "Duplicate GPU detected: rank " + std::to_string(rank) + " and rank " +
                                              std::to_string(r) + " both on device " + bus);
    const std::lock_guard lock(communicators_mutex);
    communicators[comm.get()] = comm;
    *made = comm.get();
    return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t comm) {  // operations that have not ended keep what they need
    const std::lock_guard lock(communicators_mutex);
    return communicators.erase(comm) == 1 ? ncclSuccess : ncclInvalidArgument;
}
ncclResult_t ncclCommAbort(ncclComm_t handle) {
    if (const auto comm = find(handle)) comm->aborted = true;
    return ncclCommDestroy(handle);
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
    return *error = ncclSuccess, find(comm) ? ncclSuccess : ncclInvalidArgument;
}

ncclResult_t ncclGroupStart() { return ++group.depth, ncclSuccess; }
ncclResult_t ncclGroupEnd() {
    if (group.depth == 0) return fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    return --group.depth == 0 ? issue() : ncclSuccess;
}
ncclResult_t ncclSend(const void* p, size_t count, ncclDataType_t type, int to, ncclComm_t comm, cudaStream_t stream) {
    return message(true, static_cast<char*>(const_cast<void*>(p)), count, type, to, comm, stream);
}
ncclResult_t ncclRecv(void* p, size_t count, ncclDataType_t type, int from, ncclComm_t comm, cudaStream_t stream) {
    return message(false, static_cast<char*>(p), count, type, from, comm, stream);
}
ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                           ncclComm_t comm, cudaStream_t stream) {
    return collective({Kind::all_reduce, type, count, op}, in, out, comm, stream);
}
ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type, ncclRedOp_t op,
                               ncclComm_t comm, cudaStream_t stream) {
    return collective({Kind::reduce_scatter, type, count, op}, in, out, comm, stream);
}
ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type, ncclComm_t comm,
                           cudaStream_t stream) {
    return collective({Kind::all_gather, type, count}, in, out, comm, stream);
}
ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    return collective({Kind::broadcast, type, count, ncclSum, root}, in, out, comm, stream);
}

}  // extern "C"
