#pragma once
// Recordings made and edited by hand.
#include <fmt/core.h>

#include <map>

#include "08_3d_full/plan/sequence.h"
#include "tests/support.h"

namespace train70b::test {

// The calls of a few ranks, written down one by one. Every call is waited for at once, unless it is `later`.
class ByHand {
  public:
    explicit ByHand(int64_t ranks) {
        recording.ranks = ranks;
        recording.families = {{.name = "world"}};
        for (int64_t rank = 0; rank < ranks; ++rank) {
            recording.class_of.push_back(int32_t(rank));
            recording.sequences.push_back({.rank = rank});
            part(rank, {.kind = Sequence::Part::Kind::setup});
        }
    }
    // Colors by rank of the parent.
    int family(const std::string& name, const std::vector<int>& colors, int parent = 0) {
        recording.families.push_back({name, parent, colors});
        return int(recording.families.size()) - 1;
    }
    void part(int64_t rank, Sequence::Part part) {
        Sequence& s = recording.sequences[size_t(rank)];
        part.segment = int32_t(s.segments.size());
        s.segments.emplace_back();
        s.parts.push_back(part);
    }

    void later(int64_t rank, const CommCall& call) {
        Sequence& s = recording.sequences[size_t(rank)];
        s.segments.back().push_back({.kind = Event::Kind::call, .what = int32_t(s.calls.size())});
        s.calls.push_back(call);
    }
    void wait(int64_t rank, int family, int32_t ago = 1) {
        recording.sequences[size_t(rank)].segments.back().push_back(
            {.kind = Event::Kind::wait, .family = int16_t(family), .what = ago});
    }
    void call(int64_t rank, const CommCall& each) {
        later(rank, each);
        wait(rank, each.family);
    }

    Recording recording;
};

inline CommCall collective(int family, const std::string& operation, int64_t elements, const std::string& where,
                           const std::string& dtype = "fp32") {
    const int64_t size = dtype == "bf16" ? 2 : 4;
    return {.family = family,
            .operation = operation,
            .details = fmt::format(", {} {}", elements, dtype),
            .bytes = elements * size,
            .where = where};
}
inline CommCall broadcast(int family, int64_t elements, int root, const std::string& where) {
    CommCall call = collective(family, "broadcast", elements, where);
    call.details += fmt::format(" from rank {}", root);
    return call;
}
inline CommCall send(int family, int64_t elements, int to, const std::string& where) {
    CommCall call = collective(family, "send", elements, where);
    call.details += fmt::format(" to rank {}", to);
    call.to = to;
    return call;
}
inline CommCall recv(int family, int64_t elements, int from, const std::string& where) {
    CommCall call = collective(family, "recv", elements, where);
    call.details += fmt::format(" from rank {}", from);
    call.from = from;
    return call;
}
inline CommCall ring_shift(int family, int64_t elements, int rank, int size, const std::string& where) {
    CommCall call = collective(family, "send_recv", elements, where);
    call.to = (rank + 1) % size;
    call.from = (rank + size - 1) % size;
    call.details += fmt::format(" shifted to rank {}", call.to);
    call.received = call.bytes;
    call.shift = true;
    return call;
}

// ---- edits of one rank's calls --------------------------------------------------------------------------------------

// One rank's calls and waits, without the rest, as a list that can be edited: a wait stays with its call.
struct RankEdit {
    struct Item {
        int32_t part;
        Event event;
        int64_t id;     // of the call, or of that which is waited for
        CommCall call;  // of a call
        bool is_call() const { return event.kind == Event::Kind::call; }
    };
    std::vector<Item> items;
    int64_t next_id = 0;

