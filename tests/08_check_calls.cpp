// All ranks' calls matched: recordings by hand that fit, and the mistakes that do not, each named.
#include <set>

#include "tests/mistakes.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// Two stages of 2 x 2 ranks, tp fastest: two micro-batches forward and backward, gradients in two buckets, the norm.
struct Step8 {
    static constexpr int64_t kRanks = 8;
    ByHand hand{kRanks};
    int tp, dp, pp, up, down;

    Step8() {
        tp = hand.family("tp", {0, 0, 1, 1, 2, 2, 3, 3});
        dp = hand.family("dp", {0, 1, 0, 1, 2, 3, 2, 3});
        pp = hand.family("pp", {0, 1, 2, 3, 0, 1, 2, 3});
        up = hand.family("pp", {0, 0}, pp);
        down = hand.family("pp", {0, 0}, pp);
        for (int64_t rank = 0; rank < kRanks; ++rank) {
            const bool first = rank < 4;
            for (int64_t micro = 0; micro < 2; ++micro) {
                hand.part(rank, {Sequence::Part::Kind::schedule_step, {Pass::forward, micro}});
                if (!first) hand.call(rank, channel(recv(up, 32, 0, "pipeline.cpp:20")));
                layer(rank);
                if (first) hand.later(rank, channel(send(up, 32, 1, "pipeline.cpp:10")));
                hand.part(rank, {Sequence::Part::Kind::schedule_step, {Pass::backward, micro}});
                if (first) hand.call(rank, channel(recv(down, 48, 1, "pipeline.cpp:21")));
                layer(rank);
                if (!first) hand.later(rank, channel(send(down, 48, 0, "pipeline.cpp:11")));
            }
            hand.part(rank, {Sequence::Part::Kind::gradients});
            hand.later(rank, collective(dp, "all_reduce", 1000, "zero.cpp:1"));
            hand.later(rank, collective(dp, "all_reduce", 500, "zero.cpp:2"));
            hand.wait(rank, dp, 2);
            hand.wait(rank, dp, 1);
            hand.part(rank, {Sequence::Part::Kind::update});
            hand.call(rank, collective(0, "scalar", 1, "trainer.cpp:5"));
            hand.call(rank, broadcast(dp, 8, 0, "trainer.cpp:7"));
        }
    }
    static CommCall channel(CommCall call) {
        call.channel = true;
        return call;
    }
    void layer(int64_t rank) {
        hand.call(rank, collective(tp, "all_gather", 64, "layer.cpp:30"));
        hand.later(rank, ring_shift(tp, 16, int(rank % 2), 2, "layer.cpp:31"));
        hand.wait(rank, tp);
        hand.call(rank, collective(tp, "reduce_scatter", 64, "layer.cpp:32", "bf16"));
    }

    // The step with one rank's calls edited.
    Recording edited(int64_t rank, const std::function<void(RankEdit&)>& edit) const {
        Recording recording = hand.recording;
        change(recording, rank, edit);
        return recording;
    }
    static void change(Recording& recording, int64_t rank, const std::function<void(RankEdit&)>& edit) {
        RankEdit list(recording, rank);
        edit(list);
        list.store(recording);
    }
};

// The k-th call of a rank from this line.
size_t at(const RankEdit& list, const std::string& where, size_t k = 0) {
    const std::vector<size_t> found = list.calls([&](const CommCall& call) { return call.where == where; });
    REQUIRE(k < found.size());
    return found[k];
}

}  // namespace

TEST_CASE("a step whose calls match") {
    const Step8 step;
    EXPECT(mismatch(step.hand.recording) == "");
    EXPECT(merged(step.hand.recording).sequences.size() == 2);  // one of each stage
    const std::string text = check_calls(step.hand.recording);
    INFO(text);
    // A rank: 4 layers of 3 calls, of them one shift, 4 messages to or from the other stage, 4 calls at the end.
    EXPECT(text ==
           "all 8 ranks' 160 calls match: every collective on all its ranks, 48 messages at both ends; no "
           "deadlock, with mpi or nccl");
    // An edit that edits nothing.
    EXPECT(mismatch(step.edited(3, [](RankEdit&) {})) == "");
}

TEST_CASE("a rank skips a collective") {
    expect_parts(
        mismatch(Step8().edited(3, [](RankEdit& list) { list.drop(at(list, "layer.cpp:32", 2)); })),
        {"group tp of 2 ranks, call 6: rank 2 calls tp.reduce_scatter #6, 64 bf16 in F1 (layer.cpp:32), but rank "
         "3 calls tp.all_gather #6, 64 fp32 in B1 (layer.cpp:30)",
         "(rank 3 leaves out one call)"});
}

