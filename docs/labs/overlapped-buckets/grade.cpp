// Grades the lab overlapped-buckets.
#include "02_data_parallel/complete/data_parallel.h"
#include "tests/labs.h"
#include "tests/parallel.h"

using namespace train70b;
using namespace train70b::test;

namespace {

constexpr double kBucketMb = 0.1;

TrainOptions options(const Text& text, int64_t steps, int64_t micro_batches) {
    TrainOptions o = odd(text, 8);
    o.steps = steps;
    o.micro_batch = o.global_batch / world().size() / micro_batches;
    return o;
}

// A run on all ranks. After each unit's backward pass: which one, how many all-reduces had been started by then.
struct Watched {
    struct Event {
        std::string unit;
        int64_t started;
    };
    std::unique_ptr<DataParallel> data_parallel;
    std::vector<Event> events;
    std::vector<double> head, head_at_end;  // the head's gradients after its backward pass, and after the embedding's
    CommStats::Entry step;                  // all-reduces of the last step
    Session session;

    Watched(const TrainOptions& o, bool overlap, double bucket_mb = kBucketMb)
        : session(o, [&](Session& s) {
              data_parallel = std::make_unique<DataParallel>(s.model, world(), DataParallelOptions{bucket_mb, overlap},
                                                             AdamW::maker(s.options.adamw()));
              for (Unit* unit : s.model.units_run()) unit->wrappers.insert(unit->wrappers.begin(), watch(s, *unit));
              use_store(s.trainer, *data_parallel, world());
              s.on_step = [this](const StepReport&) {
                  take();
                  step = std::exchange(booked, {});
              };
          }) {
        world().take_stats();
        session.run();
    }

    // Recorded around everything: runs after the unit's unit_ready.
    Unit::Wrapper watch(Session& s, const Unit& unit) {
        return [this, &s, name = unit.name](Tape& tape, const Var& x, const Unit::Body& body) {
            tape.record([this, &s, name] {
                take();
                events.push_back({name, booked.calls});
                if (s.model.config.tied) return;
                if (name == "head") head = values(s.model.lm_head.grad);
                if (name == "embedding") head_at_end = values(s.model.lm_head.grad);
            });
            return body(tape, x);
        };
    }

  private:
    void take() {
        const auto stats = world().take_stats().operations;
        if (const auto found = stats.find("world.all_reduce"); found != stats.end()) {
            booked.calls += found->second.calls;
            booked.bytes += found->second.bytes;
        }
    }
    CommStats::Entry booked;
};

// Elements of the units of `o` in the order of the backward pass, and of a bucket.
std::vector<std::pair<std::string, int64_t>> unit_sizes(const TrainOptions& o) {
    Llama model(o.model, o.llama());
    std::vector<std::pair<std::string, int64_t>> sizes;
    for (Unit* unit : model.units()) sizes.insert(sizes.begin(), {unit->name, total_size(unit->params)});
    return sizes;
}
constexpr int64_t kBucket = int64_t(kBucketMb * (1 << 20)) / 4 / 64 * 64;

}  // namespace

TEST_CASE("lab: one rank's run") {
    const Text text;
    for (const int64_t micro_batches : {1, 2})
        for (const bool overlap : {false, true})
            for (const double bucket_mb : {0.0, kBucketMb}) {
                TrainOptions o = options(text, 2, micro_batches);
                o.dtype = "fp64";
                Watched run(o, overlap, bucket_mb);
                o.micro_batch = o.global_batch;
                Session one(o);
                one.run();
                const Farthest deviation = worst_deviation(run.session, one);
                Failures failures;
                failures.expect(deviation <= 1e-10,
                                fmt::format("micro-batches {}, overlap {}, buckets of {} MiB: off by {:.2g} at {}",
                                            micro_batches, overlap, bucket_mb, double(deviation), deviation.where));
                EXPECT_NONE(failures);
            }
}

TEST_CASE("lab: a unit that runs twice") {
    const Text text;
    TrainOptions o = options(text, 2, 1);
    o.dtype = "fp64";
    o.model.tied = true;
    Watched run(o, true);
    o.micro_batch = o.global_batch;
    Session one(o);
    one.run();
    Failures failures;
    const Farthest deviation = worst_deviation(run.session, one);
    failures.expect(deviation <= 1e-10, fmt::format("off by {:.2g} at {}", double(deviation), deviation.where));
    for (const Watched::Event& event : run.events)  // the embedding's bucket is the last
        if (event.unit == "tied head")
            failures.expect(event.started == 0, "a bucket leaves after the first of two uses");
    EXPECT_NONE(failures);
}

TEST_CASE("lab: when buckets leave") {
    const Text text;
    const TrainOptions o = options(text, 1, 1);
    const Watched run(o, true);
    REQUIRE(run.events.size() == 4);
    const auto sizes = unit_sizes(o);
    int64_t complete = 0, all = 0;
    for (const auto& [name, size] : sizes) all += size;
    for (size_t i = 0; i < 4; ++i) {
        complete += sizes[i].second;
        const int64_t expected = complete == all ? (all + kBucket - 1) / kBucket : complete / kBucket;
        const int64_t got = run.events[i].started;
        figure("buckets that have left after " + run.events[i].unit, got, expected, "",
               fmt::format("buckets that end in the first {:.0f} KiB", double(4 * complete) / 1024),
               run.events.back().started == 0 ? "All buckets leave after the backward pass: nothing overlaps."
               : got > expected
                   ? "More messages than complete buckets: one message per parameter, or a bucket that leaves "
                     "before its last gradient is there."
                   : "A complete bucket waits for more than it has to.");
    }
    const Watched off(o, false);
    figure("and with --overlap off, before finish_gradients", off.events.back().started, int64_t(0), "", "none",
           "Without overlap the reductions start after the backward pass.");
}

TEST_CASE("lab: two micro-batches") {
    const Text text;
    const Watched run(options(text, 1, 2), true);
    REQUIRE(run.events.size() == 8);
    figure("buckets that leave in the first of two micro-batches", run.events[3].started, int64_t(0), "", "none",
           "They are sent with half a sum. (With MPI they leave late enough to be right; on a GPU they do not.)");
}

TEST_CASE("lab: messages and bytes") {
    const Text text;
    const TrainOptions o = options(text, 1, 2);
    Watched run(o, true);
    int64_t all = 0;
    for (const auto& [name, size] : unit_sizes(o)) all += size;
    const int64_t N = world().size(), buckets = (all + kBucket - 1) / kBucket;
    figure("all-reduces of a step", run.step.calls, buckets, "", "ceil(G / bucket)",
           run.step.calls == int64_t(run.session.model.params().size()) ? "This is one message per parameter."
           : run.step.calls == 2 * buckets                              ? "One per micro-batch: reduce once per step."
                                                                        : "");
    figure("bytes that a rank sends", run.step.bytes, 8 * all * (N - 1) / N, "B", "2 G (N-1)/N");
}

TEST_CASE("lab: nobody waits in the backward pass") {
    const Text text;
    const Watched run(options(text, 1, 1), true);
    // The head lies in bucket 0, which leaves before the embedding's backward pass: summed by then only if waited for.
    const bool summed = run.head != run.head_at_end;
    figure("buckets summed before the backward pass has ended", int64_t(world().max(summed)), int64_t(0), "", "none",
           "The backward pass waits for each bucket where it starts: the transfer hides behind nothing.");
}
