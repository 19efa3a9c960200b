#include "08_3d_full/plan/record.h"

#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "01_single_gpu/core/recorder.h"
#include "02_data_parallel/runtime/backend.h"
#include "02_data_parallel/runtime/work_queue.h"
#include "05_pipeline/complete/pipeline.h"
#include "08_3d_full/plan/alike_ranks.h"
#include "08_3d_full/plan/dry_run.h"

namespace train70b {

namespace {

using Part = Sequence::Part;

// Parts, each with its own events, before equal ones are shared.
struct RawParts {
    std::vector<Part> parts;
    std::vector<std::vector<Event>> events;
};

// One rank's recorder. Several runs of it share the lists of ops and calls.
class StepRecorder : public Recorder, public RunControl {
  public:
    Numbering<OpCall> ops;
    Numbering<CommCall> calls;
    std::vector<GroupFamily> families;
    RawParts raw;

    void begin_run() {
        raw = {};
        families = {{.name = "world"}};
        made_.clear();
        latest_ = {0};
        mark({.kind = Part::Kind::setup});
    }
    void mark(const Part& part) {
        raw.parts.push_back(part);
        raw.events.emplace_back();
    }

    // ---- Recorder ----
    void op(const char* name, const std::vector<int64_t>& shape, DType dtype, double flops, double bytes) override {
        if (transport_ > 0 || raw.parts.back().kind == Part::Kind::setup) return;  // only the step is simulated
        if (std::string_view(name) == "fill_normal") return;  // what a simulated group computes for its absent peers
        add({.kind = Event::Kind::compute, .what = ops.of({name, shape, dtype, flops, bytes})});
    }
    void book(Memory kind, int64_t bytes) override { add({.kind = Event::Kind::book, .memory = kind, .bytes = bytes}); }
    void phase(const std::string& name) override {  // "F3.1": the schedule's step of this name
        const size_t pass = std::string("FBIW").find(name[0]), dot = name.find('.');
        if (pass == name.npos || name.size() < 2 || name[1] < '0' || name[1] > '9') return;
        const int64_t chunk = dot == name.npos ? 0 : std::stoll(name.substr(dot + 1));
        mark({Part::Kind::schedule_step, {Pass(pass), std::stoll(name.substr(1)), chunk}});
    }
    int split(int parent, const std::vector<int>& colors, const std::string& name) override {
        families.push_back({name, parent, colors});
        latest_.push_back(0);
        return int(families.size()) - 1;
    }
    uint64_t call(const RecordedCall& recorded) override {
        const Operation& o = recorded.operation;
        CommCall call{.family = recorded.family,
                      .operation = o.name,
                      .details = o.details,
                      .bytes = o.bytes,
                      .wire_bytes = o.wire_bytes,
                      .to = o.to,
                      .from = o.from,
                      .channel = recorded.channel,
                      .shift = o.shift,
                      .where = fmt::format("{}:{}", o.where.file_name(), o.where.line())};
        if (o.message) {
            call.bytes = o.tensors.back().bytes();
            if (o.tensors.size() > 1) call.received = o.tensors[0].bytes();
        } else {
            if (call.operation == "split") call.details += fmt::format(" as group {}", families.size() - 1);
            call.uneven = !o.sent.empty();
            for (const Tensor& tensor : o.tensors)
                if (!call.uneven) call.bytes = std::max(call.bytes, tensor.bytes());
        }
        add({.kind = Event::Kind::call, .what = calls.of(call)});
        made_.push_back({recorded.family, ++latest_[size_t(recorded.family)]});
        return made_.size();
    }
    void wait(uint64_t number) override {
        CHECK(number > 0, "a wait for a call that was not recorded");
        const auto [family, in_family] = made_[number - 1];
        add({.kind = Event::Kind::wait,
             .family = int16_t(family),
             .what = int32_t(latest_[size_t(family)] - in_family + 1)});
    }
    void begin_transport() override { ++transport_; }
    void end_transport() override { --transport_; }

    // ---- RunControl ----
    void before_step(int64_t) override { mark({.kind = Part::Kind::begin}); }
    void gradients_ready(int64_t) override { mark({.kind = Part::Kind::update}); }
    void finish() override { mark({.kind = Part::Kind::end}); }