TEST_CASE("of several mistakes, the first is named") {
    expect_parts(mismatch(Step8().edited(1,
                                         [](RankEdit& list) {
                                             list.items[at(list, "trainer.cpp:5")].call.bytes =
                                                 7;  // of the world: group 0
                                             list.items[at(list, "layer.cpp:32", 1)].call.bytes = 8;
                                             list.items[at(list, "layer.cpp:32", 2)].call.bytes = 9;
                                         })),
                 {"group tp of 2 ranks, call 4: rank 0 calls tp.reduce_scatter #4, 64 bf16 in B0 (layer.cpp:32), 128 "
                  "bytes, but rank 1 calls tp.reduce_scatter #4, 64 bf16 in B0 (layer.cpp:32), 8 bytes"});
}

TEST_CASE("the bytes of an all-to-all with counts may differ by rank, its dtype and its place not") {
    const auto recording = [](const char* dtype, bool uneven, bool swapped) {
        ByHand hand(4);
        for (int64_t rank = 0; rank < 4; ++rank) {
            hand.part(rank, {.kind = Sequence::Part::Kind::update});
            CommCall call = collective(0, "all_to_all", 0, "experts.cpp:1", rank == 3 ? dtype : "fp32");
            call.bytes = 100 * rank;
            call.uneven = uneven;
            const CommCall other = collective(0, "all_reduce", 8, "experts.cpp:2");
            hand.call(rank, swapped && rank == 1 ? other : call);
            hand.call(rank, swapped && rank == 1 ? call : other);
        }
        return hand.recording;
    };
    EXPECT(mismatch(recording("fp32", true, false)) == "");
    expect_parts(mismatch(recording("fp32", false, false)), {"call 1", "0 bytes", "100 bytes"});
    expect_parts(mismatch(recording("bf16", true, false)), {"call 1", "but rank 3 calls world.all_to_all #1, 0 bf16"});
    expect_parts(mismatch(recording("fp32", true, true)), {"call 1", "(rank 1 makes two calls in the other order)"});
}

TEST_CASE("a rank swaps two collectives of one group") {
    expect_parts(mismatch(Step8().edited(
                     4, [](RankEdit& list) { list.exchange(at(list, "zero.cpp:1"), at(list, "zero.cpp:2")); })),
                 {"group dp of 2 ranks, call 1: rank 4 calls dp.all_reduce #1, 500 fp32 in gradients (zero.cpp:2)",
                  "but rank 6 calls dp.all_reduce #1, 1000 fp32 in gradients (zero.cpp:1)", "in the other order"});
}

TEST_CASE("a rank's bytes, dtype or root are not the others'") {
    expect_parts(
        mismatch(Step8().edited(7, [](RankEdit& list) { list.items[at(list, "zero.cpp:2")].call.bytes = 1999; })),
        {"group dp of 2 ranks, call 2: rank 5 calls dp.all_reduce #2, 500 fp32 in gradients (zero.cpp:2), 2000 "
         "bytes, but rank 7 calls dp.all_reduce #2, 500 fp32 in gradients (zero.cpp:2), 1999 bytes",
         "(all others match)"});
    expect_parts(
        mismatch(Step8().edited(
            0, [](RankEdit& list) { list.items[at(list, "layer.cpp:30", 1)].call.details = ", 64 bf16"; })),
        {"group tp of 2 ranks, call 3: rank 0 calls tp.all_gather #3, 64 bf16 in B0 (layer.cpp:30), but rank 1 "
         "calls tp.all_gather #3, 64 fp32 in B0 (layer.cpp:30)"});
    expect_parts(
        mismatch(Step8().edited(
            3, [](RankEdit& list) { list.items[at(list, "trainer.cpp:7")].call = broadcast(2, 8, 1, "here:9"); })),
        {"group dp of 2 ranks, call 3: rank 1 calls dp.broadcast #3, 8 fp32 from rank 0 in update "
         "(trainer.cpp:7), but rank 3 calls dp.broadcast #3, 8 fp32 from rank 1 in update (here:9)"});
    // In a large group the odd one out is named, beside the first of the others.
    expect_parts(mismatch(Step8().edited(
                     6, [](RankEdit& list) { list.items[at(list, "trainer.cpp:5")].call.details = ", 2 numbers"; })),
                 {"group world of 8 ranks, call 1: rank 0 calls world.scalar #1, 1 fp32 in update",
                  "but rank 6 calls "
                  "world.scalar #1, 2 numbers in update (trainer.cpp:5)"});
}

