#include "08_3d_full/watch/replica_check.h"

#include <fmt/ranges.h>
#include <zlib.h>

#include <algorithm>
#include <map>
#include <nlohmann/json.hpp>

#include "01_single_gpu/core/say.h"

namespace train70b {

namespace {

uint32_t checksum_of(const void* bytes, int64_t count) {
    return uint32_t(crc32_z(0, static_cast<const Bytef*>(bytes), size_t(count)));
}

// Of the bytes in memory, which Python's zlib.crc32 computes as well.
uint32_t checksum_of(const Tensor& x) {
    const Tensor here = converted(x, x.dtype(), Device::cpu);
    return checksum_of(here.raw(), here.bytes());
}

std::string list_of(const std::vector<int>& ranks) {
    if (ranks.size() == 1) return fmt::format("rank {}", ranks[0]);
    return fmt::format("ranks {} and {}", fmt::join(ranks.begin(), ranks.end() - 1, ", "), ranks.back());
}

// Whether embedding and head are on two pipeline ranks; in a V they are on one.
bool ends_apart(const LlamaConfig& model, const ParallelConfig& config) {
    for (int64_t pp = 0; pp < config.mesh.pp; ++pp) {
        const Stage stage = stage_of(config, model, config.mesh.rank({0, 0, 0, pp}));
        if (stage.embedding) return !stage.head;
    }
    return false;
}

struct Compared {
    bool weights, states, tp, stages;
    bool single;  // there are parameters over ep, and they have one copy
};
Compared compared(const LlamaConfig& model, const ParallelConfig& config) {
    const int64_t ranks = config.mesh.dp * config.mesh.cp, shard = config.zero.hybrid_shard;
    const int stage = config.zero.stage;
    const bool several = ranks > 1, hybrid = shard > 0 && shard < ranks;
    return {.weights = several && (stage < 3),
            .states = several && (stage == 0 || hybrid),
            .tp = config.mesh.tp > 1,
            .stages = model.embeds_twice() && ends_apart(model, config),
            .single = model.is_sparse() && config.mesh.ep == config.mesh.stage_ranks()};
}

// What other ranks may have a copy of.
struct Copy {
    const Param* param;
    std::string what;  // "weight", "exp_avg", ...
    uint32_t identity, checksum;
};

// x: what is stored of elements [offset, offset + size) of the parameter's local rectangle.
Copy copy_of(const Param& param, const std::string& what, int64_t offset, int64_t size, const Tensor& x) {
    const Rect& at = param.local;
    const std::string name = fmt::format("{} {} {} {} {} {} {} {}", what, param.name, at.row_begin, at.rows,
                                         at.col_begin, at.cols, offset, size);
    return {&param, what, checksum_of(name.data(), int64_t(name.size())), checksum_of(x)};
}

std::vector<Copy> weights_of(Llama& model) {
    std::vector<Copy> copies;
    for (const Param* param : model.params())
        if (param->data) copies.push_back(copy_of(*param, "weight", 0, param->data.size(), param->data));
    return copies;
}

std::vector<Copy> states_of(ParamStore& store) {
    std::vector<Copy> copies;
    const void* previous = nullptr;  // segment's data
    store.for_each_state([&](const Segment& segment, const char* name, Tensor& state) {
        if (!segment.data) return;
        const auto add = [&](const std::string& what, const Tensor& x) {
            if (x) copies.push_back(copy_of(*segment.param, what, segment.offset, segment.data.size(), x));
        };
        // With a master weight, "weight" is that. Shards, and what is offloaded, are compared here.
        const bool kept = segment.param->data && segment.data.same_memory(segment.param->data);  // in weights_of()
        if (segment.data.raw() != previous && !kept) add("weight", segment.data);
        previous = segment.data.raw();
        if (!state.same_memory(segment.data)) add(name == std::string("weight") ? "master weight" : name, state);
    });
    return copies;
}

// The first difference, as ReplicaCheck::difference() has it.
std::string compare(const Group& group, int rank, const std::vector<Copy>& copies) {
    std::vector<double> sent = {double(rank)};
    for (const Copy& copy : copies) sent.insert(sent.end(), {double(copy.identity), double(copy.checksum)});
    const std::vector<double> all = group.gather(sent);
    CHECK(all.size() == sent.size() * size_t(group.size()), "{} numbers of {} ranks", all.size(), group.size());
    std::string text;
    int more = 0;
    for (size_t i = 0; i < copies.size(); ++i) {
        std::map<double, std::vector<int>> ranks;  // by checksum: those that hold what this rank holds
        size_t holders = 0;
        for (size_t begin = 0; begin < all.size(); begin += sent.size()) {
            if (all[begin + 1 + 2 * i] != double(copies[i].identity)) continue;
            ranks[all[begin + 2 + 2 * i]].push_back(int(all[begin]));
            ++holders;
        }
        if (ranks.size() < 2) continue;
        if (!text.empty()) {
            ++more;
            continue;
        }
        std::vector<int> odd, majority;
        for (const auto& [checksum, list] : ranks) {
            std::vector<int>& side = 2 * list.size() > holders ? majority : odd;
            side.insert(side.end(), list.begin(), list.end());
        }
        std::sort(odd.begin(), odd.end());
        text = fmt::format("the {} of {} differs ", copies[i].what, copies[i].param->name);
        text += majority.empty()
                    ? fmt::format("between {}; to tell which is wrong takes a majority of three or more", list_of(odd))
                    : fmt::format("on {} from {}", list_of(odd), list_of(majority));
    }
    if (more > 0) text += fmt::format(" (and {} more tensors)", more);
    return text;
}

}  // namespace

ReplicaCheck::ReplicaCheck(int64_t every, Trainer& trainer, const Comm& world, const ParallelConfig& config)
    : every_(every), trainer_(trainer), world_(world) {
    if (every == 0) return;
    const Compared what = compared(trainer.model.config, config);
    const char* over = config.zero.stage == 0 ? "over the data-parallel ranks" : "over the replicas of a shard";
    std::string yes, no;
    const auto add = [](std::string& text, const std::string& part) { text += (text.empty() ? "" : "; ") + part; };
    if (what.weights) add(yes, "weights over the data-parallel ranks");
    if (what.states) add(yes, fmt::format("{}optimizer states {}", what.weights ? "" : "weights and ", over));
    if (what.tp) add(yes, "parameters that tensor-parallel ranks replicate, with their states");
    if (what.stages) add(yes, "the embedding's matrix of first and last stage, with its states");
    if (!what.weights && !what.states) add(no, "all other weights and states, which have one copy");
    if (what.weights && !what.states) add(no, "the shards of the optimizer states, which have one copy");
    if (what.single && (what.weights || what.states)) add(no, "what is divided over ep, which has one copy");
    say("replica check every {}: {}{}\n", every == 1 ? "step" : fmt::format("{} steps", every), yes,
        no.empty() ? "" : " (not compared: " + no + ")");
}

void ReplicaCheck::before_step(int64_t step) {
    if (good_ < 0) good_ = step - 1;
    last_ = step;
}

void ReplicaCheck::check(int64_t step) {
    const std::string line = difference();
    const std::vector<double> found = world_.gather({line.empty() ? 0.0 : 1.0});
    const auto first = std::find(found.begin(), found.end(), 1.0);
    if (first == found.end()) {
        good_ = step - 1;
        return;
    }
    if (first - found.begin() == world_.rank())
        fmt::print(stderr,
                   "rank {}: --replica-check: after step {}: {}; resume from the newest checkpoint before step {}\n",
                   world_.rank(), step - 1, line, good_ + 1);
    // Rank 0 may not know the tensor.
    trainer_.note(fmt::format("replicas differ after step {}; after step {} they were equal", step - 1, good_),
                  {{"event", "replicas_differ"}, {"step", step - 1}, {"equal", good_}});
    throw EarlyEnd{1};
}

std::string ReplicaCheck::difference() {
    const std::vector<Copy> kept = weights_of(trainer_.model), updated = states_of(*trainer_.store);
    const Groups& groups = trainer_.groups;
    std::string text;
    const auto add = [&](const GroupPtr& group, std::vector<Copy> copies, const auto& is_of_group) {
        std::erase_if(copies, [&](const Copy& copy) { return !is_of_group(*copy.param); });
        if (group->size() == 1 || copies.empty()) return;
        const std::string found = compare(*group, world_.rank(), copies);
        if (text.empty()) text = found;
    };
    for (const bool over_ep : {false, true}) {  // which other ranks may hold than the rest
        const auto of_these = [over_ep](const Param& param) { return param.over_ep == over_ep; };
        add(over_ep ? groups.edp : groups.dp_cp, kept, of_these);
        const auto state = std::ranges::find_if(updated, [&](const Copy& c) { return of_these(*c.param); });
        if (state != updated.end()) add(trainer_.store->state_replicas(*state->param), updated, of_these);
    }
    std::vector<Copy> all = kept;
    all.insert(all.end(), updated.begin(), updated.end());
    add(groups.tp, all, [](const Param& param) { return param.replicas > 1; });
    const Param& tied = trainer_.model.embed_tokens;
    if (tied.partial_grad_group) add(tied.partial_grad_group, all, [&](const Param& param) { return &param == &tied; });
    return text;
}

void add_replica_check_flag(Flags& flags, int64_t& every) {
    flags.group("Faults");
    flags.add("--replica-check", every, "compare checksums of replicated weights and states every N steps; 0: never",
              integer_from(0));
}

void check_replica_check(int64_t every, const LlamaConfig& model, const ParallelConfig& config,
                         const CommOptions& comm) {
    if (every == 0) return;
    if (comm.backend == "fake")
        usage_error("--replica-check {}: not supported with --comm fake, whose ranks do not exist", every);
    const Compared what = compared(model, config);
    if (what.weights || what.states || what.tp || what.stages) return;
    if (config.mesh.dp * config.mesh.cp == 1)
        usage_error(
            "--replica-check {}: no two ranks hold the same parameters; needs --dp, --cp or --tp above 1, or "
            "--tied-embeddings on with --pp",
            every);
    usage_error("--replica-check {}: --zero 3 keeps one copy of everything (try --hybrid-shard, or --zero 2)", every);
}

}  // namespace train70b
