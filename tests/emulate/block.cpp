// A launch, block by block: each CUDA thread runs on a stack of its own until it waits for others, in the order that
// EMULATE_ORDER chooses. A thread that does not wait costs no switch: the next one begins on the same stack.
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <vector>

#include "internal.h"

#if EMULATE_ASAN
#include <sanitizer/common_interface_defs.h>
#endif

// x86-64, System V: saves the callee's registers and the stack, and goes on where the other one left.
extern "C" void emulate_switch(void** from, void* to);
extern "C" void emulate_fiber_start();
asm(R"(
.text
.globl emulate_switch
.type emulate_switch,@function
emulate_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size emulate_switch,.-emulate_switch
.globl emulate_fiber_start
.type emulate_fiber_start,@function
emulate_fiber_start:
    xorl %ebp, %ebp
    andq $-16, %rsp
    call emulate_fiber_main
    ud2
.size emulate_fiber_start,.-emulate_fiber_start
.section .note.GNU-stack,"",@progbits
.text
)");

namespace emulate {

Position at;
uint64_t block_serial = 0;
Running now;
constinit thread_local bool checking = false, in_launch = false;

std::string to_string(const Where& where) {
    return std::string(where.file_name()) + ":" + std::to_string(where.line());
}

namespace {

enum class Order { random, forward, reverse };
const auto kOrder = Order(choice("EMULATE_ORDER", {"random", "forward", "reverse"}));

constexpr size_t kStack = (EMULATE_ASAN ? 512 : 128) << 10, kGuard = 4096;
// Stacks begin at different places of a page: of 256 that begin at equal ones, the caches would hold only a few.
constexpr size_t kPlaces = 64, kPlace = 64;

struct Fiber {
    char* stack;
    void* pointer;  // where it left
    void* fake_stack = nullptr;
};

struct CudaThread {
    Index index;
    Fiber* fiber = nullptr;  // nullptr: has not begun
    enum State { ready, at_barrier, in_warp, done } state = ready;
    Where where;  // it waits
    unsigned exchanges = 0;
};

const char* const kWarpBarrier = "__syncwarp";
struct Warp {
    int alive = 0, arrived = 0, barriers = 0;
    const char* operation = nullptr;
    Where where;
    alignas(16) char slots[2][32][64];
};

// Of the block that runs. Never destroyed: the device's thread outlives main().
auto& threads = *new std::vector<CudaThread>;
auto& warps = *new std::vector<Warp>;
auto& ready = *new std::vector<int>;  // threads that have not begun or need not wait any more
size_t ready_head = 0;
int alive = 0, arrived = 0, predicate = 0, released_predicate = 0, current = -1;
Where barrier_where;

auto& fibers = *new std::vector<Fiber*>;  // that no thread uses
Fiber launcher{};                         // the stack that called run()
[[maybe_unused]] const void* launcher_stack = nullptr;
[[maybe_unused]] size_t launcher_bytes = 0;

void make_ready(int thread) {
    threads[size_t(thread)].state = CudaThread::ready;
    ready.push_back(thread);
}

int pick() {  // the thread that goes on; -1: none can
    if (ready_head == ready.size()) return -1;
    if (kOrder == Order::forward) {
        const int thread = ready[ready_head++];
        if (ready_head == ready.size()) ready.clear(), ready_head = 0;
        return thread;
    }
    if (kOrder == Order::random) std::swap(ready[random() % ready.size()], ready.back());
    const int thread = ready.back();
    ready.pop_back();
    return thread;
}

void begin_fiber(Fiber& fiber) {
    static size_t made = 0;
    auto* sp = reinterpret_cast<uint64_t*>(fiber.stack + kStack - 64 - kPlace * (made++ % kPlaces));
    *--sp = 0;  // keeps the stack aligned to 16 bytes where emulate_fiber_start begins
    *--sp = reinterpret_cast<uint64_t>(&emulate_fiber_start);
    for (int saved = 0; saved < 6; ++saved) *--sp = 0;
    fiber.pointer = sp;
}

Fiber* take_fiber() {
    if (!fibers.empty()) {
        Fiber* fiber = fibers.back();
        fibers.pop_back();
        return fiber;
    }
    void* stack = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stack == MAP_FAILED) fault("no memory for a CUDA thread's stack");
    mprotect(stack, kGuard, PROT_NONE);
    auto* fiber = new Fiber{static_cast<char*>(stack), nullptr};
    begin_fiber(*fiber);
    return fiber;
}

void enter(int thread) {  // the bookkeeping of going on with a thread
    current = thread;
    CudaThread& t = threads[size_t(thread)];
    at.thread = t.index;
    now.thread = uint16_t(thread);
    now.warp_barriers = uint16_t(warps[size_t(thread / 32)].barriers);
    now.stack = t.fiber->stack;
    now.stack_end = t.fiber->stack + kStack;
}

#if EMULATE_ASAN
void arrive(void* fake_stack) {  // on a stack, from another one
    const void* left = nullptr;
    size_t bytes = 0;
    __sanitizer_finish_switch_fiber(fake_stack, &left, &bytes);
    if (bytes != kStack) launcher_stack = left, launcher_bytes = bytes;  // not a fiber's
}
#endif

void switch_stacks(Fiber* from, Fiber* to) {
#if EMULATE_ASAN
    __sanitizer_start_switch_fiber(&from->fake_stack, to == &launcher ? launcher_stack : to->stack,
                                   to == &launcher ? launcher_bytes : kStack);
#endif
    emulate_switch(&from->pointer, to->pointer);
#if EMULATE_ASAN
    arrive(from->fake_stack);
#endif
}

void go_on(Fiber* from, int thread) {  // returns when `from` goes on
    CudaThread& t = threads[size_t(thread)];
    if (!t.fiber) t.fiber = take_fiber();
    Fiber* to = t.fiber;
    enter(thread);
    if (to != from) switch_stacks(from, to);
}

int next_thread() {
    const int next = pick();
    if (next >= 0) return next;
    std::string report = "deadlock: threads wait for others that never come:";
    int named = 0;
    for (size_t i = 0; i < threads.size() && named < 4; ++i)
        if (const CudaThread& t = threads[i]; t.state != CudaThread::done) {
            report += std::string(named++ ? "," : "") + " thread " + std::to_string(i) +
                      (t.state == CudaThread::at_barrier ? " at the barrier in " : " in a warp's operation in ") +
                      to_string(t.where);
        }
    fault(report);
}

void wait_for_others() {
    const int me = current;
    go_on(threads[size_t(me)].fiber, next_thread());
}

void release_barrier() {
    released_predicate = predicate;
    arrived = predicate = 0;
    ++now.barriers;
    for (size_t i = 0; i < threads.size(); ++i)
        if (threads[i].state == CudaThread::at_barrier) make_ready(int(i));
}

void release_warp(int warp) {
    if (warps[size_t(warp)].operation == kWarpBarrier) ++warps[size_t(warp)].barriers;
    warps[size_t(warp)].arrived = 0;
    for (size_t i = 32 * size_t(warp); i < std::min<size_t>(32 * size_t(warp + 1), threads.size()); ++i)
        if (threads[i].state == CudaThread::in_warp) make_ready(int(i));
}

extern "C" void emulate_fiber_main() {
#if EMULATE_ASAN
    arrive(nullptr);
#endif
    while (true) {
        checking = true;
        now.launch->call(now.launch->arguments.get());
        checking = false;
        thread_ends();
        CudaThread& me = threads[size_t(current)];
        Fiber* mine = me.fiber;
        me.state = CudaThread::done;
        --alive;
        Warp& warp = warps[size_t(current / 32)];
        --warp.alive;
        if (warp.arrived > 0 && warp.arrived == warp.alive) release_warp(current / 32);
        if (arrived > 0 && arrived == alive) release_barrier();
        if (alive == 0) {
            fibers.push_back(mine);
            switch_stacks(mine, &launcher);
            continue;
        }
        const int next = next_thread();
        if (!threads[size_t(next)].fiber) {
            threads[size_t(next)].fiber = mine;
            enter(next);
            continue;
        }
        fibers.push_back(mine);
        go_on(mine, next);
    }
}

void run_block(const Launch& launch, Index block) {
    ++block_serial;
    at.block = block;
    const auto count = size_t(launch.block.count());
    threads.assign(count, {});
    warps.resize((count + 31) / 32);
    for (Warp& warp : warps) warp.alive = warp.arrived = warp.barriers = 0;
    ready.clear();
    ready_head = 0;
    const auto x = size_t(launch.block.x), y = size_t(launch.block.y);
    for (size_t i = 0; i < count; ++i) {
        threads[i].index = {unsigned(i % x), unsigned(i / x % y), unsigned(i / x / y)};
        ++warps[i / 32].alive;
        ready.push_back(int(i));
    }
    alive = int(count);
    arrived = predicate = 0;
    now.barriers = 0;
    clear_shared(launch.shared, launch.shared_limit);
    go_on(&launcher, pick());
    if (kStats) count_block(launch.kernel);
}

struct KernelStats {
    uint64_t launches = 0;
    size_t shared = 0;
    double seconds = 0;
    int64_t least_threads = 1024;
};
auto& stats = *new std::map<const void*, KernelStats>;
void print_stats() {
    for (const auto& [kernel, s] : stats)
        std::fprintf(stderr, "emulate: %-32s %8llu launches %9.3f s, %zu bytes of shared memory, %lld threads\n",
                     name_of(kernel).c_str(), static_cast<unsigned long long>(s.launches), s.seconds, s.shared,
                     static_cast<long long>(s.least_threads));
}

}  // namespace