TEST_CASE("a rank calls in another group") {
    const Step8 step;
    expect_parts(
        mismatch(
            step.edited(5, [&](RankEdit& list) { list.items[at(list, "layer.cpp:30", 2)].call.family = step.dp; })),
        {"group tp of 2 ranks, call 5: rank 4 calls tp.all_gather #5, 64 fp32 in F1 (layer.cpp:30), but rank 5 "
         "calls tp.reduce_scatter #5, 64 bf16 in F1 (layer.cpp:32)",
         "leaves out one call"});
    // A group of which it is no member.
    Step8 other;
    const int ends = other.hand.family("ends", {0, -1, -1, -1, 0, -1, -1, -1});
    other.hand.call(0, collective(ends, "all_reduce", 3, "tied.cpp:1"));
    other.hand.call(4, collective(ends, "all_reduce", 3, "tied.cpp:1"));
    EXPECT(mismatch(other.hand.recording) == "");
    other.hand.call(1, collective(ends, "all_reduce", 3, "tied.cpp:2"));
    EXPECT(mismatch(other.hand.recording) ==
           "rank 1 calls ends.all_reduce #1, 3 fp32 in update (tied.cpp:2), but is in no such group");
}

TEST_CASE("a rank makes one more call at the end") {
    Step8 step;
    step.hand.call(2, collective(step.dp, "barrier", 0, "end.cpp:3"));
    expect_parts(
        mismatch(step.hand.recording),
        {"group dp of 2 ranks, call 4: rank 0 calls nothing more there, after dp.broadcast #3, 8 fp32 from rank "
         "0 in update (trainer.cpp:7), but rank 2 calls dp.barrier #4",
         "(end.cpp:3)", "(rank 2 makes one call more)"});
    Step8 later;  // nobody waits for it
    later.hand.later(6, collective(0, "all_reduce", 9, "end.cpp:4"));
    expect_parts(mismatch(later.hand.recording), {"group world of 8 ranks, call 2: rank 0 calls nothing more there",
                                                  "rank 6 calls world.all_reduce #2, 9 fp32 in update (end.cpp:4)"});
}

TEST_CASE("a send without a receive, a receive without a send") {
    expect_parts(
        mismatch(Step8().edited(4, [](RankEdit& list) { list.drop(at(list, "pipeline.cpp:20", 1)); })),
        {"message 2 from rank 0 to rank 4: rank 0 calls pp.send #2, 32 fp32 to rank 1 in F1 (pipeline.cpp:10), but "
         "rank 4 receives nothing more there, after pp.recv #1, 32 fp32 from rank 0 in F0 (pipeline.cpp:20) (rank 4 "
         "leaves out one call)"});
    expect_parts(
        mismatch(Step8().edited(5, [](RankEdit& list) { list.drop(at(list, "pipeline.cpp:11", 1)); })),
        {"message 2 from rank 5 to rank 1: rank 1 calls pp.recv #2, 48 fp32 from rank 1 in B1 (pipeline.cpp:21), but "
         "rank 5 sends nothing more there, after pp.send #1, 48 fp32 to rank 0 in B0 (pipeline.cpp:11) (rank 5 leaves "
         "out one call)"});
    Step8 only;
    only.hand.later(7, send(only.dp, 5, 0, "extra.cpp:1"));
    EXPECT(mismatch(only.hand.recording) ==
           "message 1 from rank 7 to rank 5: rank 7 calls dp.send #1, 5 fp32 to rank 0 in update (extra.cpp:1), but "
           "rank 5 receives nothing more there (rank 5 leaves out one call)");
    only.hand.later(5, recv(only.dp, 5, 1, "extra.cpp:2"));
    EXPECT(mismatch(only.hand.recording) == "");
    // Not what a channel, or a ring shift, sends.
    Step8 kinds;
    kinds.hand.later(7, Step8::channel(send(kinds.dp, 5, 0, "extra.cpp:1")));
    kinds.hand.later(5, recv(kinds.dp, 5, 1, "extra.cpp:2"));
    expect_parts(mismatch(kinds.hand.recording),
                 {"rank 5 calls dp.recv #1, 5 fp32 from rank 1", "but rank 7 sends nothing more there"});
    Step8 nobody;
    nobody.hand.later(7, send(nobody.dp, 5, 2, "extra.cpp:1"));
    expect_parts(mismatch(nobody.hand.recording),
                 {"rank 7 calls dp.send #1, 5 fp32 to rank 2", "has no rank 2: it has 2"});
}

