#include "08_3d_full/plan/equal_ranks.h"

#include <algorithm>
#include <bit>
#include <map>
#include <set>
#include <unordered_map>

#include "01_single_gpu/core/check.h"
#include "01_single_gpu/core/random.h"
#include "08_3d_full/plan/sequence.h"

namespace train70b {

bool simulated(const Sequence::Part& part, const SimulationModel& model) {
    return !model.timed() || (part.kind != Sequence::Part::Kind::setup && part.kind != Sequence::Part::Kind::end);
}

namespace {

using Hash = uint64_t;
Hash mixed(Hash a, Hash b) { return random_bits(a, b); }
Hash mixed(Hash a, double b) { return mixed(a, std::bit_cast<Hash>(b)); }
Hash mixed(Hash a, const std::string& b) { return mixed(a, Hash(std::hash<std::string>()(b))); }

size_t distinct(std::vector<Hash> colors) {
    std::sort(colors.begin(), colors.end());
    return size_t(std::unique(colors.begin(), colors.end()) - colors.begin());
}

// Classes, numbered in the order of their first members, and those.
struct Classes {
    std::vector<int32_t> of;
    std::vector<int64_t> first;
    explicit Classes(const std::vector<Hash>& colors) {
        std::unordered_map<Hash, int32_t> known;
        for (size_t i = 0; i < colors.size(); ++i) {
            const auto [at, is_new] = known.try_emplace(colors[i], int32_t(first.size()));
            if (is_new) first.push_back(int64_t(i));
            of.push_back(at->second);
        }
    }
};

constexpr Hash kCores = 0x636f726573;

class Refinement {
  public:
    Refinement(const Recording& recording, const SimulationModel& model, const SimulationOptions& options)
        : recording_(recording), model_(model), groups_(recording), link_rates_(model.links) {
        find_used_calls();
        for (int64_t rank = 0; rank < recording.ranks; ++rank) add_sites(rank);
        if (model_.cores > 0 && std::min(model_.ranks_per_node, recording_.ranks) > model_.cores) add_cores();
        color(options);
    }

    EqualRanks result() {
        const Classes ranks(rank_color_), sites(site_color_), links(link_color_);
        EqualRanks q{.class_of = ranks.of, .representative = ranks.first};
        q.count.resize(ranks.first.size());
        for (const int32_t c : ranks.of) ++q.count[size_t(c)];
        for (const int64_t link : links.first) q.links.push_back(link_rates_[size_t(link)]);

        // Transfers, by class of site and call: bytes of the first site of a class, and what all sites of the class
        // load on the first link of each class.
        std::unordered_map<Hash, int32_t> transfer_at;
        const auto key = [](int32_t site_class, Hash call) { return mixed(Hash(site_class) + 1, call); };
        for (size_t c = 0; c < sites.first.size(); ++c) {
            const Site& first = sites_[size_t(sites.first[c])];
            std::set<EqualRanks::Participant> participants;
            for (const auto& [rank, receives] : first.ranks) participants.insert({ranks.of[size_t(rank)], receives});
            q.sites.emplace_back(participants.begin(), participants.end());
            for (const auto& [call, latency] : first.latency) {
                transfer_at[key(int32_t(c), call)] = int32_t(q.transfers.size());
                q.transfers.push_back({.latency_s = latency});
            }
            for (size_t i = first.first_entry; i < first.end_entry; ++i) {
                SharedTransfer& transfer = q.transfers[size_t(transfer_at.at(key(int32_t(c), entries_[i].call)))];
                transfer.bytes = std::max(transfer.bytes, entries_[i].bytes);
            }
        }
        for (const Entry& entry : entries_) {
            const int32_t link = links.of[size_t(entry.link)];
            if (links.first[size_t(link)] != entry.link) continue;
            SharedTransfer& transfer =
                q.transfers[size_t(transfer_at.at(key(sites.of[size_t(entry.site)], entry.call)))];
            auto at = std::ranges::find(transfer.loads, link, &FlowLoad::link);
            if (at == transfer.loads.end()) at = transfer.loads.insert(at, {link, 0});
            at->share += entry.bytes / transfer.bytes;
        }

        for (size_t c = 0; c < ranks.first.size(); ++c) {
            const int64_t rank = ranks.first[c];
            const std::vector<CommCall>& calls = of(rank).calls;
            std::vector<EqualRanks::Use>& uses = q.uses.emplace_back(calls.size());
            for (const int32_t id : used(rank)) {
                const CommCall& call = calls[size_t(id)];
                if (groups_.members(call.family, rank).empty()) continue;
                EqualRanks::Meeting &send = uses[size_t(id)][0], &receive = uses[size_t(id)][1];
                const auto sends = [&](int32_t site) {
                    send = meeting(q, sites.of[size_t(site)], int32_t(c), false);
                    send.content = content(call, false);
                    // Not found: another call than the first rank's, which the simulation refuses.
                    const auto found = transfer_at.find(key(sites.of[size_t(site)], call_hash(call)));
                    if (found != transfer_at.end()) send.transfer = found->second;
                };
                const int64_t to = peer_rank(call, call.to, rank), from = peer_rank(call, call.from, rank);
                if (!call.message())
                    sends(collective_at_[size_t(call.family)][size_t(groups(call).group_of[size_t(rank)])]);
                if (to >= 0) sends(message_at(call, rank, to));
                if (from < 0) continue;
                receive = meeting(q, sites.of[size_t(message_at(call, from, rank))], int32_t(c), true);
                receive.content = content(call, true);
            }
            q.cores.push_back(
                core_site_.empty() ? -1 : transfer_at.at(key(sites.of[size_t(core_site_[size_t(rank)])], kCores)));
        }
        return q;
    }

