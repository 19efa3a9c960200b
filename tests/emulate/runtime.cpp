// The CUDA runtime: streams and events. An operation that is issued waits in its stream; the device performs one when a
// call of the host lets it, at moments that EMULATE_STREAMS chooses:
//   random  after each call a random number of operations, of random streams
//   eager   each operation as soon as it can run
//   lazy    none before the host waits for it; then the streams that it does not wait for come last
// Where the host stays away for a while (it computes, or waits for another process), a thread goes on in its place.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "internal.h"

extern "C" const int emulated_gpu = 1;  // for tests/support.h

namespace emulate {
struct Point {  // in a stream, which an event stands for
    bool passed = false;
    cudaStream_t stream = nullptr;
    std::chrono::steady_clock::time_point time;
};
struct Operation {
    std::string name;
    std::shared_ptr<Point> after;  // runs when this has been passed
    std::function<bool()> step;
};
}  // namespace emulate

struct CUstream_st {
    int gpu = 0;
    std::deque<emulate::Operation> operations;
};
struct CUevent_st {
    bool timing = true;
    std::shared_ptr<emulate::Point> point;
};

namespace emulate {

std::string setting(const char* name, const char* otherwise) {
    const char* value = std::getenv(name);
    return value ? value : otherwise;
}

int choice(const char* name, const std::vector<std::string>& values) {
    const auto found = std::find(values.begin(), values.end(), setting(name, values[0].c_str()));
    if (found != values.end()) return int(found - values.begin());
    std::string text = std::string(name) + "=" + setting(name, "") + ": must be ";
    for (const std::string& value : values) text += (&value == &values[0] ? "" : ", ") + value;
    fault(text);
}

uint64_t random() {
    static uint64_t state = [] {  // each rank of mpirun has a sequence of its own
        const std::string seed = setting("EMULATE_SEED", "1"), rank = setting("OMPI_COMM_WORLD_RANK", "0");
        return (std::stoull(seed) * 4096 + std::stoull(rank)) * 0x9e3779b97f4a7c15u + 1;
    }();
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return state;
}

void fault(const std::string& what) {
    std::fprintf(stderr, "emulate: %s\n", what.c_str());
    if (in_launch)
        std::fprintf(stderr, "  in %s, block %u %u %u, thread %u %u %u\n", name_of(now.launch->kernel).c_str(),
                     at.block.x, at.block.y, at.block.z, at.thread.x, at.thread.y, at.thread.z);
    std::fflush(stderr);
    std::abort();
}

bool refuse(const std::string& what) {
    std::fprintf(stderr, "emulate: %s\n", what.c_str());
    return false;
}

namespace {

enum class Pace { random, eager, lazy };
const auto kPace = Pace(choice("EMULATE_STREAMS", {"random", "eager", "lazy"}));

std::recursive_mutex& device = *new std::recursive_mutex;
auto& streams = *new std::vector<cudaStream_t>;
std::atomic<uint64_t> calls = 0;                         // of the host
const char* held = nullptr;                              // emulated_hold
auto& performed = *new std::map<std::string, uint64_t>;  // operations, by name
auto& allowed_shared = *new std::map<const void*, int>;

// Tries the first operation of a stream: true if it is done.
bool try_first(cudaStream_t stream) {
    if (stream->operations.empty()) return false;
    Operation& first = stream->operations.front();
    if (first.after && !first.after->passed) return false;
    if (held && first.name.starts_with(held)) return false;
    if (first.step) {
        const int outer = std::exchange(current_gpu, stream->gpu);
        open_memory();
        performing = true;
        const bool done = first.step();
        performing = false;
        current_gpu = outer;
        if (!done) return false;
    }
    ++performed[first.name];
    stream->operations.pop_front();
    return true;
}

bool advance_any() {  // one operation of any stream
    const size_t n = streams.size(), first = n > 0 ? random() % n : 0;
    for (size_t i = 0; i < n; ++i)
        if (try_first(streams[(first + i) % n])) return true;
    return false;
}

// One operation of this stream, or of one that it waits for.
bool advance_towards(cudaStream_t stream) {
    for (size_t hops = 0; hops <= streams.size() && stream; ++hops) {
        if (try_first(stream)) return true;
        if (stream->operations.empty()) return false;
        const std::shared_ptr<Point>& after = stream->operations.front().after;
        if (!after || after->passed) return false;  // it waits for another process
        stream = after->stream;
    }
    return false;
}

template <class Done>
void wait_until(cudaStream_t stream, Done done) {
    while (true) {
        ++calls;
        {
            const std::scoped_lock lock(device);
            if (done()) return close_memory();
            const bool moved = (kPace == Pace::lazy && advance_towards(stream)) || advance_any();
            ++calls;  // go_on_alone may have been waiting for the lock
            if (moved) continue;
        }
        std::this_thread::sleep_for(std::chrono::microseconds(50));  // for another process
    }
}

void go_on_alone() {
    handle_faults();
    constexpr auto kPause = std::chrono::milliseconds(2);
    uint64_t seen = 0;
    while (true) {
        std::this_thread::sleep_for(kPause);
        if (const uint64_t now = calls; now != seen) {
            seen = now;
            continue;
        }
        const std::scoped_lock lock(device);
        while (calls == seen && advance_any()) {}
        close_memory();
    }
}

cudaStream_t known(cudaStream_t stream, const std::string& caller) {
    if (std::find(streams.begin(), streams.end(), stream) == streams.end())
        fault(caller + ": not a stream (the default stream is not emulated)");
    return stream;
}

void append(cudaStream_t stream, Operation operation) {
    ++calls;
    const std::scoped_lock lock(device);
    known(stream, operation.name)->operations.push_back(std::move(operation));
    if (kPace == Pace::eager)
        while (advance_any()) {}
    if (kPace == Pace::random)
        for (uint64_t n = random() % 3; n > 0; --n) advance_any();
    ++calls;  // go_on_alone may have been waiting for the lock
}

}  // namespace

bool device_is_idle() {
    ++calls;
    const std::scoped_lock lock(device);
    while (advance_any()) {}
    return std::all_of(streams.begin(), streams.end(),
                       [](cudaStream_t each) { return each->gpu != current_gpu || each->operations.empty(); });
}

void enqueue(cudaStream_t stream, const std::string& name, std::function<bool()> step) {
    append(stream, {name, nullptr, std::move(step)});
}

cudaError_t allow_shared(const void* kernel, int bytes) {
    if (bytes > shared_limit())
        return error(cudaErrorInvalidValue, "cudaFuncSetAttribute: at most " + std::to_string(shared_limit() >> 10) +
                                                " KiB of shared memory on this GPU");
    allowed_shared[kernel] = std::max(allowed_shared[kernel], bytes);
    return cudaSuccess;
}

void enqueue_launch(cudaStream_t stream, Launch launch) {
    ++calls;
    const std::scoped_lock lock(device);
    const Extent &grid = launch.grid, &block = launch.block;
    const char* wrong = nullptr;
    if (grid.x < 1 || grid.y < 1 || grid.z < 1) wrong = "an empty grid";
    if (grid.x > INT32_MAX || grid.y > 65535 || grid.z > 65535) wrong = "the grid is too large";
    if (block.count() < 1 || block.count() > 1024) wrong = "a block has 1 to 1024 threads";
    if (block.z > 64) wrong = "blockDim.z is at most 64";
    if (launch.shared > size_t(shared_limit())) wrong = "more shared memory than this GPU has for a block";
    const bool allowed = launch.shared <= size_t(allowed_shared[launch.kernel]);
    launch.shared_limit = allowed && launch.shared > 0 ? size_t(shared_limit()) : 48 << 10;
    if (launch.shared > 48 << 10 && !allowed)
        wrong = "more than 48 KiB of shared memory must be allowed by cudaFuncSetAttribute";
    if (known(stream, "launch")->gpu != current_gpu) wrong = "the stream belongs to another GPU than the current one";
    if (wrong) {
        const auto text = [](const Extent& e) {
            return std::to_string(e.x) + " " + std::to_string(e.y) + " " + std::to_string(e.z);
        };
        error(cudaErrorInvalidConfiguration, "launch of " + name_of(launch.kernel) + ": " + wrong + " (grid " +
                                                 text(grid) + ", block " + text(block) + ", shared memory " +
                                                 std::to_string(launch.shared) + " bytes)");
        return;
    }
    enqueue(stream, "launch", [launch = std::move(launch)] {
        run(launch);
        return true;
    });
}

}  // namespace emulate