TEST_CASE("a receive of another length; two sends in the other order") {
    expect_parts(
        mismatch(Step8().edited(0, [](RankEdit& list) { list.items[at(list, "pipeline.cpp:21", 1)].call.bytes = 96; })),
        {"message 2 from rank 4 to rank 0: rank 4 calls pp.send #2, 48 fp32 to rank 0 in B1 (pipeline.cpp:11), 192 "
         "bytes, but rank 0 calls pp.recv #2, 48 fp32 from rank 1 in B1 (pipeline.cpp:21), 96 bytes"});
    Step8 step;  // as 16 bf16 numbers of the same bytes
    step.hand.later(7, send(step.dp, 8, 0, "extra.cpp:1"));
    CommCall other = recv(step.dp, 8, 1, "extra.cpp:2");
    other.details = ", 16 bf16 from rank 1";
    step.hand.later(5, other);
    expect_parts(mismatch(step.hand.recording),
                 {"rank 7 calls dp.send #1, 8 fp32", "but rank 5 calls dp.recv #1, 16 bf16"});

    Step8 two;
    for (const int64_t elements : {5, 6}) {
        two.hand.later(7, send(two.dp, 11 - elements, 0, fmt::format("extra.cpp:{}", elements)));
        two.hand.later(5, recv(two.dp, elements, 1, "extra.cpp:9"));
    }
    expect_parts(mismatch(two.hand.recording),
                 {"message 1 from rank 7 to rank 5: rank 7 calls dp.send #1, 6 fp32 to rank 0 in update (extra.cpp:5), "
                  "24 bytes, but rank 5 calls dp.recv #1, 5 fp32 from rank 1 in update (extra.cpp:9), 20 bytes (rank 5 "
                  "makes two calls in the other order)"});
}

TEST_CASE("a ring shift that one rank leaves out, or that goes the other way") {
    expect_parts(mismatch(Step8().edited(2, [](RankEdit& list) { list.drop(at(list, "layer.cpp:31", 3)); })),
                 {"rank 3 calls tp.send_recv #4, 16 fp32 shifted in B1 (layer.cpp:31), but rank 2 "
                  "receives nothing more there, after tp.send_recv #3, 16 fp32 shifted in F1"});
    ByHand ring(4);
    for (int rank = 0; rank < 4; ++rank) ring.call(rank, ring_shift(0, 8, rank, 4, "ring.cpp:1"));
    EXPECT(mismatch(ring.recording) == "");
    EXPECT(merged(ring.recording).sequences.size() == 1);
    Recording backwards = ring.recording;
    Step8::change(backwards, 2, [](RankEdit& list) { std::swap(list.items[0].call.to, list.items[0].call.from); });
    expect_parts(mismatch(backwards), {"rank 1 calls world.send_recv #1", "but rank 2 receives nothing more there"});
}

TEST_CASE("splits: one order of all families on every rank") {
    // In its group every rank makes the same splits; but rank 2 and 3 may make the third before the second.
    const auto recording = [](bool swapped) {
        ByHand hand(4);
        const int rows = hand.family("rows", {0, 0, 1, 1});
        hand.family("columns", {0, 1, 0, 1});
        hand.family("pair", {0, 0}, rows);
        for (int64_t rank = 0; rank < 4; ++rank) {
            int groups = 0;
            const auto split = [&](int parent, const char* into) {
                hand.call(rank, {.family = parent,
                                 .operation = "split",
                                 .details = fmt::format(" into {} as group {}", into, ++groups),
                                 .where = "mesh.cpp:1"});
            };
            split(0, "rows");
            if (swapped && rank > 1) split(rows, "pair");
            split(0, "columns");
            if (!swapped || rank < 2) split(rows, "pair");
        }
        return hand.recording;
    };
    EXPECT(mismatch(recording(false)) == "");
    expect_parts(mismatch(recording(true)),
                 {"rank 0 calls world.split #2 into columns as group 2 in setup (mesh.cpp:1), but rank 2 calls "
                  "world.split #2 into columns as group 3 in setup (mesh.cpp:1)"});
}

