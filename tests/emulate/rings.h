#pragma once
// What the ranks of an emulated communicator share: a ring of bytes for each ordered pair of ranks.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <string>
#include <thread>

#include "emulate.h"

namespace emulate {

struct Ring {  // one process writes, one reads
    static constexpr uint64_t kBytes = 64 << 10;
    alignas(64) std::atomic<uint64_t> written;  // bytes since the beginning
    alignas(64) std::atomic<uint64_t> read;
    alignas(64) char data[kBytes];

    // Both move at most n bytes, without waiting, and return how many.
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
    bool empty() const { return read.load(std::memory_order_acquire) == written.load(std::memory_order_acquire); }
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<bool>::is_always_lock_free);

struct Pair {  // of a sender and a receiver
    Ring ring;
    std::atomic<bool> sends, receives;  // whether the rank has called its first send (receive) of this pair
};

template <class Condition>
void wait_until(const Condition& condition) {
    while (!condition()) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

class SharedMemory {
  public:
    // Returns when all ranks have called it with this name, which is then free again: a crash leaves nothing behind.
    SharedMemory(const std::string& name, int rank, int ranks, uint64_t gpu) : ranks_(ranks) {
        const int file = shm_open(name.c_str(), O_RDWR | O_CREAT, 0600);  // filled with zeros
        if (file < 0 || ftruncate(file, off_t(bytes())) != 0) fault("cannot create shared memory " + name);
        memory_ = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (memory_ == MAP_FAILED) fault("cannot map shared memory " + name);
        close(file);
        if (members()[rank].present.exchange(true)) fault("two processes are rank " + std::to_string(rank));
        members()[rank].gpu = gpu;
        if (++start().present == ranks) shm_unlink(name.c_str());
        wait_until([&] { return start().present >= ranks; });
    }
    SharedMemory(const SharedMemory&) = delete;
    ~SharedMemory() { munmap(memory_, bytes()); }

    uint64_t gpu(int rank) const { return members()[rank].gpu; }
    std::atomic<int>& ranks_in(size_t kind) const { return start().called[kind]; }
    Pair& pair(int from, int to) const { return reinterpret_cast<Pair*>(members() + ranks_)[from * ranks_ + to]; }

  private:
    struct alignas(64) Start {
        std::atomic<int> present;    // ranks
        std::atomic<int> called[5];  // ranks that have called their first collective of each kind
    };
    struct alignas(64) Member {
        std::atomic<bool> present;
        uint64_t gpu;
    };
    size_t bytes() const {
        return sizeof(Start) + size_t(ranks_) * sizeof(Member) + size_t(ranks_ * ranks_) * sizeof(Pair);
    }
    Start& start() const { return *static_cast<Start*>(memory_); }
    Member* members() const { return reinterpret_cast<Member*>(&start() + 1); }

    int ranks_;
    void* memory_ = nullptr;
};

}  // namespace emulate
