// Every stage of ZeRO against one rank, and against every other stage bit for bit; what each keeps, to the byte; what
// each sends.
#include <sys/resource.h>

#include <csignal>

#include "01_single_gpu/core/platform/platform.h"
#include "03_zero/complete/flags.h"
#include "03_zero/complete/offload.h"
#include "03_zero/complete/training_report.h"
#include "tests/parallel.h"

using namespace train70b;
using namespace train70b::test;

namespace {

// Units of which none divides by 4, so that every one is padded.
TrainOptions padded(const Text& text, int64_t global_batch) {
    TrainOptions o = odd(text, global_batch);
    o.model.hidden = 54;
    o.model.heads = 9;
    o.clip = 0.3;  // reached, and
    o.eps = 1e-3;  // of the gradients' size: AdamW does not see their scale otherwise
    return o;
}

// A run on the ranks of comm; with accumulation it takes as many micro-batches.
struct Sharded {
    Comm comm;
    std::unique_ptr<Zero> zero;
    std::map<std::string, CommStats::Entry> sent;  // in the last step
    Session session;
    std::vector<double> weights;  // all, on rank 0

    // meet: after the first block's backward pass the ranks wait for one another, which executes what has been started.
    Sharded(TrainOptions o, const Comm& ranks, ZeroOptions options, int64_t accumulation = 1, bool meet = false)
        : comm(ranks), session(with_micro_batch(o, ranks.size(), accumulation), [&](Session& s) {
              zero = std::make_unique<Zero>(s.model, comm, options, AdamW::maker(s.options.adamw()));
              use_store(s.trainer, *zero, comm);
              auto& wrappers = s.model.blocks.front().unit.wrappers;
              if (meet)
                  wrappers.insert(wrappers.begin(), [this](Tape& tape, const Var& x, const Unit::Body& body) {
                      tape.record([this] { comm.barrier().wait(); });
                      return body(tape, x);
                  });
              s.on_step = [this](const StepReport&) { sent = comm.take_stats().operations; };
          }) {
        comm.take_stats();
        session.run();
        weights = gathered(session, Which::data);
    }
    static TrainOptions with_micro_batch(TrainOptions o, int64_t ranks, int64_t accumulation) {
        o.micro_batch = o.global_batch / ranks / accumulation;
        return o;
    }
    int64_t bytes(const std::string& operation) const {
        const auto found = sent.find(operation);
        return found == sent.end() ? 0 : found->second.bytes;
    }
    int64_t wire_bytes() const {
        int64_t sum = 0;
        for (const auto& [operation, entry] : sent)
            if (!operation.ends_with(".scalar")) sum += entry.bytes;
        return sum;
    }
};

// What a rank keeps and sends in the second step, counted, and by the chapter's formulas.
struct Kept {
    MemoryBytes peak;
    ZeroMemory formula;
    int64_t wire_bytes, wire_formula, most_unsharded;
};
Kept run_two_steps(TrainOptions o, const ZeroOptions& options, int64_t m) {
    o.steps = 2;
    const MemoryBytes before = ledger().now();
    const Sharded run(o, world(), options, m);
    const Zero& zero = *run.zero;
    const Llama::Options& types = run.session.model.options;
    const int64_t padded = zero.padded_elements(), N = zero.shard_ranks();
    return {run.session.reports.back().peak.above(before).kind,
            zero_memory(o.model.parameters(), padded, zero.owned_elements(), types, options.stage, options.offload, N),
            run.wire_bytes(), zero_wire_bytes(padded, zero.passed_elements(), types, options.stage, m, N),
            zero.most_unsharded()};
}
void expect_formulas(const Kept& run, int stage) {
    EXPECT_EVERYWHERE(run.peak[int(Memory::params)] == run.formula.params);
    EXPECT_EVERYWHERE(run.peak[int(Memory::grads)] == run.formula.grads);
    EXPECT_EVERYWHERE(run.peak[int(Memory::optimizer)] == run.formula.optimizer);
    EXPECT_EVERYWHERE(run.peak[int(Memory::host)] == run.formula.host);
    EXPECT_EVERYWHERE(run.peak[int(Memory::disk)] == run.formula.disk);
    EXPECT_EVERYWHERE(run.most_unsharded == (stage == 3 ? 2 : 0));
    EXPECT_EVERYWHERE(run.wire_bytes == run.wire_formula);
}

struct Case {
    ZeroOptions zero;
    int64_t micro_batches = 1;
};

std::string describe_options(const ZeroOptions& o, int64_t micro_batches = 1) {
    return fmt::format("stage {}, prefetch {}, hybrid {}, offload {}, accumulation {}, overlap {}, bucket {}", o.stage,
                       o.prefetch, o.hybrid_shard, int(o.offload), micro_batches, o.overlap, o.bucket_mb);
}

}  // namespace

