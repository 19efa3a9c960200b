#include "01_single_gpu/complete/data/batches.h"

#include <algorithm>
#include <iterator>

#include "01_single_gpu/core/profile.h"

namespace train70b {

// ---- on the host ----------------------------------------------------------------------------------------------------

Sample Batches::without_document_ends(Sample sample) const {
    for (size_t t = 0; options_.mask_document_ends && t < sample.targets.size(); ++t)
        if (sample.tokens[t] == *options_.document_token) sample.targets[t] = -1;
    return sample;
}

// Appends pieces of equal length; the last token of one is the first of the next.
static void cut(const Sample& sample, int64_t seq_len, std::vector<Sample>& list) {
    for (int64_t at = 0; at < int64_t(sample.targets.size()); at += seq_len)
        list.push_back({{sample.tokens.begin() + at, sample.tokens.begin() + at + seq_len + 1},
                        {sample.targets.begin() + at, sample.targets.begin() + at + seq_len}});
}

std::vector<Sample> Batches::rank_samples(int64_t dp_rank, int64_t dp_size, int64_t step, int64_t index) const {
    const int64_t first = sizes_->first_sample(step) + (index * dp_size + dp_rank) * options_.micro_batch;
    std::vector<Sample> list;
    for (int64_t i = 0; i < options_.micro_batch; ++i) cut(train_sample(first + i), sizes_->seq_len(step), list);
    return list;
}

std::vector<Sample> Batches::rank_samples(int64_t dp_rank, int64_t dp_size, int64_t step) const {
    std::vector<Sample> list;
    for (int64_t index = 0; index < count(dp_rank, dp_size, step); ++index)
        std::ranges::move(rank_samples(dp_rank, dp_size, step, index), std::back_inserter(list));
    return list;
}

int64_t Batches::target_count(std::span<const Sample> samples) const {
    int64_t targets = 0;
    for (const auto [begin, count] : tokens(int64_t(samples[0].targets.size())).computed)
        for (const Sample& sample : samples)
            targets += std::count_if(sample.targets.begin() + begin, sample.targets.begin() + begin + count,
                                     [](int32_t target) { return target >= 0; });
    return targets;
}

// ---- on the device --------------------------------------------------------------------------------------------------

Batch Batches::upload(std::span<const Sample> samples, double loss_scale, double sequence_scale,
                      bool sorts_rows) const {
    const int64_t seq_len = int64_t(samples[0].targets.size());
    const RankTokens local = tokens(seq_len);
    std::vector<std::vector<int32_t>> starts;  // of the documents of each sample; empty: none are marked
    if (options_.document_token)
        for (const Sample& sample : samples)
            starts.push_back(document_starts(sample.tokens, seq_len, *options_.document_token));
    const LlamaConfig& model = options_.model;
    std::vector<std::vector<int32_t>> windows;  // the first key inside the window and the document
    for (size_t i = 0; i < samples.size() && model.hides_keys(seq_len); ++i)
        windows.push_back(
            window_starts(starts.empty() ? std::vector<int32_t>(size_t(seq_len)) : starts[i], model.window));
    std::vector<int32_t> token, target, position;  // of each row
    for (const auto [begin, count] : local.computed)
        for (size_t i = 0; i < samples.size(); ++i)
            for (int64_t t = begin; t < begin + count; ++t) {
                token.push_back(samples[i].tokens[size_t(t)]);
                target.push_back(samples[i].targets[size_t(t)]);
                position.push_back(static_cast<int32_t>(starts.empty() ? t : t - starts[i][size_t(t)]));
            }
    const int64_t rows = int64_t(token.size()), sequences = int64_t(samples.size());
    const Device device = options_.llama().device;
    const auto on_device = [&](const std::vector<int32_t>& values) { return train70b::upload(values, {rows}, device); };
    Batch batch{sequences, rows / sequences, on_device(token), on_device(target), on_device(position), loss_scale};
    batch.whole_len = seq_len;
    if (model.multi_token && sequence_scale > 0) {
        std::vector<int32_t> next, aim;  // -1 behind the sequence, and where documents are not to be crossed
        const auto ends = [this](int32_t token) {
            return options_.mask_document_ends && token == options_.document_token;
        };
        for (const auto [begin, count] : local.computed)
            for (const Sample& sample : samples)
                for (size_t t = size_t(begin); t < size_t(begin + count); ++t) {
                    const bool has_aim = t + 1 < size_t(seq_len) && !ends(sample.tokens[t]);
                    next.push_back(sample.tokens[t + 1]);
                    aim.push_back(has_aim ? sample.targets[t + 1] : -1);
                }
        batch.next_tokens = on_device(next);
        batch.next_targets = on_device(aim);
        if (device == Device::cuda)
            batch.next_order = train70b::upload(rows_by_token(next), {rows}, device, Memory::workspace);
    }
    batch.sequence_scale = sequence_scale;
    if (sorts_rows) batch.order = train70b::upload(rows_by_token(token), {rows}, device, Memory::workspace);
    const auto of_queries = [&](const std::vector<std::vector<int32_t>>& of_samples) {
        std::vector<int32_t> list;
        for (const auto [begin, count] : local.queries)
            for (const std::vector<int32_t>& sequence : of_samples)
                list.insert(list.end(), sequence.begin() + begin, sequence.begin() + begin + count);
        return DocumentStarts(list, device);
    };
    if (!windows.empty()) batch.window_starts = of_queries(windows);
    if (starts.empty()) return batch;
    batch.document_starts = of_queries(starts);
    const double share = windows.empty() ? 0 : model.window_share();
    for (size_t i = 0; i < samples.size(); ++i) {
        batch.document_pairs += (1 - share) * train70b::document_pairs(starts[i]);
        if (share > 0) batch.document_pairs += share * train70b::document_pairs(windows[i]);
    }
    return batch;
}

// tag::counts[]
const double& Batches::begin_step(const Group& dp, const Group& dp_cp, int64_t step) {
    counted_step_ = step;
    document_pairs_.clear();
    step_targets_ = double(sizes_->tokens(step));
    if (!ignores_targets()) return step_targets_;
    const double begin = now_seconds();
    const bool is_read = reader_ && reader_->has(step);
    const int64_t local = target_count(is_read ? reader_->get(step) : rank_samples(dp.rank(), dp.size(), step));
    seconds_ += now_seconds() - begin;
    return step_targets_ = dp_cp.sum(double(local));
}
// end::counts[]

Batch Batches::micro_batch(const Group& dp, int64_t step, int64_t index) {
    CHECK(counted_step_ == step || !ignores_targets(), "step {}: its targets have not been counted", step);
    const double begin = now_seconds();
    const double targets = counted_step_ == step ? step_targets_ : double(sizes_->tokens(step));
    const double loss_scale = targets > 0 ? 1.0 / targets : 0.0;
    const auto size = size_t(options_.micro_batch * sizes_->pieces(step));
    const double sequence_scale = 1.0 / double(sizes_->sequences(step));
    Batch batch = reader_ && reader_->has(step)
                      ? upload(std::span(reader_->get(step)).subspan(size_t(index) * size, size), loss_scale,
                               sequence_scale, sorts_rows)
                      : upload(rank_samples(dp.rank(), dp.size(), step, index), loss_scale, sequence_scale, sorts_rows);
    document_pairs_[index] = batch.document_pairs;
    seconds_ += now_seconds() - begin;
    return batch;
}

// ---- evaluation -----------------------------------------------------------------------------------------------------

Batch Batches::validation_batch(const Group& dp, size_t part, int64_t round, int64_t& targets) const {
    const int64_t samples = data_.parts()[part].source->validation_samples();
    const int64_t begin = (round * dp.size() + dp.rank()) * options_.micro_batch;
    const int64_t count = std::clamp<int64_t>(samples - begin, 0, options_.micro_batch);
    std::vector<Sample> local;
    for (int64_t i = 0; i < std::max<int64_t>(count, 1); ++i) {
        const int64_t index = count > 0 ? begin + i : 0;
        local.push_back(without_document_ends(data_.validation_sample(part, index)));
    }
    if (count > 0) targets += target_count(local);
    return upload(local, count > 0 ? 1.0 / validation_tokens(part) : 0.0);
}

}  // namespace train70b
