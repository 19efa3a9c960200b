#include "03_zero/complete/matrix_owners.h"

#include <algorithm>
#include <array>
#include <bit>

namespace train70b {

// The first matrix, without elements. The key is shortened: exact in a double.
static MatrixOwners::Part first_of(const Param& param) {
    return {param.key(0) >> 11, 0, param.matrix_rows(), param.global_shape[1], param.local.cols};
}

std::vector<MatrixOwners::Part> MatrixOwners::parts_of(const Segment& segment) {
    const Rect local = segment.param->real();
    Part part = first_of(*segment.param);
    const int64_t slab = part.rows * part.width, end = std::min(segment.offset + segment.grad.size(), local.size());
    std::vector<Part> list;
    for (int64_t at = segment.offset; at < end; at += part.size) {
        const int64_t in_stack = local.row_begin * part.width + at, in_slab = in_stack % slab;
        part.matrix = in_stack / slab;
        part.begin = local.col_begin * part.rows + in_slab;
        part.size = std::min(end - at, slab - in_slab);
        list.push_back(part);
    }
    return list;
}

std::vector<MatrixOwners::Holders> MatrixOwners::plan(const std::vector<std::vector<Part>>& of_ranks) {
    std::map<Part, std::vector<int>> holders;  // of copies: only equal parts overlap
    for (size_t rank = 0; rank < of_ranks.size(); ++rank)
        for (const Part& part : of_ranks[rank]) holders[part].push_back(int(rank));
    std::vector<Holders> parts;
    std::map<decltype(Part().whole()), int> owners;
    for (const auto& [part, ranks] : holders) {
        parts.push_back({part, ranks});
        owners[part.whole()] = 0;
    }
    std::vector<std::pair<double, int*>> costs;  // FLOPs, and where the owner's number goes
    for (auto& [whole, owner] : owners)
        costs.emplace_back(newton_schulz_flops(std::get<2>(whole), std::get<3>(whole)), &owner);
    std::stable_sort(costs.begin(), costs.end(), [](const auto& a, const auto& b) { return a.first > b.first; });
    std::vector<double> load(of_ranks.size());
    for (const auto& [flops, owner] : costs) {
        const auto least = std::min_element(load.begin(), load.end());
        *owner = int(least - load.begin());
        *least += flops;
    }
    for (Holders& part : parts) {
        part.owner = owners[part.part.whole()];
        part.from = std::count(part.ranks.begin(), part.ranks.end(), part.owner) ? part.owner : part.ranks[0];
    }
    return parts;
}

std::vector<MatrixOwners::Part> MatrixOwners::parts_of_others() const {
    std::vector<Part> list;
    for (const Param* param : model_.params()) {
        if (!takes_muon(*param)) continue;
        const int64_t rows = param->matrix_rows();
        const int64_t first = param->local.row_begin / rows;  // of a stack, of which each rank has as many
        const int64_t count = std::min(param->matrices, std::max<int64_t>(param->local.rows / rows, 1) * ranks_.size());
        for (int64_t i = 0; i < count; ++i) {
            Part next = first_of(*param);
            next.matrix = (first + i) % param->matrices;
            const auto until = [&](int64_t end) {
                next.size = end - next.begin;
                if (next.size > 0) list.push_back(next);
            };
            for (auto own = mine_.lower_bound(next); own != mine_.end() && own->first.whole() == next.whole(); ++own) {
                until(own->first.begin);
                next.begin = own->first.begin + own->first.size;
            }
            until(next.rows * next.cols);
        }
    }
    return list;
}

void MatrixOwners::agree() {
    using Numbers = std::array<int64_t, sizeof(Part) / sizeof(int64_t)>;  // of a Part, each exact in a double
    std::vector<double> own;
    for (const Segment& segment : segments_) {
        int64_t at = 0;
        for (const Part& part : parts_of(segment)) {
            mine_[part] = segment.grad.element_slice(at, {part.size});
            at += part.size;
            const auto numbers = std::bit_cast<Numbers>(part);
            own.insert(own.end(), numbers.begin(), numbers.end());
        }
    }
    std::vector<std::vector<Part>> of_ranks(size_t(ranks_.size()));
    if (!ranks_.has_peers()) {  // simulated: the next rank holds all that this one does not
        for (const auto& [part, values] : mine_) of_ranks[size_t(ranks_.rank())].push_back(part);
        of_ranks[size_t((ranks_.rank() + 1) % ranks_.size())] = parts_of_others();
        parts_ = plan(of_ranks);
        return;
    }
    own.resize(size_t(ranks_.max(double(own.size()))), 0);
    const std::vector<double> all = ranks_.gather(own);
    Numbers numbers;
    for (size_t at = 0; at < all.size(); at += numbers.size()) {
        std::copy_n(all.begin() + int64_t(at), numbers.size(), numbers.begin());
        const Part part = std::bit_cast<Part>(numbers);
        if (part.size > 0) of_ranks[at / own.size()].push_back(part);
    }
    parts_ = plan(of_ranks);
    std::map<decltype(Part().whole()), int64_t> missing;
    for (const Holders& holders : parts_) {
        const Part& part = holders.part;
        missing.try_emplace(part.whole(), part.rows * part.cols).first->second -= part.size;
    }
    for (const auto& [whole, elements] : missing)
        CHECK(elements == 0, "a matrix of {} x {}: {} elements too few", std::get<2>(whole), std::get<3>(whole),
              elements);
}

// Of each part: from one holder to its owner, or back to all that hold it.
void MatrixOwners::exchange(const std::vector<Tensor>& at_owner, bool back) {
    const size_t ranks = size_t(ranks_.size());
    std::vector<std::vector<Tensor>> out(ranks), in(ranks);
    for (size_t i = 0; i < parts_.size(); ++i) {
        const auto& [part, holders, owner, from] = parts_[i];
        for (const int holder : holders) {
            if (!back && holder != from) continue;
            if (owner == ranks_.rank()) (back ? out : in)[size_t(holder)].push_back(at_owner[i]);
            if (holder == ranks_.rank()) (back ? in : out)[size_t(owner)].push_back(mine_.at(part));
        }
    }
    const auto counts = [](const std::vector<std::vector<Tensor>>& of_ranks) {
        std::vector<int64_t> list;
        for (const std::vector<Tensor>& tensors : of_ranks) list.push_back(total_size(tensors));
        return list;
    };
    const auto joined = [](const std::vector<std::vector<Tensor>>& of_ranks) {
        std::vector<Tensor> all;
        for (const std::vector<Tensor>& tensors : of_ranks) all.insert(all.end(), tensors.begin(), tensors.end());
        return all;
    };
    const auto message = [&](const std::vector<Tensor>& parts) {
        return Tensor({total_size(parts)}, model_.options.dtype, model_.options.device, Memory::workspace);
    };
    const std::vector<Tensor> sent = joined(out), received = joined(in);
    const Tensor sending = message(sent), receiving = message(received);
    copy_to_flat(sending, sent);
    ranks_.all_to_all(receiving, counts(in), sending, counts(out)).wait();
    copy_from_flat(received, receiving);
}

void MatrixOwners::orthogonalize() {
    if (ranks_.size() == 1) return Orthogonalizer::orthogonalize();
    if (parts_.empty()) agree();
    struct Owned {
        Part part;
        Tensor slabs;
    };
    std::vector<Owned> owned;
    std::vector<Tensor> at_owner(parts_.size());
    for (size_t i = 0; i < parts_.size(); ++i) {
        const auto& [part, holders, owner, from] = parts_[i];
        if (owner != ranks_.rank()) continue;
        if (owned.empty() || owned.back().part.whole() != part.whole()) {
            owned.push_back({part, Tensor({part.rows * part.cols}, model_.options.dtype, model_.options.device,
                                          Memory::workspace)});
        }
        at_owner[i] = owned.back().slabs.element_slice(part.begin, {part.size});
    }
    exchange(at_owner, false);
    for (auto& [part, slabs] : owned) {
        const int64_t count = part.cols / part.width;
        Tensor u({part.rows, part.cols}, model_.options.dtype, model_.options.device, Memory::workspace);
        swap_blocks(u, slabs, count, part.rows);
        swap_blocks(slabs, orthogonalized(u, u.dtype()), part.rows, count);
    }
    exchange(at_owner, true);
}

}  // namespace train70b