TEST_CASE("stages 0 to 3, prefetch, accumulation, recomputation, overlap, buckets, offload, hybrid: one rank's run") {
    const Text text;
    REQUIRE(world().size() == 4);
    const std::string before = world().use("ring");
    int64_t drawn = 0;
    for (const Parity& parity : kParity)
        for (const char* recompute : {"none", "pointwise", "selective", "full"}) {
            TrainOptions o = padded(text, 16);
            o.dtype = parity.dtype;
            o.recompute = recompute;
            const auto one = run_on_one_rank(o);
            std::vector<Case> list;
            for (int stage = 0; stage <= 3; ++stage)
                for (const int64_t m : {1, 4}) {
                    ZeroOptions base{.stage = stage};
                    for (const bool overlap : {true, false}) {
                        base.overlap = overlap;
                        list.push_back({base, m});
                    }
                    base.overlap = true;
                    if (recompute != std::string("none")) continue;
                    ZeroOptions other = base;
                    other.bucket_mb = 0.1;
                    list.push_back({other, m});
                    if (stage == 0) continue;
                    for (const int64_t group : {1, 2, 4}) {
                        other = base;
                        other.hybrid_shard = group;
                        list.push_back({other, m});
                        other.offload = Offload::optimizer;
                        list.push_back({other, m});
                        if (stage < 3) continue;
                        other.offload = Offload::all;
                        list.push_back({other, m});
                    }
                }
            for (const int64_t prefetch : {0, 2, 9}) list.push_back({{.stage = 3, .prefetch = prefetch}, 4});
            int64_t number = 0;
            for (const auto& [options, micro_batches] : list) {
                const bool always = options.hybrid_shard == 2 && options.offload == Offload::all;
                if (parity.skips(number++) || (!in_quarter(drawn++) && !always)) continue;
                // The ring's sums for one micro-batch, the library's for several.
                world().use(micro_batches > 1 ? "library" : "ring");
                Sharded run(o, world(), options, micro_batches);
                const Farthest deviation = deviation_on_rank_0(run.session, one);
                INFO(o.dtype, ", ", describe_options(options, micro_batches), ", recompute ", recompute, ": ",
                     deviation);
                EXPECT_EVERYWHERE(deviation <= parity.bound);
                // and the weights of all replicas are the same
                const double squares = run.zero->squares(Which::data);
                EXPECT_EVERYWHERE(world().max(squares) == squares);
            }
        }
    world().use(before);
}

TEST_CASE(
    "stages 0 to 3 are one another's, bit for bit: losses, norms and weights; so are prefetch, offload, overlap") {
    const Text text;
    const TrainOptions o = padded(text, 16);
    for (const std::string algorithm : {"ring", "pipelined"}) {
        const std::string before = world().use(algorithm);
        Sharded first(o, world(), {.stage = 0});
        for (const ZeroOptions& options : std::vector<ZeroOptions>{{.stage = 0, .overlap = false},
                                                                   {.stage = 1},
                                                                   {.stage = 1, .offload = Offload::optimizer},
                                                                   {.stage = 2},
                                                                   {.stage = 2, .overlap = false},
                                                                   {.stage = 2, .offload = Offload::optimizer},
                                                                   {.stage = 3, .prefetch = 0},
                                                                   {.stage = 3, .prefetch = 2},
                                                                   {.stage = 3, .overlap = false},
                                                                   {.stage = 3, .bucket_mb = 1},
                                                                   {.stage = 3, .offload = Offload::optimizer},
                                                                   {.stage = 3, .offload = Offload::nvme},
                                                                   {.stage = 3, .offload = Offload::all}}) {
            Sharded run(o, world(), options);
            INFO(describe_options(options));
            EXPECT_EVERYWHERE(on_rank_0(run.session.history() == first.session.history()));
            EXPECT_EVERYWHERE(on_rank_0(run.weights == first.weights && !run.weights.empty()));
            EXPECT_EVERYWHERE(on_rank_0(run.session.gradients == first.session.gradients));
        }
        world().use(before);
    }
}

