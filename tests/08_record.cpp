// Recordings of dry runs: what was left out by symmetry or by replaying micro-batches is what would have been run.
#include <nlohmann/json.hpp>

#include "08_3d_full/plan/dry_run.h"
#include "08_3d_full/plan/record.h"
#include "tests/drawn_layouts.h"
#include "tests/grid_layouts.h"

using namespace train70b;
using namespace train70b::test;

namespace {

ParallelConfig on_ranks(ParallelConfig config, const TrainOptions& o) {
    validate(config, o, config.mesh.size());
    return config;
}

// A part's events with the ops and calls themselves in the place of their numbers. by_symmetry: without what depends on
// where a shard cuts parameters: the ops of the update and its bookings (whose peak is compared), and the sums of
// gradients of replicated parameters.
std::vector<std::string> lines(const Sequence& sequence, const Sequence::Part& part, bool by_symmetry) {
    using Kind = Sequence::Part::Kind;
    std::vector<std::string> text;
    const bool per_parameter = part.kind == Kind::setup || part.kind == Kind::update || part.kind == Kind::end;
    if (by_symmetry && part.kind == Kind::gradients) return {};
    for (const Event& event : sequence.segments[size_t(part.segment)]) {
        const bool communicates = event.kind == Event::Kind::call || event.kind == Event::Kind::wait;
        if (by_symmetry && per_parameter && !communicates) continue;
        if (event.kind == Event::Kind::compute) {
            const OpCall& op = sequence.ops[size_t(event.what)];
            text.push_back(fmt::format("{} {} {} {}", op.name, to_string(op.shape), op.flops, op.bytes));
        } else if (event.kind == Event::Kind::call) {
            const CommCall& c = sequence.calls[size_t(event.what)];
            text.push_back(fmt::format("{} {} {} {} {} {} {}", c.family, c.operation, c.details, c.bytes, c.wire_bytes,
                                       c.received, c.where));
        } else if (event.kind == Event::Kind::wait) {
            text.push_back(fmt::format("wait {} {}", event.family, event.what));
        } else {
            text.push_back(fmt::format("book {} {}", int(event.memory), event.bytes));
        }
    }
    return text;
}

// The first difference between two sequences; empty: there is none.
std::string difference(const Sequence& a, const Sequence& b, bool by_symmetry = false) {
    if (a.parts.size() != b.parts.size()) return fmt::format("{} and {} parts", a.parts.size(), b.parts.size());
    for (size_t i = 0; i < a.parts.size(); ++i) {
        if (to_string(a.parts[i]) != to_string(b.parts[i]))
            return fmt::format("part {}: {} and {}", i, to_string(a.parts[i]), to_string(b.parts[i]));
        const auto x = lines(a, a.parts[i], by_symmetry), y = lines(b, b.parts[i], by_symmetry);
        for (size_t j = 0; j < std::max(x.size(), y.size()); ++j)
            if (j >= x.size() || j >= y.size() || x[j] != y[j])
                return fmt::format("{}, event {}: {} and {}", to_string(a.parts[i]), j, j < x.size() ? x[j] : "none",
                                   j < y.size() ? y[j] : "none");
    }
    return "";
}

std::string text_of(const MemoryPeak& peak) {
    std::string text = fmt::format("total {}", peak.total);
    for (int kind = 0; kind < kMemoryKinds; ++kind) text += fmt::format(", {} {}", kMemoryNames[kind], peak.kind[kind]);
    return text;
}

struct Many {
    Mesh mesh;
    const char* pipeline;
    int zero;
    int64_t micro_batches;
    const char* context = "zigzag";
    bool sequence = false;
};

}  // namespace

