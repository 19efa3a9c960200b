#include "02_data_parallel/runtime/trace_merge.h"

namespace train70b {

TraceMerge::TraceMerge() : ranks_(MpiGroup::duplicate_of_world()), begin_(measure()) {}

void TraceMerge::send(const void* bytes, int64_t count, int to) const {
    if (const RequestPtr request = ranks_.exchange(bytes, count, to, nullptr, 0, to, Tag::user)) request->wait();
}

void TraceMerge::receive(void* bytes, int64_t count, int from) const {
    if (const RequestPtr request = ranks_.exchange(nullptr, 0, from, bytes, count, from, Tag::user)) request->wait();
}

std::vector<TraceMerge::Measurement> TraceMerge::measure() const {
    constexpr int kRoundTrips = 32;
    if (ranks_.rank() > 0) {
        for (int i = 0; i < kRoundTrips; ++i) {
            double asked = 0;
            receive(&asked, sizeof asked, 0);
            const double answer = now_seconds();
            send(&answer, sizeof answer, 0);
        }
        return {};
    }
    std::vector<Measurement> list(size_t(ranks_.size()));
    for (int rank = 1; rank < ranks_.size(); ++rank) {
        double fastest = 0;
        for (int i = 0; i < kRoundTrips; ++i) {
            const double sent = now_seconds();
            double answer = 0;
            send(&sent, sizeof sent, rank);
            receive(&answer, sizeof answer, rank);
            const double received = now_seconds();
            if (i > 0 && received - sent >= fastest) continue;
            fastest = received - sent;
            list[size_t(rank)] = {answer, answer - (sent + received) / 2};
        }
    }
    return list;
}

void TraceMerge::merge(GrowingFile* file, EventFile& events, const std::string& title) {
    const std::vector<Measurement> end = measure();
    if (ranks_.rank() > 0) {
        ClockDifference clock;
        receive(&clock, sizeof clock, 0);
        for (std::string text = trace_title(ranks_.rank(), title);;
             text = trace_text(events.read(), ranks_.rank(), clock)) {
            const int64_t size = int64_t(text.size());
            send(&size, sizeof size, 0);
            if (size == 0) return;
            send(text.data(), size, 0);
        }
    }
    for (int rank = 1; rank < ranks_.size(); ++rank) {
        const Measurement &a = begin_[size_t(rank)], &b = end[size_t(rank)];
        const ClockDifference clock{a.time, b.time, a.difference, b.difference};
        send(&clock, sizeof clock, rank);
        std::string text;
        for (int64_t size = 0;;) {
            receive(&size, sizeof size, rank);
            if (size == 0) break;
            text.resize(size_t(size));
            receive(text.data(), size, rank);
            file->write(text);
        }
    }
}

}  // namespace train70b