  private:
    struct Site {
        Hash kind;                                    // the family, and a collective or which messages
        std::vector<std::pair<int64_t, bool>> ranks;  // and whether it receives
        size_t first_entry, end_entry;
        std::vector<std::pair<Hash, double>> latency;  // by call
    };
    // Bytes that a site's call passes through a link.
    struct Entry {
        int32_t site, link;
        Hash call;
        double bytes;
    };

    const Sequence& of(int64_t rank) const { return recording_.of(rank); }
    const std::vector<int32_t>& used(int64_t rank) const { return used_[size_t(recording_.class_of[size_t(rank)])]; }
    const GroupTable::Family& groups(const CommCall& call) const { return groups_.of(call.family); }
    // -1: there is no such rank.
    int64_t peer_rank(const CommCall& call, int peer, int64_t rank) const {
        return peer < 0 ? -1 : groups_.peer(of(rank), call, peer, rank);
    }

    static Hash message_kind(const CommCall& call) {
        return mixed(Hash(call.family) + 1, Hash(call.channel ? 1 : call.shift ? 2 : 3));
    }

    // Equal for the calls of all ranks of a site that are one call.
    static Hash call_hash(const CommCall& call) {
        const Hash what = call.message() ? message_kind(call) : mixed(Hash(call.family) + 1, call.operation);
        return mixed(what, Hash(call.bytes));
    }

    // What all ranks of a collective, or both ends of a message, must have in common.
    static Hash content(const CommCall& call, bool receives) {
        const std::string& text = call.details;
        if (!call.message())
            return mixed(mixed(mixed(Hash(1), call.operation), text), Hash(call.uneven ? -1 : call.bytes));
        // The tensor: of ", 8 fp32 to rank 1, 4 bf16 from rank 2" the first or the second.
        const size_t begin = receives ? text.rfind(", ") : 0, end = text.find(' ', text.find(' ', begin + 2) + 1);
        const std::string tensor = begin == text.npos ? text : text.substr(begin, end - begin);
        return mixed(mixed(Hash(2), tensor), Hash(receives && call.to >= 0 ? call.received : call.bytes));
    }

    int32_t& message_at(const CommCall& call, int64_t sender, int64_t receiver) {
        return message_at_.try_emplace(mixed(mixed(message_kind(call), Hash(sender)), Hash(receiver)), -1)
            .first->second;
    }

    EqualRanks::Meeting meeting(const EqualRanks& q, int32_t site, int32_t rank_class, bool receives) const {
        const std::vector<EqualRanks::Participant>& all = q.sites[size_t(site)];
        const auto at = std::find(all.begin(), all.end(), EqualRanks::Participant{rank_class, receives});
        CHECK(at != all.end(), "rank class {} does not meet site {}", rank_class, site);
        return {.site = site, .participant = int32_t(at - all.begin())};
    }