TEST_CASE("bf16 weights: the stages agree bit for bit, also through the host") {
    const Text text;
    TrainOptions o = padded(text, 16);
    o.dtype = "bf16";
    for (const char* grads : {"fp32", "bf16"}) {
        o.grad_dtype = grads;
        Sharded first(o, world(), {.stage = 0});
        for (const ZeroOptions& options : std::vector<ZeroOptions>{{.stage = 1},
                                                                   {.stage = 2},
                                                                   {.stage = 3},
                                                                   {.stage = 2, .offload = Offload::optimizer},
                                                                   {.stage = 2, .offload = Offload::nvme},
                                                                   {.stage = 3, .offload = Offload::all}}) {
            Sharded run(o, world(), options);
            INFO(describe_options(options), ", gradients in ", grads);
            EXPECT_EVERYWHERE(on_rank_0(run.session.history() == first.session.history()));
            EXPECT_EVERYWHERE(on_rank_0(run.weights == first.weights));
        }
    }
}

TEST_CASE("the ledger: each stage keeps what its formula says, to the byte; gathered units are at most prefetch + 1") {
    const Text text;
    for (const char* dtype : {"fp32", "bf16", "fp64"})
        for (const int64_t m : {1, 2}) {
            TrainOptions o = padded(text, 16);
            o.dtype = dtype;
            for (int stage = 0; stage <= 3; ++stage)
                for (const Offload offload : {Offload::none, Offload::optimizer, Offload::nvme, Offload::all}) {
                    if (offload != Offload::none && (stage == 0 || (offload == Offload::all && stage < 3))) continue;
                    const ZeroOptions options{.stage = stage, .offload = offload};
                    const Kept run = run_two_steps(o, options, m);
                    INFO(describe_options(options, m), " ", dtype);
                    expect_formulas(run, stage);
                    const int64_t states = (o.dtype == "bf16" ? 12 : o.dtype == "fp64" ? 16 : 8) * o.model.parameters();
                    if (stage > 0 && offload == Offload::none)
                        EXPECT(world().sum(double(run.formula.optimizer)) == double(states));
                    EXPECT(world().sum(double(run.formula.disk)) == (offload == Offload::nvme ? double(states) : 0));
                }
        }
    TrainOptions o = padded(text, 16);
    int64_t last = 0;
    for (const int64_t prefetch : {0, 1, 2, 3, 9}) {
        const Kept run = run_two_steps(o, {.stage = 3, .prefetch = prefetch}, 1);
        EXPECT_EVERYWHERE(run.most_unsharded == std::min<int64_t>(prefetch + 1, 4));  // of 4 units
        EXPECT_EVERYWHERE(run.peak[int(Memory::workspace)] >= last);
        last = run.peak[int(Memory::workspace)];
    }
}

TEST_CASE(
    "tied embeddings: every stage is one rank's run, keeps what its formula says and sends what its formula says") {
    const Text text;
    int64_t run_number = 0;
    for (const Parity& parity : kParity) {
        TrainOptions o = padded(text, 16);
        o.dtype = parity.dtype;
        o.model.tied = true;
        const auto one = run_on_one_rank(o);
        int64_t number = 0;
        for (int stage = 0; stage <= 3; ++stage)
            for (const int64_t m : {1, 2}) {
                ZeroOptions base{.stage = stage};
                std::vector<ZeroOptions> list = {base};
                const auto add = [&](auto ZeroOptions::*member, auto value) {
                    list.push_back(base);
                    list.back().*member = value;
                };
                add(&ZeroOptions::overlap, false);
                add(&ZeroOptions::bucket_mb, 0.1);  // the matrix's two reductions may become one
                if (stage > 0) add(&ZeroOptions::offload, Offload::optimizer);
                if (stage > 0) add(&ZeroOptions::hybrid_shard, 2);
                if (stage == 3) add(&ZeroOptions::offload, Offload::all);
                for (const int64_t prefetch : {0, 2, 9})
                    if (stage == 3) add(&ZeroOptions::prefetch, prefetch);
                for (const ZeroOptions& options : list) {
                    if (parity.skips(number++) || !in_quarter(run_number++)) continue;
                    Sharded run(o, world(), options, m, true);  // no reduction may start between the two uses
                    const Farthest deviation = deviation_on_rank_0(run.session, one);
                    INFO(o.dtype, ", ", describe_options(options, m), ": ", deviation);
                    EXPECT_EVERYWHERE(deviation <= parity.bound);
                    const double squares = run.zero->squares(Which::data);
                    EXPECT_EVERYWHERE(world().max(squares) == squares);
                }
            }
    }
    TrainOptions o = padded(text, 16);
    o.model.tied = true;
    for (int stage = 0; stage <= 3; ++stage)
        for (const Offload offload : {Offload::none, Offload::all})
            for (const int64_t m : {1, 2}) {
                if (offload == Offload::all && stage < 3) continue;
                const Kept run = run_two_steps(o, {.stage = stage, .offload = offload}, m);
                INFO("stage ", stage, ", m ", m);
                expect_formulas(run, stage);
                // As without: the matrix passes twice as often, and there is none of the head's.
                if (stage < 2) continue;
                TrainOptions other = o;
                other.model.tied = false;
                const Kept untied = run_two_steps(other, {.stage = stage, .offload = offload}, m);
                const int64_t matrix = 4 * o.model.vocab * o.model.hidden, saved = stage == 2 ? matrix * 3 / 4 : 0;
                EXPECT_EVERYWHERE(std::abs(untied.wire_bytes - run.wire_bytes - saved) <= 3 * m * 4 * 4);  // padding
            }
}