using namespace emulate;

extern "C" {

// ---- for tests (support.h): what can run while something else cannot ----

// Operations whose name begins so wait until the next call. nullptr: none.
void emulated_hold(const char* name) {
    const std::scoped_lock lock(device);
    held = name;
}
// How many operations whose name begins so have been performed.
uint64_t emulated_performed(const char* name) {
    const std::scoped_lock lock(device);
    uint64_t sum = 0;
    for (const auto& [each, count] : performed)
        if (each.starts_with(name)) sum += count;
    return sum;
}

// ---- streams and events ----

cudaError_t CUDARTAPI cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned) {
    const std::scoped_lock lock(device);
    handle_faults();
    create_context();
    static std::once_flag once;
    std::call_once(once, [] { std::thread(go_on_alone).detach(); });
    *stream = new CUstream_st{current_gpu, {}};
    streams.push_back(*stream);
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamCreateWithPriority(cudaStream_t* stream, unsigned flags, int) {
    return cudaStreamCreateWithFlags(stream, flags);
}
cudaError_t CUDARTAPI cudaStreamSynchronize(cudaStream_t stream) {
    {
        const std::scoped_lock lock(device);
        known(stream, "cudaStreamSynchronize");
    }
    wait_until(stream, [&] { return stream->operations.empty(); });
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaDeviceSynchronize() {
    wait_until(nullptr, device_is_idle);
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamDestroy(cudaStream_t stream) {
    cudaStreamSynchronize(stream);
    const std::scoped_lock lock(device);
    std::erase(streams, stream);
    delete stream;
    return cudaSuccess;
}

cudaError_t CUDARTAPI cudaEventCreateWithFlags(cudaEvent_t* event, unsigned flags) {
    *event = new CUevent_st{!(flags & cudaEventDisableTiming), nullptr};
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaEventCreate(cudaEvent_t* event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }
cudaError_t CUDARTAPI cudaEventDestroy(cudaEvent_t event) {
    if (!event) return error(cudaErrorInvalidResourceHandle, "cudaEventDestroy: no event");
    delete event;
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    const auto point = std::make_shared<Point>();
    point->stream = stream;
    {
        const std::scoped_lock lock(device);
        event->point = point;
    }
    enqueue(stream, "cudaEventRecord", [point] {
        point->passed = true;
        point->time = std::chrono::steady_clock::now();
        return true;
    });
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned) {
    if (event->point) append(stream, {"cudaStreamWaitEvent", event->point, nullptr});
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaEventSynchronize(cudaEvent_t event) {
    const std::shared_ptr<Point> point = event->point;
    if (point) wait_until(point->stream, [&] { return point->passed; });
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaEventQuery(cudaEvent_t event) {
    const std::scoped_lock lock(device);
    return !event->point || event->point->passed ? cudaSuccess : cudaErrorNotReady;
}
cudaError_t CUDARTAPI cudaEventElapsedTime(float* milliseconds, cudaEvent_t begin, cudaEvent_t end) {
    const std::scoped_lock lock(device);
    if (!begin->timing || !end->timing || !begin->point || !end->point)
        return error(cudaErrorInvalidResourceHandle, "cudaEventElapsedTime: of an event without time, or not recorded");
    if (!begin->point->passed || !end->point->passed) return cudaErrorNotReady;
    *milliseconds = std::chrono::duration<float, std::milli>(end->point->time - begin->point->time).count();
    return cudaSuccess;
}

// ---- memory ----

cudaError_t CUDARTAPI cudaMallocAsync(void** p, size_t bytes, cudaStream_t stream) {
    ++calls;
    const std::scoped_lock lock(device);
    if (known(stream, "cudaMallocAsync")->gpu != current_gpu)
        return error(cudaErrorInvalidValue, "cudaMallocAsync: the stream belongs to another GPU than the current one");
    if (bytes == 0) return error(cudaErrorInvalidValue, "cudaMallocAsync: 0 bytes");
    *p = allocate(bytes);
    if (!*p) return error(cudaErrorMemoryAllocation);
    enqueue(stream, "cudaMallocAsync", [memory = *p] {
        exist(memory);
        return true;
    });
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaFreeAsync(void* p, cudaStream_t stream) {
    {
        const std::scoped_lock lock(device);
        begin_release(p, "cudaFreeAsync");
    }
    enqueue(stream, "cudaFreeAsync", [p] {
        release(p);
        return true;
    });
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMallocHost(void** p, size_t bytes) {
    cudaDeviceSynchronize();  // as the driver may
    *p = allocate_pinned(bytes);
    return *p ? cudaSuccess : error(cudaErrorMemoryAllocation);
}
cudaError_t CUDARTAPI cudaFreeHost(void* p) {
    cudaDeviceSynchronize();
    release_pinned(p);
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemsetAsync(void* p, int value, size_t bytes, cudaStream_t stream) {
    if (!on_device(p, bytes)) return error(cudaErrorInvalidValue, "cudaMemsetAsync: " + describe(p));
    enqueue(stream, "cudaMemsetAsync", [=] {
        if (!on_device(p, bytes)) fault("cudaMemsetAsync: " + describe(p));
        set_bytes(p, value, bytes);
        return true;
    });
    return cudaSuccess;
}
cudaError_t CUDARTAPI cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind,
                                      cudaStream_t stream) {
    const Place target = place_of(to, bytes), source = place_of(from, bytes);
    if (target == Place::invalid || source == Place::invalid)
        return error(cudaErrorInvalidValue, "cudaMemcpyAsync: " + describe(target == Place::invalid ? to : from) +
                                                ", " + std::to_string(bytes) + " bytes to copy");
    const bool to_device = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice;
    const bool from_device = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice;
    if (to_device != (target == Place::device) || from_device != (source == Place::device))
        return error(cudaErrorInvalidValue, "cudaMemcpyAsync: the direction is not that of the pointers");
    // Of pageable memory the call copies; to it, the host waits.
    std::shared_ptr<std::vector<char>> staged;
    if (source == Place::pageable)
        staged =
            std::make_shared<std::vector<char>>(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
    enqueue(stream, "cudaMemcpyAsync", [=] {
        for (const auto& [p, place] : {std::pair<const void*, Place>(to, target), {from, source}})
            if (place == Place::device && !on_device(p, bytes)) fault("cudaMemcpyAsync: " + describe(p));
        if (bytes > 0) std::memmove(to, staged ? staged->data() : from, bytes);
        return true;
    });
    return target == Place::pageable ? cudaStreamSynchronize(stream) : cudaSuccess;
}

}  // extern "C"