  private:
    void add(const Event& event) { raw.events.back().push_back(event); }

    std::vector<std::pair<int, int64_t>> made_;  // by call: its family, and its number there
    std::vector<int64_t> latest_;                // by family: calls so far
    int transport_ = 0;
};

// The pipeline, with marks between its micro-batches' data, its steps, and what follows.
class MarkedLoop : public MicroBatchLoop {
  public:
    MarkedLoop(MicroBatchLoop& loop, StepRecorder& marks) : loop_(loop), marks_(marks) {}
    Tensor forward_backward(const MicroBatches& batches) override {
        std::vector<Batch> kept;  // so that each is released under a mark of its own
        const Tensor loss = loop_.forward_backward({batches.count, [&](int64_t index) {
                                                        marks_.mark({Part::Kind::batch, {Pass::forward, index}});
                                                        return kept.emplace_back(batches.get(index));
                                                    }});
        for (int64_t i = 0; i < batches.count; ++i) {
            marks_.mark({Part::Kind::release, {Pass::forward, i}});
            kept[size_t(i)] = {};
        }
        marks_.mark({.kind = Part::Kind::gradients});
        return loss;
    }
    Tensor forward_only(const Batch& batch) override { return loop_.forward_only(batch); }

  private:
    MicroBatchLoop& loop_;
    StepRecorder& marks_;
};

// ---- from the micro-batches that were run to all of them ------------------------------------------------------------

// What a part's events depend on: for a step of the schedule, which it is, whether it is among the first or the last
// `depth` of its kind on this rank, the `depth` parts before it and the one behind it.
using Context = std::vector<int64_t>;

std::vector<Context> contexts(const std::vector<Part>& parts, int64_t depth) {
    const auto kind = [](const Part& part) -> int64_t {
        if (part.kind != Part::Kind::schedule_step) return -int64_t(part.kind) - 1;
        return part.step.chunk * 4 + int64_t(part.step.pass);
    };
    std::map<int64_t, int64_t> count, seen;
    for (const Part& part : parts) ++count[kind(part)];
    std::vector<Context> result;
    for (size_t i = 0; i < parts.size(); ++i) {
        const int64_t own = kind(parts[i]), before = seen[own]++, after = count[own] - before - 1;
        Context context = {own, std::min(before, depth), std::min(after, depth)};
        for (int64_t offset = -depth; offset <= 1; ++offset) {
            const int64_t at = int64_t(i) + offset;
            context.push_back(at < 0 || at >= int64_t(parts.size()) ? INT64_MIN : kind(parts[size_t(at)]));
        }
        result.push_back(context);
    }
    return result;
}

// The parts of a rank in a step of m micro-batches.
std::vector<Part> parts_of(const Schedule& schedule, int64_t stage) {
    std::vector<Part> parts = {{.kind = Part::Kind::setup}, {.kind = Part::Kind::begin}};
    for (int64_t i = 0; i < schedule.micro_batches; ++i) parts.push_back({Part::Kind::batch, {Pass::forward, i}});
    for (const Step& step : schedule.ranks[size_t(stage)]) parts.push_back({Part::Kind::schedule_step, step});
    for (int64_t i = 0; i < schedule.micro_batches; ++i) parts.push_back({Part::Kind::release, {Pass::forward, i}});
    for (const Part::Kind kind : {Part::Kind::gradients, Part::Kind::update, Part::Kind::end})
        parts.push_back({.kind = kind});
    return parts;
}

// Segments by context; no context is known if two parts of one differ.
class Explained {
  public:
    Explained(const RawParts& run, int64_t depth) : depth_(depth) {
        const std::vector<Context> of = contexts(run.parts, depth);
        for (size_t i = 0; i < of.size(); ++i) {
            const auto [known, is_new] = segment_.insert({of[i], int32_t(segments.size())});
            if (is_new) segments.push_back(run.events[i]);
            if (segments[size_t(known->second)] == run.events[i]) continue;
            segment_.clear();
            return;
        }
    }
    // The parts with their segments; empty if some context is unknown.
    std::optional<std::vector<Part>> find(std::vector<Part> parts) const {
        const std::vector<Context> of = contexts(parts, depth_);
        for (size_t i = 0; i < parts.size(); ++i) {
            const auto known = segment_.find(of[i]);
            if (known == segment_.end()) return {};
            parts[i].segment = known->second;
        }
        return parts;
    }
    bool explains(const RawParts& run) const {
        const auto found = find(run.parts);
        for (size_t i = 0; found && i < run.events.size(); ++i)
            if (segments[size_t((*found)[i].segment)] != run.events[i]) return false;
        return found.has_value();
    }
    std::vector<std::vector<Event>> segments;

