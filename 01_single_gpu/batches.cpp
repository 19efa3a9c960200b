#include "01_single_gpu/batches.h"

#include <algorithm>
#include <utility>

#include "01_single_gpu/core/profile.h"
#include "01_single_gpu/documents.h"

namespace train70b {

Batches::Batches(const TrainOptions& options, const Dataset& data)
    : sizes(options.sizes()), options_(options), data_(data) {}

int64_t Batches::count(const Group& dp, int64_t step) const {
    return sizes.samples(step) / (options_.micro_batch * dp.size());
}

RankTokens Batches::tokens(int64_t seq_len) const {
    return of_rank ? of_rank(seq_len) : RankTokens{{{0, seq_len}}, {{0, seq_len}}};
}

namespace {
// Pieces of equal length; the last token of one is the first of the next.
std::vector<std::vector<int32_t>> cut(const std::vector<std::vector<int32_t>>& samples, int64_t seq_len) {
    std::vector<std::vector<int32_t>> list;
    for (const std::vector<int32_t>& sample : samples)
        for (auto at = sample.begin(); at + 1 != sample.end(); at += seq_len) list.emplace_back(at, at + seq_len + 1);
    return list;
}
}  // namespace

Batch Batches::make(const std::vector<std::vector<int32_t>>& samples, double target_tokens) const {
    const int64_t seq_len = int64_t(samples[0].size()) - 1;
    const RankTokens mine = tokens(seq_len);
    std::vector<std::vector<int32_t>> starts;  // of the documents of each sample; empty: none are marked
    if (options_.document_token)
        for (const std::vector<int32_t>& sample : samples)
            starts.push_back(document_starts(sample, seq_len, *options_.document_token));
    std::vector<int32_t> inputs, targets, positions;
    for (const auto [begin, count] : mine.computed)
        for (size_t i = 0; i < samples.size(); ++i)
            for (int64_t t = begin; t < begin + count; ++t) {
                inputs.push_back(samples[i][size_t(t)]);
                targets.push_back(samples[i][size_t(t) + 1]);
                positions.push_back(static_cast<int32_t>(starts.empty() ? t : t - starts[i][size_t(t)]));
            }
    const int64_t sequences = int64_t(samples.size()), rows = int64_t(inputs.size());
    const auto on_device = [&, device = options_.llama().device](const std::vector<int32_t>& values) {
        return upload(values, {rows}, device);
    };
    Batch batch{sequences,          rows / sequences,     on_device(inputs),
                on_device(targets), on_device(positions), 1.0 / target_tokens};
    if (!starts.empty()) add_documents(batch, starts, mine.queries);
    return batch;
}

void Batches::add_documents(Batch& batch, const std::vector<std::vector<int32_t>>& starts,
                            const std::vector<TokenRange>& ranges) const {
    std::vector<int32_t> rows;
    for (const auto [begin, count] : ranges)
        for (const std::vector<int32_t>& sequence : starts)
            rows.insert(rows.end(), sequence.begin() + begin, sequence.begin() + begin + count);
    batch.document_starts = DocumentStarts(rows, batch.tokens.device());
    for (const std::vector<int32_t>& sequence : starts) batch.document_pairs += document_pairs(sequence);
}

Batch Batches::micro_batch(const Group& dp, int64_t step, int64_t index) {
    const double begin = now_seconds();
    std::vector<std::vector<int32_t>> samples;
    const int64_t first = sizes.first_sample(step) + (index * dp.size() + dp.rank()) * options_.micro_batch;
    for (int64_t i = 0; i < options_.micro_batch; ++i) samples.push_back(data_.sample(options_.seed, first + i));
    if (sizes.pieces(step) > 1) samples = cut(samples, sizes.seq_len(step));
    Batch batch = make(samples, double(sizes.tokens(step)));
    seconds_ += now_seconds() - begin;
    return batch;
}

int64_t Batches::validation_rounds(const Group& dp) const {
    const int64_t round = options_.micro_batch * dp.size();
    return (data_.validation_samples() + round - 1) / round;
}

Batch Batches::validation_batch(const Group& dp, int64_t round) const {
    const int64_t samples = data_.validation_samples();
    const int64_t begin = (round * dp.size() + dp.rank()) * options_.micro_batch;
    const int64_t count = std::clamp<int64_t>(samples - begin, 0, options_.micro_batch);
    std::vector<std::vector<int32_t>> part;
    for (int64_t i = 0; i < count; ++i) part.push_back(data_.validation_sample(begin + i));
    if (part.empty()) part.push_back(data_.validation_sample(0));
    Batch batch = make(part, double(samples) * double(options_.seq_len));
    if (count == 0) batch.loss_scale = 0;
    return batch;
}

Batch Batches::of_one(const std::vector<int32_t>& tokens) const {
    Batch batch = make({tokens}, 1);
    batch.loss_scale = 0;
    return batch;
}

std::vector<std::vector<int32_t>> Batches::samples(int64_t step) const {
    std::vector<std::vector<int32_t>> list;
    for (int64_t i = 0; i < sizes.samples(step); ++i)
        list.push_back(data_.sample(options_.seed, sizes.first_sample(step) + i));
    return list;
}

}  // namespace train70b