TEST_CASE("a wait for a call that has not been made") {
    ByHand hand(2);
    hand.wait(1, 0);
    EXPECT(mismatch(hand.recording) == "rank 1 waits in setup for a call that it has not made");
}

// ---- deadlocks ------------------------------------------------------------------------------------------------------

TEST_CASE("collectives of two groups in the other order: a deadlock of two") {
    ByHand hand(2);
    const int other = hand.family("other", {0, 0});
    hand.call(0, collective(0, "all_reduce", 4, "a.cpp:1"));
    hand.call(0, collective(other, "all_gather", 8, "a.cpp:2"));
    hand.call(1, collective(other, "all_gather", 8, "b.cpp:1"));
    hand.call(1, collective(0, "all_reduce", 4, "b.cpp:2"));
    EXPECT(mismatch(hand.recording) ==
           "these ranks wait for one another, where collectives begin at the next wait (mpi): rank 0 waits in "
           "world.all_reduce #1, 4 fp32 in setup (a.cpp:1) for rank 1; rank 1 waits in other.all_gather #1, 8 fp32 in "
           "setup (b.cpp:1) for rank 0");
}

TEST_CASE("collectives of two groups in the other order on two of four ranks: a deadlock of four, or none") {
    const Step8 step;
    const CommCall extra = collective(step.tp, "all_gather", 7, "extra.cpp:1");
    const auto before = [&](RankEdit& list) { list.insert(at(list, "zero.cpp:1") - 1, extra); };
    const auto behind = [&](RankEdit& list) { list.insert(at(list, "zero.cpp:2") + 2, extra); };
    const auto with_behind = [&](const std::vector<int64_t>& ranks) {
        Recording recording = step.hand.recording;
        for (int64_t rank = 0; rank < 4; ++rank) {
            if (std::find(ranks.begin(), ranks.end(), rank) != ranks.end())
                Step8::change(recording, rank, behind);
            else
                Step8::change(recording, rank, before);
        }
        return mismatch(recording);
    };
    EXPECT(with_behind({}) == "");
    EXPECT(with_behind({0}) == "");     // the rank comes late, but all others go on
    EXPECT(with_behind({0, 1}) == "");  // the whole group
    EXPECT(with_behind({0, 2}) == "");
    // tp {0, 1} and {2, 3}, dp {0, 2} and {1, 3}
    expect_parts(with_behind({0, 3}),
                 {"rank 0 waits in dp.all_reduce #1, 1000 fp32 in gradients (zero.cpp:1) for rank 2",
                  "rank 2 waits in tp.all_gather #9, 7 fp32 in B1 (extra.cpp:1) for rank 3",
                  "rank 3 waits in dp.all_reduce #1, 1000 fp32 in gradients (zero.cpp:1) for rank 1",
                  "rank 1 waits in tp.all_gather #9, 7 fp32 in B1 (extra.cpp:1) for rank 0"});
}

TEST_CASE("messages: both receive before they send; a send that the receiver posts too late") {
    ByHand hand(2);
    for (const int rank : {0, 1}) {
        hand.call(rank, recv(0, 4, 1 - rank, "a.cpp:1"));
        hand.call(rank, send(0, 4, 1 - rank, "a.cpp:2"));
    }
    expect_parts(mismatch(hand.recording),
                 {"rank 0 waits in world.recv #1, 4 fp32 from rank 1 in setup (a.cpp:1) for rank 1; "
                  "rank 1 waits in world.recv #1, 4 fp32 from rank 0 in setup (a.cpp:1) for rank 0"});
    ByHand posted(2);  // at the calls
    for (const int rank : {0, 1}) {
        posted.later(rank, recv(0, 4, 1 - rank, "a.cpp:1"));
        posted.call(rank, send(0, 4, 1 - rank, "a.cpp:2"));
        posted.wait(rank, 0, 2);
    }
    EXPECT(mismatch(posted.recording) == "");
    ByHand sends(2);  // large messages are not buffered
    for (const int rank : {0, 1}) {
        sends.call(rank, send(0, 4, 1 - rank, "a.cpp:1"));
        sends.call(rank, recv(0, 4, 1 - rank, "a.cpp:2"));
    }
    expect_parts(mismatch(sends.recording), {"rank 0 waits in world.send #1", "(a.cpp:1) for rank 1; rank 1 waits"});
    ByHand polled(2);  // and the pipeline waits for its sends before the gradients' reduction
    polled.later(0, send(0, 4, 1, "a.cpp:1"));
    for (const int rank : {0, 1}) {
        polled.part(rank, {Sequence::Part::Kind::gradients});
        polled.call(rank, collective(0, "all_reduce", 4, "a.cpp:3"));
    }
    polled.call(1, recv(0, 4, 0, "a.cpp:2"));
    expect_parts(mismatch(polled.recording), {"rank 0 waits in world.send #1",
                                              "(a.cpp:1) for rank 1; rank 1 waits in "
                                              "world.all_reduce #1, 4 fp32 in gradients (a.cpp:3) for rank 0"});
}