TEST_CASE("few micro-batches explain a step of many: every event and the peak of every rank") {
    const Text text;
    const std::vector<Many> list = {{{.dp = 2}, "1f1b", 0, 24},
                                    {{.dp = 4}, "1f1b", 1, 24},
                                    {{.dp = 4}, "1f1b", 2, 40},
                                    {{.dp = 4}, "1f1b", 3, 24},
                                    {{.tp = 2, .dp = 2}, "1f1b", 3, 24, "zigzag", true},
                                    {{.dp = 2, .pp = 4}, "gpipe", 1, 40},
                                    {{.dp = 2, .pp = 4}, "1f1b", 3, 40},
                                    {{.dp = 2, .pp = 2}, "interleaved", 2, 32},
                                    {{.dp = 2, .pp = 4}, "zero-bubble", 3, 40},
                                    {{.dp = 2, .pp = 2}, "zb-v", 2, 40},
                                    {{.dp = 2, .pp = 2}, "dualpipe-v", 3, 40},
                                    {{.cp = 2, .pp = 4}, "naive", 0, 40, "ring"},
                                    {{.tp = 2, .cp = 2, .pp = 2}, "interleaved", 0, 32, "ulysses", true}};
    int64_t number = 0;
    for (const Many& layout : list) {
        const int64_t at = number++;
        if (!in_half(at) || !in_sanitized_slice(at / 2)) continue;
        TrainOptions o = grid_shape(text);
        o.global_batch = layout.micro_batches * layout.mesh.dp;
        ParallelConfig config;
        config.mesh = layout.mesh;
        config.pipeline.schedule = layout.pipeline;
        config.zero.stage = layout.zero;
        config.context.algorithm = layout.context;
        config.tensor.sequence_parallel = layout.sequence;
        config = on_ranks(config, o);
        const Dataset data(o.data, o.model.vocab, o.seq_len, 0);
        INFO(config.mesh.text(), ", ", layout.pipeline, ", ZeRO ", layout.zero);
        const Recording few = record_step(o, data, config);
        const Recording all = record_step(o, data, config, {.all_micro_batches = true});
        DOCTEST_CHECK(few.families == all.families);
        for (int64_t rank = 0; rank < few.ranks; ++rank) {
            INFO("rank ", rank);
            DOCTEST_CHECK(difference(few.of(rank), all.of(rank)) == "");
            DOCTEST_CHECK(text_of(peak_of(few.of(rank))) ==
                          text_of(book_rank(o, nlohmann::ordered_json::object(), data, config, rank).peak));
        }
        const GroupTable groups(few);
        for (const Sequence& sequence : few.sequences) {
            for (const OpCall& op : sequence.ops) {  // without what a simulated group computes for its absent peers
                DOCTEST_CHECK(op.name != "fill_normal");
                DOCTEST_CHECK(op.name != "scale");
            }
            for (const CommCall& call : sequence.calls) {  // bytes are those of the whole tensor
                const int64_t peers = int64_t(groups.members(call.family, sequence.rank).size()) - 1;
                if (call.operation == "all_reduce") DOCTEST_CHECK(call.wire_bytes == 2 * peers * call.bytes);
                if (call.operation == "all_gather" || call.operation == "reduce_scatter" ||
                    call.operation == "all_to_all")
                    DOCTEST_CHECK(call.wire_bytes == peers * call.bytes);
            }
        }
        DOCTEST_CHECK(few.of(0).micro_batches_run < layout.micro_batches);
    }
}

TEST_CASE("ranks that are left out by symmetry would have made the same calls and held the same memory") {
    const Text text;
    int64_t number = 0, left_out = 0, derived = 0;
    std::vector<GridLayout> layouts = grid_layouts();
    for (const char* pipeline : {"1f1b", "zb-v"})  // stages in the middle, which are alike
        layouts.push_back({{.tp = 2, .cp = 2, .pp = 6}, pipeline, 1, true, true});
    for (const GridLayout& layout : layouts) {
        const int64_t at = number++;
        const bool many_stages = layout.mesh.pp == 6;
        if (!many_stages && (!in_slice(at + at / 8) || !in_sanitized_slice(at / 8))) continue;
        TrainOptions o = grid_shape(text);
        if (many_stages) o.model.layers = 12;
        layout.use_family(o.model, number % 3);
        o.recompute = layout.recompute;
        ParallelConfig config = layout.config();
        INFO(layout.text());
        config = on_ranks(config, o);
        const Dataset data(o.data, o.model.vocab, o.seq_len, 0);
        const Recording all = record_step(o, data, config), few = record_step(o, data, config, {.most_ranks = 0});
        for (int64_t rank = 0; rank < all.ranks; ++rank) {
            INFO("rank ", rank);
            DOCTEST_CHECK(difference(few.of(rank), all.of(rank), true) == "");
            MemoryPeak peak = peak_of(few.of(rank));
            const MemoryPeak own = peak_of(all.of(rank));
            // The squares of each piece of a parameter that a shard has are summed in a few bytes.
            const size_t workspace = size_t(Memory::workspace);
            if (std::abs(peak.kind[workspace] - own.kind[workspace]) <= 1024)
                peak.kind[workspace] = own.kind[workspace];
            DOCTEST_CHECK(text_of(peak) == text_of(own));
            left_out += few.of(rank).rank != rank;
            derived += few.of(rank).derived;
            EXPECT(!all.of(rank).derived);
        }
    }
    DOCTEST_CHECK(left_out > 0);
    DOCTEST_CHECK(derived >= 16);
}