TEST_CASE("hybrid shard: reduce-scatter inside the group, all-reduce of the shard across; memory of the group's size") {
    const Text text;
    TrainOptions o = padded(text, 16);
    for (int stage = 1; stage <= 3; ++stage) {
        Sharded run(o, world(), {.stage = stage, .hybrid_shard = 2});
        const int64_t all = 4 * run.zero->padded_elements();  // bytes of all gradients, or of all parameters
        INFO("stage ", stage);
        EXPECT_EVERYWHERE(run.zero->shard_ranks() == 2);
        EXPECT_EVERYWHERE(run.bytes("dp_shard.reduce_scatter") == all / 2);
        EXPECT_EVERYWHERE(run.bytes("dp_replica.all_reduce") == all / 2);  // 2 (R-1)/R of half the gradients, R = 2
        EXPECT_EVERYWHERE(run.bytes("dp_shard.all_gather") == (stage == 3 ? 2 : 1) * all / 2);
        const MemoryBytes memory = run.session.reports.back().memory;
        if (stage == 3) EXPECT_EVERYWHERE(memory[int(Memory::params)] == all / 2);
        if (stage >= 2) EXPECT_EVERYWHERE(memory[int(Memory::grads)] == all / 2);
    }
}

TEST_CASE("--offload nvme: all states lie in files without a name, which vanish; no folder or no room: usage error") {
    const Text text;
    const Folder folder;
    const auto mapped = [&] {
        std::ifstream maps("/proc/self/maps");
        int64_t count = 0;
        for (std::string line; std::getline(maps, line);)
            count += line.find(" rw-s ") != line.npos && line.find(folder.text() + "/train70b-") != line.npos;
        return count;
    };
    {
        TrainOptions o = padded(text, 16);
        o.dtype = "bf16";
        const Sharded run(o, world(), {.stage = 3, .offload = Offload::nvme, .offload_dir = folder.text()});
        int64_t states = 0;
        run.zero->for_each_state([&](const Segment&, const char*, Tensor& state) {
            states += state.kind() == Memory::disk && state.device() == Device::cpu ? 1 : 1 << 20;
        });
        EXPECT_EVERYWHERE(states > 0);
        EXPECT_EVERYWHERE(mapped() == states);
        EXPECT_EVERYWHERE(folder.files() == 0);
    }
    EXPECT_EVERYWHERE(mapped() == 0);

    struct rlimit limit {};
    ::getrlimit(RLIMIT_FSIZE, &limit);
    const struct rlimit small { 1 << 16, limit.rlim_max };
    const auto before = std::signal(SIGXFSZ, SIG_IGN);  // as run_program()
    ::setrlimit(RLIMIT_FSIZE, &small);
    map_file(folder.text(), 1 << 16);
    EXPECT_USAGE_ERROR(map_file(folder.text(), 1 << 17), ": 128.0 KiB cannot be mapped there: File too large");
    ::setrlimit(RLIMIT_FSIZE, &limit);
    std::signal(SIGXFSZ, before);
    EXPECT_EVERYWHERE(folder.files() == 0);
    EXPECT_USAGE_ERROR(map_file("no/such", 1), "--offload-dir no/such: 1 B cannot be mapped there: No such file");

    TrainOptions large = padded(text, 16);
    ZeroOptions options{.offload = Offload::nvme, .offload_dir = "."};
    check_zero(options, large, 4, 4);
    EXPECT_USAGE_ERROR(check_zero(options, large, 4, 4, 1e15), "--offload nvme: needs ");
    EXPECT_USAGE_ERROR(check_zero(options, large, 4, 4, 1e15), "of . on this node");
    large.dry_run = true;
    check_zero(options, large, 4, 4, 1e15);
    large.dry_run = false;
    options.offload_dir = "/dev/shm";
    if (platform::is_in_memory("/dev/shm"))
        EXPECT_USAGE_ERROR(check_zero(options, large, 4, 4), "--offload-dir /dev/shm: is in memory itself");
}
