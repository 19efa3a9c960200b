#include "01_single_gpu/core/memory.h"

#include <algorithm>
#include <utility>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/files.h"
#include "01_single_gpu/core/recorder.h"

namespace train70b {

void MemoryPeak::merge(const MemoryPeak& other) {
    for (int i = 0; i < kMemoryKinds; ++i) kind[i] = std::max(kind[i], other.kind[i]);
    total = std::max(total, other.total);
}

MemoryPeak MemoryPeak::above(const MemoryBytes& held) const {
    MemoryPeak peak = *this;
    for (int i = 0; i < kMemoryKinds; ++i) {
        peak.kind[i] -= held[i];
        if (i < kDeviceMemoryKinds) peak.total -= held[i];
    }
    return peak;
}

void MemoryLedger::book(Memory kind, int64_t bytes) {
    if (recorder) recorder->book(kind, bytes);
    const int i = static_cast<int>(kind);
    now_[i] += bytes;
    if (i < kDeviceMemoryKinds) total_ += bytes;
    CHECK(now_[i] >= 0, "{} went to {} bytes", kMemoryNames[i], now_[i]);
    peak_.kind[i] = std::max(peak_.kind[i], now_[i]);
    peak_.total = std::max(peak_.total, total_);
    if (keep_timeline_) timeline_.push_back({now_seconds() - timeline_start_, phase_, now_, total_});
}

void MemoryLedger::phase(std::string name) {
    if (recorder) recorder->phase(name);
    phase_ = std::move(name);
}

void MemoryLedger::start_timeline() {
    keep_timeline_ = true;
    timeline_events_ = 0;
    timeline_.clear();
    timeline_start_ = now_seconds();
}

std::string MemoryLedger::take_timeline() {
    std::string csv;
    if (timeline_events_ == 0) {
        csv = "event,seconds,phase,params,grads,optimizer,activations,comm,workspace,total";
        timeline_kinds_ = kDeviceMemoryKinds;
        while (timeline_kinds_ < kMemoryKinds && peak_.kind[timeline_kinds_] > 0)
            csv += fmt::format(",{}", kMemoryNames[timeline_kinds_++]);
        csv += "\n";
    }
    for (const Sample& sample : std::exchange(timeline_, {})) {
        csv += fmt::format("{},{:.6f},{}", timeline_events_++, sample.seconds, sample.phase);
        for (int i = 0; i < kDeviceMemoryKinds; ++i) csv += fmt::format(",{}", sample.now[i]);
        csv += fmt::format(",{}", sample.total);
        for (int i = kDeviceMemoryKinds; i < timeline_kinds_; ++i) csv += fmt::format(",{}", sample.now[i]);
        csv += "\n";
    }
    return csv;
}

MemoryLedger& ledger() {
    static MemoryLedger instance;
    return instance;
}

}  // namespace train70b
