#pragma once
// What memory_formula.h sums up: bytes that are held, and the passes of a unit as lists of them. No tensors: the terms
// of the formula, each on a line of its own, in the order in which the program allocates them.
#include <algorithm>
#include <utility>
#include <vector>

#include "01_single_gpu/core/memory.h"

namespace train70b {

// What a pass leaves behind and what it needs at most, both on top of what was held when it began.
struct PassMemory {
    MemoryBytes net{};
    int64_t net_total = 0;
    MemoryPeak peak;
};

// The bytes held at one moment of a step, by kind, and their peaks: a ledger without tensors.
class MemoryWalk {
  public:
    MemoryWalk() { entries_.reserve(64); }
    MemoryWalk(const MemoryWalk&) = delete;

    void book(Memory kind, int64_t bytes) {
        now_[size_t(kind)] += bytes;
        if (int(kind) < kDeviceMemoryKinds) total_ += bytes;
        peak_.kind[size_t(kind)] = std::max(peak_.kind[size_t(kind)], now_[size_t(kind)]);
        peak_.total = std::max(peak_.total, total_);
    }
    void book(const PassMemory& pass) {
        for (size_t k = 0; k < size_t(kMemoryKinds); ++k) {
            peak_.kind[k] = std::max(peak_.kind[k], now_[k] + pass.peak.kind[k]);
            now_[k] += pass.net[k];
        }
        peak_.total = std::max(peak_.total, total_ + pass.peak.total);
        total_ += pass.net_total;
    }
    // The same `times` in a row, or, below 0, undone. Their own peaks are those of the first or the last of them, which
    // the caller books.
    void skip(const PassMemory& pass, int64_t times) {
        for (size_t k = 0; k < size_t(kMemoryKinds); ++k) now_[k] += times * pass.net[k];
        total_ += times * pass.net_total;
    }
    const MemoryPeak& peak() const { return peak_; }
    const MemoryBytes& now() const { return now_; }
    int64_t total() const { return total_; }

    void begin_pass() {
        start_ = now_;
        start_total_ = total_;
        peak_ = {now_, total_};
    }
    PassMemory end_pass() const {
        PassMemory pass{.net_total = total_ - start_total_, .peak = peak_};
        for (size_t k = 0; k < size_t(kMemoryKinds); ++k) {
            pass.net[k] = now_[k] - start_[k];
            pass.peak.kind[k] -= start_[k];
        }
        pass.peak.total -= start_total_;
        return pass;
    }

  private:
    friend class Held;
    struct Entry {
        Memory kind;
        int64_t bytes;
        int references;
    };
    int open(Memory kind, int64_t bytes) {
        book(kind, bytes);
        int index = int(entries_.size());
        if (free_.empty())
            entries_.emplace_back();
        else
            index = free_.back(), free_.pop_back();
        entries_[size_t(index)] = {kind, bytes, 1};
        return index;
    }
    void close(int index) {
        Entry& entry = entries_[size_t(index)];
        if (--entry.references > 0) return;
        book(entry.kind, -entry.bytes);
        free_.push_back(index);
    }

    MemoryBytes now_{}, start_{};
    int64_t total_ = 0, start_total_ = 0;
    MemoryPeak peak_;
    std::vector<Entry> entries_;
    std::vector<int> free_;
};

// A tensor's bytes, held until the last copy is destroyed.
class Held {
  public:
    Held() = default;
    Held(MemoryWalk& walk, Memory kind, int64_t bytes) : walk_(&walk), index_(walk.open(kind, bytes)) {}
    Held(const Held& other) : walk_(other.walk_), index_(other.index_) {
        if (walk_) ++walk_->entries_[size_t(index_)].references;
    }
    Held(Held&& other) noexcept : walk_(other.walk_), index_(other.index_) { other.walk_ = nullptr; }
    Held& operator=(Held other) noexcept {
        std::swap(walk_, other.walk_);
        std::swap(index_, other.index_);
        return *this;
    }
    ~Held() {
        if (walk_) walk_->close(index_);
    }
    explicit operator bool() const { return walk_ != nullptr; }
    bool sole_owner() const { return walk_->entries_[size_t(index_)].references == 1; }

  private:
    MemoryWalk* walk_ = nullptr;
    int index_ = 0;
};

}  // namespace train70b
