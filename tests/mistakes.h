#pragma once
// Mistakes drawn at random and made in recordings, and what is found of them.
#include <array>
#include <map>

#include "08_3d_full/plan/simulate_check.h"
#include "tests/execute_recording.h"
#include "tests/recordings.h"

namespace train70b::test {

// The line that is wrong; "" if all calls match. symmetry: equal ranks are simulated once.
inline std::string mismatch(const Recording& recording, bool symmetry) {
    try {
        (void)check_calls(recording, symmetry);
    } catch (const CommonError& error) {
        const std::string text = error.what();
        EXPECT(text.starts_with("mismatch: "));
        EXPECT(text.size() < 1500);  // one_line() leaves it whole
        EXPECT(text.find('\n') == text.npos);
        return text.substr(10);
    }
    return "";
}
// The same of every rank, and of one of each class: one verdict.
inline std::string mismatch(const Recording& recording) {
    const std::string by_rank = mismatch(recording, false), by_class = mismatch(merged(recording), true);
    INFO(by_rank, " / ", by_class);
    EXPECT(by_rank.empty() == by_class.empty());
    return by_rank;
}

inline void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
    INFO(text);
    for (const std::string& part : parts) {
        INFO(part);
        EXPECT(text.find(part) != text.npos);
    }
}

class Draws {
  public:
    explicit Draws(uint64_t key) : key_(key) {}
    int64_t below(int64_t n) { return int64_t(random_bits(key_, counter_++) % uint64_t(n)); }
    template <class T>
    const T& one_of(const std::vector<T>& list) {
        return list[size_t(below(int64_t(list.size())))];
    }

  private:
    uint64_t key_, counter_ = 0;
};

// One of a dozen mistakes at a place of a rank's sequence; its name, "" if it does not apply there.
inline std::string make_mistake(RankEdit& list, Draws& draws, const Recording& recording) {
    if (list.items.empty()) return "";
    const size_t at = size_t(draws.below(int64_t(list.items.size())));
    RankEdit::Item& item = list.items[at];
    const int64_t what = draws.below(12);
    if (what < 4) {  // with the next event, or call
        size_t other = at + 1;
        if (what > 0)
            while (other < list.items.size() && !(list.items[other].is_call() && item.is_call())) ++other;
        if (other >= list.items.size()) return "";
        if (what > 1) {
            list.exchange(at, other);
            return "exchange two calls";
        }
        std::swap(list.items[at].event, list.items[other].event);
        std::swap(list.items[at].id, list.items[other].id);
        std::swap(list.items[at].call, list.items[other].call);
        return what == 0 ? "swap two events" : "swap two calls";
    }
    // A group of one rank has nobody to disagree.
    if (!item.is_call() || GroupTable(recording).members(item.call.family, list.rank()).size() < 2) return "";
    switch (what) {
        case 4: list.drop(at); return "drop a call";
        case 5: list.insert(at, CommCall(item.call)); return "make a call twice";
        case 6: item.call.bytes += 4; return "other bytes";
        case 7: item.call.details += "!"; return item.call.message() ? "" : "other details";
        case 8: item.call.operation += "!"; return item.call.message() ? "" : "other operation";
        case 9: {
            const int before = item.call.family;
            item.call.family = int(draws.below(int64_t(recording.families.size())));
            return item.call.family == before ? "" : "other group";
        }
        case 10:
            if (item.call.to < 0) return "";
            item.call.to += draws.below(2) ? 1 : -1;
            return item.call.message() ? "other receiver" : "";
        default:
            if (item.call.from < 0) return "";
            item.call.from += draws.below(2) ? 1 : -1;
            return item.call.message() ? "other sender" : "";
    }
}

struct Survey {
    std::map<std::string, std::array<int64_t, 2>> found;  // by mistake: how many, how many found
    int64_t deadlocks = 0, cases = 0;

    // Simulated and executed: one verdict. Returns the mismatch, "" if there is none.
    std::string check(const Recording& recording, const std::string& mistake) {
        const std::string wrong = mismatch(recording);
        INFO(mistake, ": ", wrong.empty() ? "matches" : wrong);
        EXPECT(wrong.empty() == executes(recording));
        ++cases;
        ++found[mistake][0];
        found[mistake][1] += !wrong.empty();
        deadlocks += wrong.starts_with("these ranks");
        return wrong;
    }
    void print() const {
        for (const auto& [mistake, count] : found) fmt::print("{:>24}: {} of {} found\n", mistake, count[1], count[0]);
        fmt::print("{:>24}: {} of {} cases\n", "deadlocks", deadlocks, cases);
    }
};

}  // namespace train70b::test