    void find_used_calls() {
        for (const Sequence& sequence : recording_.sequences) {
            std::set<int32_t> segments, calls;
            for (const Sequence::Part& part : sequence.parts)
                if (simulated(part, model_) && part.segment >= 0) segments.insert(part.segment);
            for (const int32_t segment : segments)
                for (const Event& event : sequence.segments[size_t(segment)])
                    if (event.kind == Event::Kind::call) calls.insert(event.what);
            used_.emplace_back(calls.begin(), calls.end());
        }
        for (size_t family = 0; family < recording_.families.size(); ++family)
            collective_at_.emplace_back(groups_.of(int(family)).members.size(), -1);
    }

    void add_sites(int64_t rank) {
        for (const int32_t id : used(rank)) {
            const CommCall& call = of(rank).calls[size_t(id)];
            if (groups_.members(call.family, rank).empty()) continue;
            if (!call.message()) {
                if (collective_at_[size_t(call.family)][size_t(groups(call).group_of[size_t(rank)])] < 0)
                    add_collectives(call, rank);
                continue;
            }
            const int64_t to = peer_rank(call, call.to, rank), from = peer_rank(call, call.from, rank);
            if (to >= 0) add_messages(call, rank, to);
            if (from >= 0) add_messages(call, from, rank);
        }
    }

    // What its calls pass follows: add_transfer().
    int32_t add_site(Hash kind, std::vector<std::pair<int64_t, bool>> ranks) {
        sites_.push_back({kind, std::move(ranks), entries_.size(), entries_.size(), {}});
        return int32_t(sites_.size()) - 1;
    }

    // Of the last site.
    void add_transfer(Hash call, double latency_s, const std::vector<std::pair<int, double>>& loads) {
        CHECK(latency_s >= 0, "a latency of {} s", latency_s);
        sites_.back().latency.push_back({call, latency_s});
        for (const auto& [link, bytes] : loads)
            if (bytes > 0) entries_.push_back({int32_t(sites_.size()) - 1, link, call, bytes});
        sites_.back().end_entry = entries_.size();
    }
    void add_transfer(const CommCall& call, const std::vector<int32_t>& members, int64_t sender) {
        const Hash hash = call_hash(call);
        for (const auto& [known, latency] : sites_.back().latency)
            if (known == hash) return;
        const Transfer transfer = model_.transfer(call, {members.begin(), members.end()}, sender);
        add_transfer(hash, transfer.latency_s, transfer.loads);
    }

    // All collectives of this rank's group in the family.
    void add_collectives(const CommCall& first, int64_t rank) {
        const int32_t group = groups(first).group_of[size_t(rank)];
        const std::vector<int32_t>& members = groups(first).members[size_t(group)];
        std::vector<std::pair<int64_t, bool>> ranks;
        for (const int32_t member : members) ranks.push_back({member, false});
        collective_at_[size_t(first.family)][size_t(group)] = add_site(mixed(Hash(first.family) + 1, Hash(0)), ranks);
        std::set<int32_t> sequences = {recording_.class_of[size_t(rank)]};
        const bool uneven = std::any_of(of(rank).calls.begin(), of(rank).calls.end(), [&](const CommCall& call) {
            return call.uneven && call.family == first.family;
        });
        if (uneven)  // their bytes may differ by rank
            for (const int32_t member : members) sequences.insert(recording_.class_of[size_t(member)]);
        for (const int32_t sequence : sequences) {
            const std::vector<CommCall>& calls = recording_.sequences[size_t(sequence)].calls;
            for (const int32_t id : used_[size_t(sequence)])
                if (const CommCall& call = calls[size_t(id)]; !call.message() && call.family == first.family)
                    add_transfer(call, members, groups(first).place[size_t(rank)]);
        }
    }

    // All messages of this kind from one rank to the other, as the sender's sequence has them.
    void add_messages(const CommCall& call, int64_t sender, int64_t receiver) {
        if (message_at(call, sender, receiver) >= 0) return;
        const std::vector<int32_t>& index = groups(call).place;
        const std::vector<int32_t>& members = groups_.members(call.family, sender);
        const int64_t n = int64_t(members.size()), by = index[size_t(receiver)] - index[size_t(sender)];
        message_at(call, sender, receiver) =
            add_site(mixed(message_kind(call), Hash((by + n) % n)),  // to the next rank and to the one before: two
                     {{sender, false}, {receiver, true}});
        for (const int32_t id : used(sender)) {
            CommCall placed = of(sender).calls[size_t(id)];
            if (placed.to < 0 || message_kind(placed) != message_kind(call) ||
                peer_rank(placed, placed.to, sender) != receiver)
                continue;
            const int64_t from = peer_rank(placed, placed.from, sender);
            placed.to = index[size_t(receiver)];
            if (from >= 0) placed.from = index[size_t(from)];
            add_transfer(placed, members, index[size_t(sender)]);
        }
    }