  private:
    const int64_t depth_;
    std::map<Context, int32_t> segment_;
};

// ---- one rank -------------------------------------------------------------------------------------------------------

// Also an error ends the recording, before the recorder is gone.
using RecorderScope = std::unique_ptr<Recorder, decltype([](Recorder*) { recorder = nullptr; })>;

class Rank {
  public:
    Rank(const TrainOptions& options, const Dataset& data, const ParallelConfig& config, int64_t rank)
        : options_(options.without_files()), data_(data), config_(config), rank_(rank) {}

    // A sequence for each number of micro-batches, of which the first is the step's; or the first one alone.
    // verified: how many micro-batches and which depth explained another rank of this stage; -1: not known yet.
    std::vector<Sequence> record(const std::vector<int64_t>& counts, bool all_micro_batches,
                                 std::pair<int64_t, int64_t>& verified) {
        const int64_t p = config_.mesh.pp, all = counts[0], stage = config_.mesh.coordinate(rank_).pp;
        const Schedule schedule = schedule_of(config_, options_);
        std::vector<Sequence> sequences;
        // Steps of a multiple of what the schedule needs; enough for its beginning, its end and both repeated.
        // A schedule from a file has no other number of micro-batches.
        const bool has_others = !from_file(config_.pipeline);
        const auto of_schedule = has_others ? find_schedule(schedule.name).multiple : nullptr;
        const int64_t multiple = of_schedule ? of_schedule(p) : 1;
        const auto at_least = [&](int64_t m) { return (m + multiple - 1) / multiple * multiple; };
        for (int64_t m = at_least(2 * p + 2);
             has_others && !all_micro_batches && sequences.empty() && m + multiple < all; m *= 2) {
            const bool again = verified.first == m;
            const RawParts longer = run(m + multiple), shorter = again ? RawParts() : run(m);
            for (const int64_t depth : {2, 4, 8}) {
                const Explained explained(longer, depth);
                if (again ? depth != verified.second : !explained.explains(shorter)) continue;
                verified = {m, depth};
                for (const int64_t count : counts) {
                    const auto parts = explained.find(parts_of(
                        count == all ? schedule : make_schedule(schedule.name, p, count, schedule.chunks), stage));
                    if (!parts) break;
                    sequences.push_back({.rank = rank_,
                                         .micro_batches_run = m + multiple,
                                         .segments = explained.segments,
                                         .parts = *parts});
                }
                if (!sequences.empty()) break;
            }
        }
        if (sequences.empty()) {  // every part as it was run; equal ones share a segment
            RawParts raw = run(all);
            Numbering<std::vector<Event>> segments;
            for (size_t i = 0; i < raw.parts.size(); ++i) raw.parts[i].segment = segments.of(raw.events[i]);
            sequences.push_back({.rank = rank_,
                                 .micro_batches_run = all,
                                 .segments = std::move(segments.values),
                                 .parts = std::move(raw.parts)});
        }
        for (Sequence& sequence : sequences) {
            sequence.ops = recorder_.ops.values;
            sequence.calls = recorder_.calls.values;
        }
        return sequences;
    }
    const std::vector<GroupFamily>& families() const { return recorder_.families; }

