#include "01_single_gpu/batches.h"

#include <algorithm>
#include <utility>

#include "01_single_gpu/core/profile.h"
#include "01_single_gpu/documents.h"

namespace train70b {

Batches::Batches(const TrainOptions& options, const Dataset& data) : options_(options), data_(data) {}

Batch Batches::make(const std::vector<std::vector<int32_t>>& samples, double target_tokens) const {
    const std::vector<TokenRange> ranges = tokens.empty() ? std::vector<TokenRange>{{0, options_.seq_len}} : tokens;
    std::vector<std::vector<int32_t>> starts;  // of the documents of each sample; empty: none are marked
    if (options_.document_token)
        for (const std::vector<int32_t>& sample : samples)
            starts.push_back(document_starts(sample, options_.seq_len, *options_.document_token));
    std::vector<int32_t> inputs, targets, positions;
    for (const auto [begin, count] : ranges)
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
    if (!starts.empty()) add_documents(batch, starts, queries.empty() ? ranges : queries);
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
    const int64_t first = (step - 1) * options_.global_batch + (index * dp.size() + dp.rank()) * options_.micro_batch;
    for (int64_t i = 0; i < options_.micro_batch; ++i) samples.push_back(data_.sample(options_.seed, first + i));
    Batch batch = make(samples, double(options_.global_batch) * double(options_.seq_len));
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

std::vector<std::vector<int32_t>> Batches::samples(int64_t step) const {
    std::vector<std::vector<int32_t>> list;
    for (int64_t i = 0; i < options_.global_batch; ++i)
        list.push_back(data_.sample(options_.seed, (step - 1) * options_.global_batch + i));
    return list;
}

}  // namespace train70b
