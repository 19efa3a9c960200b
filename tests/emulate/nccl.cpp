// NCCL on the emulated GPU, between processes of one machine, by the definition of each operation.
//
// All data are messages through rings in shared memory (rings.h): in a collective every rank sends its input to the
// others, then computes its result from all inputs, in rank order or as a ring would. As in NCCL, the operations of a
// communicator run one after another in the order of their calls, whatever their streams. A send ends when it has been
// received; the calls of a group progress together.
//
// Kernels that wait for each other need not all find room on a real GPU, where each block takes a multiprocessor. Here
// they do, but a call that could need more than there are ends the program.
#include <cuda_bf16.h>
#include <nccl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#include "messages.h"

using namespace emulate;

struct ncclComm {
    const int rank, ranks, blocks;  // blocks: of its kernels, at most
    const SharedMemory shared;
    unsigned connected = 0;  // a bit for each kind of collective
    std::mutex mutex{};
    uint64_t issued = 0;                 // operations, by the host
    cudaStream_t stream = nullptr;       // of the last one
    std::atomic<uint64_t> finished = 0;  // operations, on the device
    std::atomic<bool> aborted = false;
};

namespace emulate {
namespace {

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
    std::vector<Message> messages{};
    std::function<void(const std::vector<Message>& messages)> finish{};  // when they are complete
};
struct Group {
    int depth = 0;
    std::shared_ptr<ncclComm> comm;
    cudaStream_t stream = nullptr;
    std::vector<Call> calls;
    ncclResult_t error = ncclSuccess;
};
thread_local Group group;
thread_local std::string last_error;
std::mutex communicators_mutex;
auto& communicators = *new std::map<ncclComm_t, std::shared_ptr<ncclComm>>;  // outlives all static objects

ncclResult_t fail(ncclResult_t result, const std::string& why) {
    refuse("NCCL: " + why);
    last_error = why;
    if (group.depth > 0) group.error = result;
    return result;
}
std::shared_ptr<ncclComm> find(ncclComm_t comm) {
    const std::lock_guard lock(communicators_mutex);
    const auto found = communicators.find(comm);
    return found == communicators.end() ? nullptr : found->second;
}

// Moves what can be moved; returns whether all messages have been received. Those of a ring move in the calls' order.
bool progress(const ncclComm& comm, std::vector<Call>& calls) {
    bool complete = true;
    for (bool moved = true; moved;) {
        moved = false, complete = true;
        std::set<std::pair<Pair*, bool>> busy;
        for (Call& call : calls)
            for (Message& m : call.messages) {
                if (m.complete()) continue;
                if (!busy.contains({m.pair, m.sent}) && m.move(comm.rank)) moved = true;
                if (!m.complete()) busy.insert({m.pair, m.sent}), complete = false;
            }
    }
    for (const Call& call : calls)
        for (const Message& m : call.messages) complete = complete && (!m.sent || m.pair->ring.empty());
    return complete;
}

// What the host waits for while NCCL connects ranks. NCCL allocates memory then: the device may have to be idle for it.
void wait_to_connect(const ncclComm& comm, const std::string& name, const std::function<bool()>& others) {
    const auto begin = std::chrono::steady_clock::now();
    const std::chrono::seconds most(number("EMULATE_CONNECT_S", "100", 1));
    const auto wait = [&](const char* what, const auto& condition) {
        wait_until([&] {
            if (!condition() && !comm.aborted && std::chrono::steady_clock::now() - begin > most)
                fault("NCCL: rank " + std::to_string(comm.rank) + " connects in its first " + name +
                      ", and has waited " + std::to_string(most.count()) + " s for " + what);
            return condition() || comm.aborted;
        });
    };
    wait("the device to become idle", device_is_idle);
    wait("the other ranks", others);
}

// NCCL connects two ranks in the first send from one to the other and its receive, and all ranks in the first
// collective of a kind, unless it did so when the communicator was made.
void connect(ncclComm& comm, const std::vector<Call>& calls) {
    const auto for_each = [&](const auto& body) {
        for (const Call& call : calls)
            for (const Message& m : call.messages)
                if (call.kind == Kind::message) body(m);
    };
    for_each([](const Message& m) { (m.sent ? m.pair->sends : m.pair->receives) = true; });
    for_each([&](const Message& m) {
        if (const auto& other = m.sent ? m.pair->receives : m.pair->sends; !other)
            wait_to_connect(comm, to_string(m.header, !m.sent), [&] { return other.load(); });
    });
    const bool at_start = setting("NCCL_RUNTIME_CONNECT", "1") == "0";
    for (const Call& call : calls) {
        const auto kind = size_t(call.kind);
        if (at_start || call.kind == Kind::message || comm.ranks == 1 || comm.connected >> kind & 1) continue;
        comm.connected |= 1u << kind;
        ++comm.shared.ranks_in(kind);
        wait_to_connect(comm, call.name, [&] { return comm.shared.ranks_in(kind) >= comm.ranks; });
    }
}

// Faults unless the kernels of this communicator and of all others fit the GPU at once. Those on one stream run one
// after another; a communicator that has not been used has none.
void find_room(const ncclComm& next) {
    const std::lock_guard lock(communicators_mutex);
    std::map<cudaStream_t, int> most{{next.stream, next.blocks}};
    for (const auto& [handle, comm] : communicators)
        if (!comm->aborted && comm->issued > 0) most[comm->stream] = std::max(most[comm->stream], comm->blocks);
    int blocks = 0;
    for (const auto& [stream, number] : most) blocks += number;
    if (blocks > multiprocessors())
        fault("NCCL: kernels of " + std::to_string(blocks) + " blocks could wait for each other on " +
              std::to_string(multiprocessors()) + " multiprocessors");
}

auto& bytes_by_blocks = *new std::map<int, uint64_t>;  // sent, by communicators of so many

// Issues the calls of the group.
ncclResult_t issue() {
    const Group whole = std::exchange(group, {});
    if (whole.error != ncclSuccess || whole.calls.empty()) return whole.error;
    const auto calls = std::make_shared<std::vector<Call>>(whole.calls);
    // The messages of a group may be called before or after its collectives, whatever their peers do.
    std::stable_partition(calls->begin(), calls->end(), [](const Call& call) { return call.kind != Kind::message; });
    int64_t to_self = 0;
    for (const Call& call : *calls) {
        for (const Message& m : call.messages) to_self += m.peer != whole.comm->rank ? 0 : m.sent ? 1 : -1;
        for (const Call& other : *calls)
            if (&call != &other && (call.writes.overlaps(other.reads) || call.writes.overlaps(other.writes)))
                return fail(ncclInvalidUsage, call.name + " writes what another call of its group uses");
    }
    if (to_self != 0) return fail(ncclInvalidUsage, "a rank's sends to itself are not its receives in a group");
    connect(*whole.comm, *calls);

    const std::lock_guard lock(whole.comm->mutex);
    whole.comm->stream = whole.stream;
    find_room(*whole.comm);
    const std::string name = calls->size() == 1 ? calls->front().name : std::to_string(calls->size()) + " NCCL calls";
    enqueue(whole.stream, name, [comm = whole.comm, calls, turn = whole.comm->issued++] {
        if (comm->aborted) return true;
        if (comm->finished != turn) return false;
        for (const Call& call : *calls)
            for (const Range& each : {call.reads, call.writes})
                if (each.bytes > 0 && !on_device(each.begin, each.bytes))
                    fault(call.name + ": " + describe(each.begin));
        if (!progress(*comm, *calls)) return false;
        for (const Call& call : *calls) {
            if (call.finish) call.finish(call.messages);
            for (const Message& m : call.messages) bytes_by_blocks[comm->blocks] += m.sent ? m.bytes : 0;
        }
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
    const std::string name = to_string(header, !sent);
    if (peer < 0 || peer >= comm->ranks)
        return fail(ncclInvalidArgument, name + ": there is no rank " + std::to_string(peer));
    Pair& pair = sent ? comm->shared.pair(comm->rank, peer) : comm->shared.pair(peer, comm->rank);
    const Range range{data, count * size_of(type)};
    Call call{name, Kind::message, sent ? range : Range(), sent ? Range() : range};
    call.messages.push_back({sent, peer, &pair, header, data, range.bytes});
    return add(comm, stream, std::move(call));
}

// ---- collectives ----------------------------------------------------------------------------------------------------

const bool kRing = choice("EMULATE_NCCL", {"exact", "ring"}) == 1;

// Sums in rank order, rounded once; as a ring: the order begins behind the rank that has the last word, which of an
// all-reduce's n chunks is another one each, and every hop rounds. owner: that rank, -1 in an all-reduce.
template <class T, class Wide>
void reduce(char* out, const std::vector<const char*>& in, const Header& header, int owner) {
    for (size_t i = 0; i < header.count; ++i) {
        const size_t last = owner >= 0 ? size_t(owner) : i * in.size() / header.count;
        const auto value = [&](size_t r) {
            T x;
            std::memcpy(&x, in[kRing ? (last + 1 + r) % in.size() : r] + i * sizeof x, sizeof x);
            return Wide(x);
        };
        Wide all = value(0);
        for (size_t r = 1; r < in.size(); ++r) {
            const Wide x = value(r);
            if (header.op == ncclSum)
                all = kRing ? Wide(T(all + x)) : all + x;
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
    using Reduce = void (*)(char*, const std::vector<const char*>&, const Header&, int);
    const Reduce reduce_all = header.type == ncclFloat32    ? reduce<float, float>
                              : header.type == ncclFloat64  ? reduce<double, double>
                              : header.type == ncclBfloat16 ? reduce<__nv_bfloat16, float>
                              : header.type == ncclInt32    ? reduce<int32_t, int64_t>
                                                            : Reduce(nullptr);
    const bool reduces = kind == Kind::all_reduce || kind == Kind::reduce_scatter;
    if (reduces && (!reduce_all || (header.op != ncclSum && header.op != ncclMax)))
        return fail(ncclInvalidArgument, name + ": a reduction that the emulator lacks");

    // Every rank, in a broadcast only the root, sends `piece` bytes to each rank: to rank r those at in + r * stride.
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
        char* const to_r = in + size_t(r) * stride;
        call.messages.push_back({true, r, &comm->shared.pair(me, r), header, to_r, gives(me) ? piece : 0});
        call.messages.push_back({false, r, &comm->shared.pair(r, me), header, nullptr, gives(r) ? piece : 0});
    }
    call.finish = [=](const std::vector<Message>& messages) {
        if (piece == 0) return;
        std::vector<const char*> all(size_t(ranks), in + size_t(me) * stride);
        for (const Message& m : messages)
            if (!m.sent) all[size_t(m.peer)] = m.data;
        if (reduces) return reduce_all(out, all, header, kind == Kind::reduce_scatter ? me : -1);
        if (kind == Kind::broadcast) return void(std::memmove(out, all[size_t(root)], piece));
        for (size_t r = 0; r < all.size(); ++r) std::memmove(out + r * piece, all[r], piece);
    };
    return add(comm, stream, std::move(call));
}

}  // namespace
}  // namespace emulate

extern "C" {

// For tests (support.h).
uint64_t emulated_nccl_bytes(int blocks) { return bytes_by_blocks[blocks]; }

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
const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }
ncclResult_t ncclGetVersion(int* version) {
    return *version = number("EMULATE_NCCL_VERSION", std::to_string(NCCL_VERSION_CODE), 2000), ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    static std::atomic<int> count = 0;
    const std::string name = "/emulated_nccl_" + std::to_string(getpid()) + "_" + std::to_string(count++) + "_" +
                             std::to_string(std::chrono::system_clock::now().time_since_epoch().count());
    *id = {};
    name.copy(id->internal, sizeof id->internal - 1);
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int ranks, ncclUniqueId id, int rank, ncclConfig_t* config) {
    const ncclConfig_t unset = NCCL_CONFIG_INITIALIZER;
    const int blocks = config->maxCTAs == NCCL_CONFIG_UNDEF_INT ? 32 : config->maxCTAs;
    if (config->magic != unset.magic || config->version != unset.version || blocks < 1)
        return fail(ncclInvalidArgument, "a configuration that is not initialized, or without blocks");
    if (rank < 0 || rank >= ranks) return fail(ncclInvalidArgument, "no such rank: " + std::to_string(rank));
    int device = 0;
    char bus[32] = "";
    if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetPCIBusId(bus, sizeof bus, device) != cudaSuccess)
        return fail(ncclUnhandledCudaError, "no device");
    const char* host = std::getenv("NCCL_HOSTID");

    const uint64_t gpu = std::hash<std::string>()(std::string(host ? host : "") + " " + bus);
    const std::shared_ptr<ncclComm> comm(
        new ncclComm{rank, ranks, blocks, SharedMemory(id.internal, rank, ranks, gpu)});
    for (int r = 0; r < ranks; ++r)
        if (r != rank && comm->shared.gpu(r) == gpu)
            return fail(ncclInvalidUsage, "Duplicate GPU detected: rank " + std::to_string(rank) + " and rank " +
                                              std::to_string(r) + " both on device " + bus);
    const std::lock_guard lock(communicators_mutex);
    communicators[comm.get()] = comm;
    *made = comm.get();
    return ncclSuccess;
}
ncclResult_t ncclCommDestroy(ncclComm_t handle) {
    const auto comm = find(handle);
    if (comm && !comm->aborted && comm->finished != comm->issued)
        fault("ncclCommDestroy: an operation of this communicator has not ended");
    const std::lock_guard lock(communicators_mutex);
    return communicators.erase(handle) == 1 ? ncclSuccess : ncclInvalidArgument;
}
ncclResult_t ncclCommAbort(ncclComm_t handle) {  // operations that have not ended keep what they need
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