    // A rank's computation passes core-seconds through its own core and through its node's cores.
    void add_cores() {
        const int64_t nodes = (recording_.ranks + model_.ranks_per_node - 1) / model_.ranks_per_node;
        const int32_t first = int32_t(link_rates_.size());
        link_rates_.insert(link_rates_.end(), size_t(nodes), double(model_.cores));
        link_rates_.insert(link_rates_.end(), size_t(recording_.ranks), 1.0);
        for (int64_t rank = 0; rank < recording_.ranks; ++rank) {
            core_site_.push_back(add_site(kCores, {{rank, false}}));
            const int64_t node = rank / model_.ranks_per_node;
            add_transfer(kCores, 0, {{first + int32_t(node), 1.0}, {first + int32_t(nodes + rank), 1.0}});
        }
    }

    void color(const SimulationOptions& options) {
        const bool alone = !options.symmetry || options.jitter > 0;
        for (int64_t rank = 0; rank < recording_.ranks; ++rank) {
            const Hash color = mixed(Hash(recording_.class_of[size_t(rank)]), options.times_slower(rank));
            rank_color_.push_back(alone ? mixed(color, Hash(rank)) : color);
        }
        for (size_t link = 0; link < link_rates_.size(); ++link) {
            const Hash color = mixed(Hash(7), link_rates_[link]);
            link_color_.push_back(alone ? mixed(color, Hash(link)) : color);
        }
        // An edge of a site and a link has one label for all its calls.
        struct Edge {
            int32_t site, link;
            Hash label;
        };
        std::vector<Edge> edges;
        std::vector<Hash> initial;
        for (size_t id = 0; id < sites_.size(); ++id) {
            const Site& site = sites_[id];
            Hash color = site.kind;
            for (const auto& [call, latency] : site.latency) color += mixed(call, latency);
            initial.push_back(color);
            std::map<int32_t, Hash> labels;  // by link
            for (size_t i = site.first_entry; i < site.end_entry; ++i)
                labels[entries_[i].link] += mixed(entries_[i].call, entries_[i].bytes);
            for (const auto& [link, label] : labels) edges.push_back({int32_t(id), link, label});
        }
        site_color_ = initial;
        for (size_t before = 0;;) {
            std::vector<Hash> site = initial;
            for (size_t id = 0; id < sites_.size(); ++id)
                for (const auto& [rank, receives] : sites_[id].ranks)
                    site[id] += mixed(rank_color_[size_t(rank)], Hash(receives) + 11);
            for (const Edge& edge : edges) site[size_t(edge.site)] += mixed(edge.label, link_color_[size_t(edge.link)]);
            std::vector<Hash> link = link_color_, rank = rank_color_;
            for (Hash& color : link) color = mixed(color, Hash(1));
            for (const Edge& edge : edges) link[size_t(edge.link)] += mixed(edge.label, site[size_t(edge.site)]);
            for (Hash& color : rank) color = mixed(color, Hash(2));
            for (size_t id = 0; id < sites_.size(); ++id)
                for (const auto& [member, receives] : sites_[id].ranks)
                    rank[size_t(member)] += mixed(site[id], Hash(receives) + 13);
            const size_t classes = distinct(rank) + distinct(site) + distinct(link);
            rank_color_ = std::move(rank);
            site_color_ = std::move(site);
            link_color_ = std::move(link);
            if (classes == before) break;
            before = classes;
        }
    }

    const Recording& recording_;
    const SimulationModel& model_;
    const GroupTable groups_;
    std::vector<std::vector<int32_t>> used_;           // by sequence: those of its calls, ascending
    std::vector<std::vector<int32_t>> collective_at_;  // by family and group: a site, -1: none yet
    std::unordered_map<Hash, int32_t> message_at_;     // a site, -1: none yet
    std::vector<Site> sites_;
    std::vector<Entry> entries_;
    std::vector<double> link_rates_;
    std::vector<int32_t> core_site_;  // by rank
    std::vector<Hash> rank_color_, site_color_, link_color_;
};

}  // namespace

EqualRanks find_equal_ranks(const Recording& recording, const SimulationModel& model,
                            const SimulationOptions& options) {
    return Refinement(recording, model, options).result();
}

}  // namespace train70b