  private:
    RawParts run(int64_t micro_batches) {
        TrainOptions options = options_;
        options.global_batch = micro_batches * options.micro_batch * config_.mesh.dp;
        std::optional<MarkedLoop> loop;
        recorder_.begin_run();
        const RecorderScope scope(recorder = &recorder_);
        run_meta_step(
            options, nlohmann::ordered_json::object(), data_, config_, rank_,
            [&](Trainer& trainer) {
                trainer.loop = &loop.emplace(*trainer.loop, recorder_);
                trainer.controls.push_back(&recorder_);
            },
            [](const Trainer&) { recorder = nullptr; });
        return std::move(recorder_.raw);
    }

    const TrainOptions options_;
    const Dataset& data_;
    const ParallelConfig& config_;
    const int64_t rank_;
    StepRecorder recorder_;
};

bool equal_calls_and_memory(const Sequence& a, const Sequence& b) {
    return a.ops == b.ops && a.calls == b.calls && a.segments == b.segments &&
           std::ranges::equal(a.parts, b.parts, {}, &Part::segment, &Part::segment);
}

}  // namespace

std::vector<Recording> record_steps(const TrainOptions& options, const Dataset& data, const ParallelConfig& config,
                                    std::vector<int64_t> micro_batches, const RecordOptions& how) {
    const int64_t ranks = config.mesh.size();
    micro_batches.insert(micro_batches.begin(), options.accumulation(config.mesh.dp));
    std::vector<Recording> recordings(micro_batches.size(), {.ranks = ranks});
    std::vector<int32_t> class_of(static_cast<size_t>(ranks));
    std::map<RankKind, int32_t> known;
    std::map<std::vector<int64_t>, std::pair<AlikeRanks::Places, int32_t>> first_of;  // of each stage: places, class
    AlikeRanks alike;
    std::vector<std::pair<int64_t, int64_t>> verified(size_t(config.mesh.pp), {-1, -1});
    for (int64_t rank = 0; rank < ranks; ++rank) {
        RankKind kind{{rank}, {}};
        if (how.only >= 0)
            kind.stage = {0};
        else if (ranks > how.most_ranks)
            kind = kind_of(options, config, rank);
        std::vector<Sequence>& all = recordings[0].sequences;
        const auto [found, is_new] = known.insert({kind, int32_t(all.size())});
        class_of[size_t(rank)] = found->second;
        if (!is_new) continue;
        const auto [first, is_first] = first_of.insert({kind.stage, {kind.places, found->second}});
        AlikeRanks::Places places = first->second.first;
        places.insert(places.end(), kind.places.begin(), kind.places.end());
        std::vector<Sequence> sequences;
        for (size_t i = 0; !is_first && i < recordings.size(); ++i) {
            auto derived = alike.derive(places, recordings[i].sequences[size_t(first->second.second)]);
            if (!derived) break;
            derived->rank = rank;
            sequences.push_back(std::move(*derived));
        }
        if (sequences.size() < recordings.size()) {
            Rank run(options, data, config, how.only >= 0 ? how.only : rank);
            sequences =
                run.record(micro_batches, how.all_micro_batches, verified[size_t(config.mesh.coordinate(rank).pp)]);
            std::vector<GroupFamily>& families = recordings[0].families;
            if (families.empty()) families = run.families();
            CHECK(run.families() == families, "rank {} makes other groups than rank 0", rank);
            recordings.resize(std::min(recordings.size(), sequences.size()));
            for (size_t i = 0; !is_first && i < recordings.size(); ++i)
                alike.learn(places, recordings[i].sequences[size_t(first->second.second)], sequences[i]);
        }
        for (size_t i = 0; i < all.size(); ++i)
            if (equal_calls_and_memory(all[i], sequences[0])) found->second = int32_t(i);
        first->second.second = is_first ? found->second : first->second.second;
        class_of[size_t(rank)] = found->second;
        if (found->second < int32_t(all.size())) continue;
        for (size_t i = 0; i < recordings.size(); ++i) recordings[i].sequences.push_back(std::move(sequences[i]));
    }
    for (Recording& recording : recordings) {
        recording.class_of = class_of;
        recording.families = recordings[0].families;
    }
    return recordings;
}

Recording record_step(const TrainOptions& options, const Dataset& data, const ParallelConfig& config,
                      const RecordOptions& how) {
    return std::move(record_steps(options, data, config, {}, how)[0]);
}

}  // namespace train70b