TEST_CASE("ranks of one sequence that are in different places of it") {
    ByHand hand(3);  // rank 2 sends to rank 0 before the barrier, to rank 1 behind it
    for (const int rank : {0, 1}) {
        hand.call(rank, recv(0, 4, 2, "a.cpp:1"));
        hand.call(rank, collective(0, "barrier", 0, "a.cpp:2"));
    }
    hand.later(2, send(0, 4, 0, "b.cpp:1"));
    hand.call(2, collective(0, "barrier", 0, "b.cpp:2"));
    hand.later(2, send(0, 4, 1, "b.cpp:3"));
    EXPECT(merged(hand.recording).sequences.size() == 2);
    expect_parts(mismatch(hand.recording),
                 {"rank 1 waits in world.recv #1, 4 fp32 from rank 2 in setup (a.cpp:1) for rank 2",
                  "rank 2 waits in world.barrier #1, 0 fp32 in setup (b.cpp:2) for rank 1"});
    ByHand both(3);  // both before the barrier
    for (const int rank : {0, 1}) both.call(rank, recv(0, 4, 2, "a.cpp:1"));
    for (const int rank : {0, 1}) both.later(2, send(0, 4, rank, "b.cpp:1"));
    for (const int rank : {0, 1, 2}) both.call(rank, collective(0, "barrier", 0, "c.cpp:1"));
    EXPECT(merged(both.recording).sequences.size() == 2);
    EXPECT(mismatch(both.recording) == "");
}

TEST_CASE("a deadlock only where collectives begin at waits, and one only on streams") {
    ByHand waits(2);
    waits.later(0, collective(0, "all_reduce", 4, "a.cpp:1"));
    waits.call(0, recv(0, 4, 1, "a.cpp:2"));
    waits.call(0, send(0, 4, 1, "a.cpp:3"));
    waits.wait(0, 0, 3);
    waits.call(1, send(0, 4, 0, "b.cpp:1"));
    waits.call(1, recv(0, 4, 0, "b.cpp:2"));
    waits.call(1, collective(0, "all_reduce", 4, "b.cpp:3"));
    expect_parts(mismatch(waits.recording),
                 {"(mpi): rank 0 waits in world.all_reduce #1, 4 fp32 in setup (a.cpp:1) for rank 1; rank 1 waits in "
                  "world.recv #2, 4 fp32 from rank 0 in setup (b.cpp:2) for rank 0"});
    ByHand streams(2);
    for (const int rank : {0, 1}) {
        const CommCall shift = ring_shift(0, 4, rank, 2, fmt::format("shift.cpp:{}", rank));
        const CommCall gather = collective(0, "all_gather", 4, fmt::format("gather.cpp:{}", rank));
        streams.later(rank, rank == 0 ? shift : gather);
        streams.later(rank, rank == 0 ? gather : shift);
        streams.wait(rank, 0, 2);
        streams.wait(rank, 0, 1);
    }
    expect_parts(
        mismatch(streams.recording),
        {"(nccl): rank 0 waits in world.send_recv #1, 4 fp32 shifted in setup (shift.cpp:0) for rank 1; rank 1 "
         "waits in world.all_gather #1, 4 fp32 in setup (gather.cpp:1) for rank 0"});
    ByHand host(2);  // whose numbers pass what waits on a stream
    for (const int rank : {0, 1}) {
        if (rank == 0) host.later(rank, ring_shift(0, 4, rank, 2, "shift.cpp:1"));
        host.call(rank, collective(0, "scalar", 1, "number.cpp:1"));
        if (rank == 1) host.later(rank, ring_shift(0, 4, rank, 2, "shift.cpp:1"));
        host.wait(rank, 0, rank == 0 ? 2 : 1);
    }
    EXPECT(mismatch(host.recording) == "");
}
