// Device memory: one range of addresses for each GPU, which the host may not touch: its pages are protected from the
// moment the host has waited for the device until the next operation. A released allocation is filled with NaNs and
// rests before its memory is used again.
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "internal.h"

namespace emulate {

constinit thread_local int current_gpu = 0;
constinit thread_local bool performing = false;

char* reserve(size_t bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) fault("cannot reserve " + std::to_string(bytes) + " bytes of address space");
    return static_cast<char*>(p);
}

int gpu_count() {
    static const int count = [] {
        const std::string text = setting("EMULATE_GPUS", "1");
        if (text.size() != 1 || text[0] < '0' || text[0] > '8') fault("EMULATE_GPUS=" + text + ": must be 0 to 8");
        return text[0] - '0';
    }();
    return count;
}

namespace {

const size_t kUnit = kTail > 0 ? 1 << 20 : 256;   // allocations are aligned to kUnit, with a unit between them
constexpr size_t kQuarantine = size_t(64) << 20;  // bytes of released memory that are not used again

void on_fault(int signal_number, siginfo_t* info, void*) {
    std::fprintf(stderr, "emulate: %s touches %p: %s\n", in_launch ? "a kernel" : "the host", info->si_addr,
                 describe(info->si_addr).c_str());
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

struct Allocation {
    size_t offset, bytes, reserved;
    enum { live, to_release, released } state;
    bool exists = false;  // on the device: its stream has reached the allocation
};

struct Gpu {
    char* arena = reserve(kArena);
    uint32_t* owner =
        reinterpret_cast<uint32_t*>(reserve(kArena / kUnit * sizeof(uint32_t)));  // by unit: its number + 1
    std::vector<Allocation> allocations;
    std::map<size_t, std::vector<uint32_t>> free;  // numbers, by reserved bytes
    std::deque<uint32_t> quarantine;
    size_t used = 0, resting = 0, allocated = 0;
    bool open = false;
    Gpu() {
        if (kTail == 0) madvise(arena, kArena, MADV_HUGEPAGE);  // fewer pages to protect
        if (mprotect(arena, kArena, PROT_NONE) != 0) fault("cannot protect device memory");
    }
    void protect(bool hide) {
        if (open == !hide || (open && kTail > 0)) return;  // with millions of pages it takes seconds
        open = !hide;
        mprotect(arena, kArena, hide ? PROT_NONE : PROT_READ | PROT_WRITE);
    }
};

std::recursive_mutex& mutex = *new std::recursive_mutex;
std::vector<Gpu*>& gpus = *new std::vector<Gpu*>;  // as many as were used
Gpu& gpu() {
    const std::scoped_lock lock(mutex);
    while (int(gpus.size()) <= current_gpu) gpus.push_back(new Gpu);
    return *gpus[size_t(current_gpu)];
}
std::map<uintptr_t, size_t>& pinned = *new std::map<uintptr_t, size_t>;  // bytes by address

Allocation* allocation_at(Gpu& g, size_t offset) {
    const uint32_t number = g.owner[offset / kUnit];
    return number == 0 ? nullptr : &g.allocations[number - 1];
}

void set_zeros(char* p, size_t bytes) {
    const size_t page = 4096, head = std::min(bytes, page - reinterpret_cast<uintptr_t>(p) % page);
    const size_t whole = (bytes - head) / page * page;  // these pages read as 0 until they are written
    std::memset(p, 0, head);
    if (whole > 0) madvise(p + head, whole, MADV_DONTNEED);
    std::memset(p + head + whole, 0, bytes - head - whole);
}

void poison(Gpu& g, const Allocation& a, bool hide) {
    g.protect(false);
#if EMULATE_ASAN
    __asan_unpoison_memory_region(g.arena + a.offset, a.reserved);
#endif
    set_bytes(g.arena + a.offset, kTail > 0 ? 0 : 0xff, a.reserved);
#if EMULATE_ASAN
    const size_t inside = hide ? 0 : a.bytes;
    __asan_poison_memory_region(g.arena + a.offset + inside, a.reserved - inside);
#else
    (void)hide;
#endif
}

}  // namespace

void handle_faults() {
    thread_local char stack[64 << 10];
    stack_t alternate{};
    alternate.ss_sp = stack;
    alternate.ss_size = sizeof stack;
    sigaltstack(&alternate, nullptr);
    struct sigaction action {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    sigaction(SIGBUS, &action, nullptr);
}

void set_bytes(void* p, int value, size_t bytes) {
    if (kTail > 0 && value == 0)
        set_zeros(static_cast<char*>(p), bytes);
    else
        std::memset(p, value, bytes);
}

void open_memory() { gpu().protect(false); }
void close_memory() {
    const std::scoped_lock lock(mutex);
    for (Gpu* g : gpus) g->protect(true);
}

const char* arena() { return gpu().arena; }

namespace {
size_t arena_offset(const void* p) { return size_t(static_cast<const char*>(p) - arena()); }
}  // namespace

bool is_live(size_t offset, size_t bytes) {
    const Allocation* a = allocation_at(*gpus[size_t(current_gpu)], offset);
    return a && a->state != Allocation::released && (a->exists || !performing) &&
           offset + bytes <= a->offset + a->bytes;
}

bool on_device(const void* p, size_t bytes) {
    const std::scoped_lock lock(mutex);
    const size_t offset = arena_offset(p);
    return offset < kArena && is_live(offset, bytes);
}

void* allocate(size_t bytes) {
    const std::scoped_lock lock(mutex);
    Gpu& g = gpu();
    const size_t reserved = (bytes + kUnit - 1) / kUnit * kUnit + kUnit;
    std::vector<uint32_t>& fitting = g.free[reserved];
    uint32_t number = 0;
    if (fitting.empty()) {
        if (g.used + reserved > kArena) return nullptr;
        number = uint32_t(g.allocations.size());
        g.allocations.push_back({g.used, bytes, reserved, Allocation::live});
        for (size_t unit = g.used / kUnit; unit < (g.used + reserved) / kUnit; ++unit) g.owner[unit] = number + 1;
        g.used += reserved;
    } else {
        number = fitting.back();
        fitting.pop_back();
        g.allocations[number].bytes = bytes;
        g.allocations[number].state = Allocation::live;
        g.allocations[number].exists = false;
    }
    g.allocated += bytes;
    poison(g, g.allocations[number], false);
    return g.arena + g.allocations[number].offset;
}

void exist(void* p) {
    const std::scoped_lock lock(mutex);
    allocation_at(gpu(), arena_offset(p))->exists = true;
}

void begin_release(void* p, const char* by) {
    const std::scoped_lock lock(mutex);
    const size_t offset = arena_offset(p);
    Allocation* a = offset < kArena ? allocation_at(gpu(), offset) : nullptr;
    if (!a || a->offset != offset || a->state != Allocation::live)
        fault(std::string(by) + " of what is no live allocation of this GPU: " + describe(p));
    a->state = Allocation::to_release;
}

void release(void* p) {
    const std::scoped_lock lock(mutex);
    Gpu& g = gpu();
    Allocation& a = *allocation_at(g, arena_offset(p));
    if (!a.exists) fault("cudaFreeAsync before the memory's allocation, which another stream has not reached");
    a.state = Allocation::released;
    g.allocated -= a.bytes;
    poison(g, a, true);
    g.quarantine.push_back(uint32_t(&a - g.allocations.data()));
    g.resting += a.reserved;
    while (g.resting > kQuarantine) {
        const uint32_t number = g.quarantine.front();
        g.quarantine.pop_front();
        g.resting -= g.allocations[number].reserved;
        g.free[g.allocations[number].reserved].push_back(number);
    }
}

void* allocate_pinned(size_t bytes) {
    const std::scoped_lock lock(mutex);
    void* p = std::malloc(bytes);
    if (p) {
        std::memset(p, 0xff, bytes);
        pinned[reinterpret_cast<uintptr_t>(p)] = bytes;
    }
    return p;
}

void release_pinned(void* p) {
    const std::scoped_lock lock(mutex);
    if (pinned.erase(reinterpret_cast<uintptr_t>(p)) == 0) fault("cudaFreeHost of what is no pinned memory");
    std::free(p);
}

Place place_of(const void* p, size_t bytes) {
    const std::scoped_lock lock(mutex);
    const auto address = reinterpret_cast<uintptr_t>(p);
    for (const Gpu* g : gpus)
        if (size_t(static_cast<const char*>(p) - g->arena) < kArena)
            return on_device(p, bytes) ? Place::device : Place::invalid;
    const auto after = pinned.upper_bound(address);
    if (after == pinned.begin()) return Place::pageable;
    const auto& [begin, size] = *std::prev(after);
    if (address >= begin + size) return Place::pageable;
    return address + bytes <= begin + size ? Place::pinned : Place::invalid;
}

size_t device_bytes() {
    const std::scoped_lock lock(mutex);
    return gpu().allocated;
}

std::string describe(const void* p) {
    for (size_t i = 0; i < gpus.size(); ++i) {
        Gpu& g = *gpus[i];
        const auto offset = size_t(static_cast<const char*>(p) - g.arena);
        if (offset >= kArena) continue;
        const std::string of = "memory of GPU " + std::to_string(i);
        const Allocation* a = allocation_at(g, offset);
        if (!a) return of + " that was never allocated";
        return std::to_string(offset - a->offset) + " bytes into " + std::to_string(a->bytes) + " bytes of " + of +
               (a->state == Allocation::released ? ", already released"
                : a->exists                      ? ""
                                                 : ", which its stream has not allocated yet: an event is missing");
    }
    return "no device memory; perhaps the end of a CUDA thread's stack";
}

}  // namespace emulate
