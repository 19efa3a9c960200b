#pragma once
// What Zero (03_zero/complete/zero.cpp) holds in its workspace while a step runs: unsharded parameters and gradients.
#include <algorithm>
#include <utility>

#include "03_zero/complete/options.h"
#include "08_3d_full/plan/unit_memory.h"

namespace train70b {

// The bytes held at one moment of a step, by kind, and their peaks: a ledger without tensors.
class MemoryWalk {
  public:
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
    void skip(const std::vector<PassPart>& parts, int64_t times) {
        for (const PassPart& part : parts) skip(part.memory, times);
    }
    const MemoryPeak& peak() const { return peak_; }
    const MemoryBytes& now() const { return now_; }

  private:
    MemoryBytes now_{};
    int64_t total_ = 0;
    MemoryPeak peak_;
};

// A unit's buffers, and who uses them.
struct ShardedUnit {
    int64_t gathering = 0, params = 0, grads = 0;  // bytes: while and after it is gathered; unsharded gradients
    int64_t rest = 0;                              // FP8: what is not gathered in 8 bits, at the end of `gathering`
    int64_t host_sum = 0;                          // offload all: a shard's gradients, to be added on the host
    bool inside = false;                           // experts, in the middle of the unit before them
    bool unsharded = false, finished = false, has_grads = false, has_reduced = false;
    int64_t users = 0, open_passes = 0;
};

class ShardedUnits {
  public:
    ShardedUnits(const ZeroOptions& options, MemoryWalk& walk) : options_(options), walk_(walk) {
        bucket_ = options.bucket_mb < 0 ? 0 : options.bucket_mb * (1 << 20);
    }
    std::vector<ShardedUnit> units;
    std::vector<int> passes;  // of a micro-batch, in forward order: indices into units

    bool is_inside(int64_t pass) const {
        return pass >= 0 && pass < int64_t(passes.size()) && units[size_t(passes[size_t(pass)])].inside;
    }

    void begin_forward(int64_t pass) {
        if (options_.stage == 3) unshard(pass, true);
    }
    void end_forward(int64_t pass) {
        if (options_.stage == 3) reshard(of(pass));
    }
    void begin_backward(int64_t pass) {
        begin_replay(pass);
        begin_gradients(pass);
    }
    // The two halves, where a recomputation comes between them.
    void begin_replay(int64_t pass) {
        if (options_.stage == 3) unshard(pass, false);
    }
    void begin_gradients(int64_t pass) {
        if (options_.stage < 2) return;
        ShardedUnit& unit = of(pass);
        ++unit.open_passes;
        std::erase(ready_, &unit);
        if (unit.has_grads) return;
        unit.has_grads = true;
        walk_.book(Memory::workspace, unit.grads);
    }
    void end_backward(int64_t pass) {  // its weight gradients, too
        ShardedUnit& unit = of(pass);
        if (options_.stage == 3) reshard(unit);
        if (options_.stage < 2 || --unit.open_passes > 0) return;
        ready_.push_back(&unit);
        double bytes = 0;
        for (const ShardedUnit* waiting : ready_) bytes += double(waiting->grads);
        if (bytes >= bucket_ || pass == 0) reduce_ready();
    }
    void finish() {
        reduce_ready();
        finish(std::exchange(in_flight_, {}));
        for (ShardedUnit& unit : units)
            if (unit.unsharded) free_params(unit);
    }

  private:
    ShardedUnit& of(int64_t pass) { return units[size_t(passes[size_t(pass)])]; }

    void start_unshard(ShardedUnit& unit) {
        if (unit.unsharded) return;
        unit.unsharded = true;
        unit.finished = false;
        walk_.book(Memory::workspace, unit.gathering);
    }
    // A block's backward pass begins before that of its experts.
    int64_t next(int64_t pass, bool forward) const {
        if (forward || is_inside(pass + 1)) return pass + 1;
        const int64_t before = pass - (is_inside(pass) ? 2 : 1);
        return is_inside(before) ? before - 1 : before;
    }
    void unshard(int64_t pass, bool forward) {
        ShardedUnit& unit = of(pass);
        start_unshard(unit);
        const int64_t count = int64_t(passes.size());
        for (int64_t ahead = next(pass, forward), i = 0; i < options_.prefetch && ahead >= 0 && ahead < count; ++i) {
            start_unshard(of(ahead));
            ahead = next(ahead, forward);
        }
        if (unit.users++ > 0 || unit.finished) return;
        unit.finished = true;  // FP8: what is not in 8 bits is assembled from the shards
        if (unit.params == unit.gathering) return;
        walk_.book(Memory::workspace, unit.rest);
        walk_.book(Memory::workspace, unit.params - unit.gathering - unit.rest);
    }
    void reshard(ShardedUnit& unit) {
        if (--unit.users == 0) free_params(unit);
    }
    void free_params(ShardedUnit& unit) {
        walk_.book(Memory::workspace, unit.finished ? -unit.params : -unit.gathering);
        unit.unsharded = unit.finished = false;
    }

    void reduce_ready() {
        for (ShardedUnit* unit : ready_) {
            const Reduction before = std::exchange(
                in_flight_, {unit->grads, std::exchange(unit->has_reduced, true) ? unit->host_sum : int64_t(0)});
            unit->has_grads = false;
            finish(before);
            if (!options_.overlap) finish(std::exchange(in_flight_, {}));
        }
        ready_.clear();
    }
    struct Reduction {
        int64_t grads = 0, host_sum = 0;  // bytes; the second meanwhile only
    };
    void finish(const Reduction& reduction) {
        walk_.book(Memory::workspace, reduction.host_sum);
        walk_.book(Memory::workspace, -reduction.host_sum - reduction.grads);
    }

    const ZeroOptions& options_;
    MemoryWalk& walk_;
    double bucket_;
    std::vector<ShardedUnit*> ready_;
    Reduction in_flight_;
};

}  // namespace train70b