    RankEdit(const Recording& recording, int64_t rank) : rank_(rank), sequence_(recording.of(rank)) {
        const GroupTable groups(recording);
        std::map<int, std::vector<int64_t>> made;
        for (size_t part = 0; part < sequence_.parts.size(); ++part)
            for (const Event& event : sequence_.segments[size_t(sequence_.parts[part].segment)]) {
                if (event.kind != Event::Kind::call && event.kind != Event::Kind::wait) continue;
                Item item{int32_t(part), event, 0, {}};
                if (item.is_call()) {
                    item.call = sequence_.calls[size_t(event.what)];
                    item.id = next_id++;
                    made[item.call.family].push_back(item.id);
                    rebase(groups, item.call);
                } else {
                    item.id = made[event.family].end()[-event.what];
                }
                items.push_back(item);
            }
    }
    int64_t rank() const { return rank_; }
    std::vector<size_t> calls(const std::function<bool(const CommCall&)>& which) const {
        std::vector<size_t> found;
        for (size_t i = 0; i < items.size(); ++i)
            if (items[i].is_call() && which(items[i].call)) found.push_back(i);
        return found;
    }
    // Without the call's waits.
    void drop(size_t call) {
        const int64_t id = items[call].id;
        std::erase_if(items, [id](const Item& each) { return each.id == id; });
    }
    // Behind the item: the call, and a wait for it.
    void insert(size_t behind, const CommCall& call) {
        const int32_t part = items[behind].part;
        const Item made{part, {.kind = Event::Kind::call}, next_id, call};
        const Item waited{part, {.kind = Event::Kind::wait}, next_id++, {}};
        items.insert(items.begin() + int64_t(behind) + 1, {made, waited});
    }
    // The two calls in each other's place; what waited for the one waits for the other.
    void exchange(size_t a, size_t b) { std::swap(items[a].call, items[b].call); }

    // The rank becomes a class of its own.
    void store(Recording& recording) const {
        Sequence edited = sequence_;
        edited.rank = rank_;
        edited.calls.clear();
        edited.segments.assign(edited.parts.size(), {});
        for (size_t part = 0; part < edited.parts.size(); ++part) edited.parts[part].segment = int32_t(part);
        std::map<int, std::vector<int64_t>> made;
        std::map<int64_t, int> family_of;
        for (const Item& item : items) {
            Event event = item.event;
            if (item.is_call()) {
                event.what = int32_t(edited.calls.size());
                edited.calls.push_back(item.call);
                made[item.call.family].push_back(item.id);
                family_of[item.id] = item.call.family;
            } else {
                if (!family_of.contains(item.id)) continue;  // its call comes later
                event.family = int16_t(family_of[item.id]);
                const std::vector<int64_t>& ids = made[event.family];
                event.what = int32_t(ids.end() - std::find(ids.begin(), ids.end(), item.id));
            }
            edited.segments[size_t(item.part)].push_back(event);
        }
        recording.class_of[size_t(rank_)] = int32_t(recording.sequences.size());
        recording.sequences.push_back(edited);
    }

  private:
    // A ring shift of the recorded rank, as this rank makes it.
    void rebase(const GroupTable& groups, CommCall& call) const {
        if (!call.shift) return;
        const std::vector<int32_t>& place = groups.of(call.family).place;
        const int n = int(groups.members(call.family, rank_).size());
        if (n == 0) return;  // an edited call
        const int by = place[size_t(rank_)] - place[size_t(sequence_.rank)];
        call.to = ((call.to + by) % n + n) % n;
        call.from = ((call.from + by) % n + n) % n;
    }

    int64_t rank_;
    Sequence sequence_;
};

// The same recording with one sequence for all ranks that have equal ones.
inline Recording merged(const Recording& recording) {
    const GroupTable groups(recording);
    const auto canonical = [&](const Sequence& s) {
        std::vector<CommCall> calls = s.calls;
        for (CommCall& call : calls) {
            if (!call.shift) continue;
            const int n = int(groups.members(call.family, s.rank).size());
            if (n == 0) continue;  // an edited call
            call.to = (call.to - groups.of(call.family).place[size_t(s.rank)] + n) % n;
            call.from = (call.from - groups.of(call.family).place[size_t(s.rank)] + n) % n;
            call.details = {};
        }
        return calls;
    };
    const auto same_parts = [](const Sequence& a, const Sequence& b) {
        if (a.segments != b.segments || a.parts.size() != b.parts.size()) return false;
        for (size_t i = 0; i < a.parts.size(); ++i)
            if (a.parts[i].segment != b.parts[i].segment || to_string(a.parts[i]) != to_string(b.parts[i]))
                return false;
        return true;
    };
    Recording result = recording;
    std::vector<int32_t> now(recording.sequences.size());
    std::vector<std::vector<CommCall>> calls;
    result.sequences.clear();
    for (size_t i = 0; i < recording.sequences.size(); ++i) {
        const std::vector<CommCall> mine = canonical(recording.sequences[i]);
        size_t at = 0;
        while (at < calls.size() && !(calls[at] == mine && same_parts(result.sequences[at], recording.sequences[i])))
            ++at;
        if (at == calls.size()) {
            calls.push_back(mine);
            result.sequences.push_back(recording.sequences[i]);
        }
        now[i] = int32_t(at);
    }
    for (int32_t& each : result.class_of) each = now[size_t(each)];
    return result;
}

}  // namespace train70b::test