void run(const Launch& launch) {
    const auto begin = std::chrono::steady_clock::now();
    const auto dims = [](const Extent& e) { return Index{unsigned(e.x), unsigned(e.y), unsigned(e.z)}; };
    at.grid_dim = dims(launch.grid);
    at.block_dim = dims(launch.block);
    now = {};
    now.launch = &launch;
    now.arena = arena();
    in_launch = true;
    now.first_serial = block_serial + 1;
    const int64_t blocks = launch.grid.count();
    const int64_t ends = kTail == 0 || blocks <= 8 * kTail ? blocks : std::max(kTail, blocks >> 14);
    std::vector<int64_t> order;
    for (int64_t i = 0; i < std::min(ends, blocks); ++i) order.push_back(i);
    for (int64_t i = std::max(ends, blocks - ends); i < blocks; ++i) order.push_back(i);
    if (kOrder == Order::reverse) std::reverse(order.begin(), order.end());
    if (kOrder == Order::random)
        for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random() % i]);
    size_t shared = 0;
    for (const int64_t i : order) {
        const Extent& grid = launch.grid;
        run_block(launch, {unsigned(i % grid.x), unsigned(i / grid.x % grid.y), unsigned(i / grid.x / grid.y)});
        shared = std::max(shared, shared_bytes());
    }
    now = {};
    in_launch = false;
    current = -1;
    if (!kStats) return;
    if (stats.empty()) std::atexit(print_stats);
    KernelStats& s = stats[launch.kernel];
    ++s.launches;
    s.shared = std::max(s.shared, shared);
    s.least_threads = std::min(s.least_threads, launch.block.count());
    s.seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

int barrier(int mine, Where where) {
    const Unchecked scope;
    CudaThread& me = threads[size_t(current)];
    if (arrived == 0)
        barrier_where = where;
    else if (barrier_where.line() != where.line() || barrier_where.file_name() != where.file_name())
        fault("divergent barriers: thread " + std::to_string(current) + " is at " + to_string(where) +
              ", others are at " + to_string(barrier_where));
    predicate |= mine != 0;
    me.state = CudaThread::at_barrier;
    me.where = where;
    if (++arrived == alive) release_barrier();
    wait_for_others();
    return released_predicate;
}

int lane() { return current % 32; }

void launch_bound(int64_t most) {
    const Unchecked scope;
    if (now.launch->block.count() > most)
        fault("a block of " + std::to_string(now.launch->block.count()) + " threads of a kernel that is compiled for " +
              std::to_string(most) + " (__launch_bounds__)");
}

const char* warp_exchange(unsigned mask, const void* mine, size_t bytes, const char* operation, Where where) {
    const Unchecked scope;
    if (mask != ~0u) fault(std::string(operation) + " in " + to_string(where) + ": only full masks are emulated");
    CudaThread& me = threads[size_t(current)];
    Warp& warp = warps[size_t(current / 32)];
    auto& slots = warp.slots[me.exchanges++ % 2];
    if (warp.arrived == 0) {
        warp.operation = operation;
        warp.where = where;
        std::memset(slots, 0xff, sizeof slots);                                     // what lanes that have ended give
    } else if (warp.where.line() != where.line() || warp.operation != operation) {  // one string for each operation
        fault(std::string("divergent warp: lane ") + std::to_string(lane()) + " is at " + operation + " in " +
              to_string(where) + ", others are at " + warp.operation + " in " + to_string(warp.where));
    }
    std::memcpy(slots[lane()], mine, bytes);
    me.state = CudaThread::in_warp;
    me.where = where;
    if (++warp.arrived == warp.alive) release_warp(current / 32);
    wait_for_others();
    return slots[0];
}

void warp_barrier(unsigned mask, Where where) {
    const Unchecked scope;
    const int nothing = 0, warp = current / 32;
    warp_exchange(mask, &nothing, sizeof nothing, kWarpBarrier, where);
    now.warp_barriers = uint16_t(warps[size_t(warp)].barriers);
}

void atomic_access(const void* p, size_t bytes) {
    const Unchecked scope;
    check_access(p, bytes, Kind::atomic, __builtin_return_address(0));
    if (kOrder != Order::random || random() % 4 != 0) return;
    make_ready(current);
    wait_for_others();
}

}  // namespace emulate
