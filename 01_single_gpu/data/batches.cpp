#include "01_single_gpu/data/batches.h"

#include <algorithm>
#include <utility>

#include "01_single_gpu/core/profile.h"
#include "01_single_gpu/data/documents.h"

namespace train70b {

void check_evaluation(const TrainOptions& options, const Dataset& data) {
    if (options.eval_every > 0 && data.validation_samples() == 0)
        usage_error("--eval-every {}: --data {} has no validation split; set --val-fraction, or use {}",
                    options.eval_every, options.data,
                    data.is_text() ? fmt::format("at least {} tokens", 20 * (options.seq_len + 1))
                                   : "a held-out source (PATH:1,HELD_OUT:0)");
}

Batches::Batches(const TrainOptions& options, const Dataset& data)
    : sizes(options.sizes()), options_(options), data_(data) {}
Batches::~Batches() = default;

RankTokens Batches::tokens(int64_t seq_len) const {
    return of_rank ? of_rank(seq_len) : RankTokens{{{0, seq_len}}, {{0, seq_len}}};
}

// ---- on the host ----------------------------------------------------------------------------------------------------

Sample Batches::sample(std::vector<int32_t> tokens, const std::vector<uint8_t>& mask) const {
    Sample s{std::move(tokens), {}};
    s.targets.assign(s.tokens.begin() + 1, s.tokens.end());
    for (size_t t = 0; t < s.targets.size(); ++t) {
        const bool masked = !mask.empty() && mask[t + 1] == 0;
        const bool ends_document = options_.mask_document_ends && s.tokens[t] == *options_.document_token;
        if (masked || ends_document) s.targets[t] = -1;
    }
    return s;
}

Sample Batches::train_sample(int64_t index) const {
    return sample(data_.sample(options_.seed, index), data_.sample_mask(options_.seed, index));
}

Batches::HostBatch Batches::prepare(const std::vector<Sample>& samples) const {
    const int64_t seq_len = int64_t(samples[0].targets.size());
    const RankTokens mine = tokens(seq_len);
    std::vector<std::vector<int32_t>> starts;  // of the documents of each sample; empty: none are marked
    if (options_.document_token)
        for (const Sample& sample : samples)
            starts.push_back(document_starts(sample.tokens, seq_len, *options_.document_token));
    HostBatch host{.sequences = int64_t(samples.size())};
    for (const auto [begin, count] : mine.computed)
        for (size_t i = 0; i < samples.size(); ++i)
            for (int64_t t = begin; t < begin + count; ++t) {
                host.tokens.push_back(samples[i].tokens[size_t(t)]);
                host.targets.push_back(samples[i].targets[size_t(t)]);
                host.positions.push_back(static_cast<int32_t>(starts.empty() ? t : t - starts[i][size_t(t)]));
                host.target_count += host.targets.back() >= 0;
            }
    if (starts.empty()) return host;
    for (const auto [begin, count] : mine.queries)
        for (const std::vector<int32_t>& sequence : starts)
            host.document_starts.insert(host.document_starts.end(), sequence.begin() + begin,
                                        sequence.begin() + begin + count);
    for (const std::vector<int32_t>& sequence : starts) host.document_pairs += document_pairs(sequence);
    return host;
}

namespace {
// Pieces of equal length; the last token of one is the first of the next.
std::vector<Sample> cut(const std::vector<Sample>& samples, int64_t seq_len) {
    std::vector<Sample> list;
    for (const Sample& sample : samples)
        for (int64_t at = 0; at < int64_t(sample.targets.size()); at += seq_len)
            list.push_back({{sample.tokens.begin() + at, sample.tokens.begin() + at + seq_len + 1},
                            {sample.targets.begin() + at, sample.targets.begin() + at + seq_len}});
    return list;
}
}  // namespace

Batches::HostBatch Batches::prepare(int64_t dp_rank, int64_t dp_size, int64_t step, int64_t index) const {
    std::vector<Sample> samples;
    const int64_t first = sizes.first_sample(step) + (index * dp_size + dp_rank) * options_.micro_batch;
    for (int64_t i = 0; i < options_.micro_batch; ++i) samples.push_back(train_sample(first + i));
    return prepare(sizes.pieces(step) > 1 ? cut(samples, sizes.seq_len(step)) : samples);
}

Batches::HostStep Batches::prepare_step(int64_t dp_rank, int64_t dp_size, int64_t step) const {
    HostStep micro_batches;
    for (int64_t index = 0; index < count(dp_size, step); ++index)
        micro_batches.push_back(prepare(dp_rank, dp_size, step, index));
    return micro_batches;
}

// The thread reads files and fills vectors: it makes no MPI call, computes no op, and books no memory.
void Batches::start_reading(const Group& dp, int64_t first, int64_t last) {
    reader_.reset();
    if (first > last) return;
    reader_ = std::make_unique<Prefetch<HostStep>>(
        first, last, kAhead,
        [this, rank = dp.rank(), size = dp.size()](int64_t step) { return prepare_step(rank, size, step); });
}

void Batches::stop_reading() { reader_.reset(); }

std::vector<Sample> Batches::samples(int64_t step) const {
    std::vector<Sample> list;
    for (int64_t i = 0; i < sizes.samples(step); ++i) list.push_back(train_sample(sizes.first_sample(step) + i));
    return list;
}

// ---- on the device --------------------------------------------------------------------------------------------------

Batch Batches::upload(const HostBatch& host, double loss_scale) const {
    const int64_t rows = int64_t(host.tokens.size());
    const Device device = options_.llama().device;
    const auto on_device = [&](const std::vector<int32_t>& values) { return train70b::upload(values, {rows}, device); };
    Batch batch{host.sequences,          rows / host.sequences,     on_device(host.tokens),
                on_device(host.targets), on_device(host.positions), loss_scale};
    if (host.document_starts.empty()) return batch;
    batch.document_starts = DocumentStarts(host.document_starts, device);
    batch.document_pairs = host.document_pairs;
    return batch;
}

// tag::counts[]
double Batches::begin_step(const Group& dp, const Group& dp_cp, int64_t step) {
    counted_step_ = step;
    step_targets_ = double(sizes.tokens(step));
    if (!ignores_targets()) return step_targets_;
    const double begin = now_seconds();
    const bool prepared = reader_ && reader_->has(step);
    const HostStep mine = prepared ? HostStep() : prepare_step(dp.rank(), dp.size(), step);
    double targets = 0;
    for (const HostBatch& host : prepared ? reader_->get(step) : mine) targets += double(host.target_count);
    seconds_ += now_seconds() - begin;
    return step_targets_ = dp_cp.sum(targets);
}
// end::counts[]

Batch Batches::micro_batch(const Group& dp, int64_t step, int64_t index) {
    CHECK(counted_step_ == step || !ignores_targets(), "step {}: its targets have not been counted", step);
    const double begin = now_seconds();
    const double targets = counted_step_ == step ? step_targets_ : double(sizes.tokens(step));
    const double loss_scale = targets > 0 ? 1.0 / targets : 0.0;
    Batch batch = reader_ && reader_->has(step) ? upload(reader_->get(step)[size_t(index)], loss_scale)
                                                : upload(prepare(dp.rank(), dp.size(), step, index), loss_scale);
    seconds_ += now_seconds() - begin;
    return batch;
}

// ---- evaluation -----------------------------------------------------------------------------------------------------

int64_t Batches::validation_rounds(const Group& dp, size_t part) const {
    const int64_t round = options_.micro_batch * dp.size();
    return (data_.parts()[part].source->validation_samples() + round - 1) / round;
}

double Batches::validation_tokens(size_t part) const {
    return double(data_.parts()[part].source->validation_samples()) * double(options_.seq_len);
}

Batch Batches::validation_batch(const Group& dp, size_t part, int64_t round, int64_t& targets) const {
    const int64_t samples = data_.parts()[part].source->validation_samples();
    const int64_t begin = (round * dp.size() + dp.rank()) * options_.micro_batch;
    const int64_t count = std::clamp<int64_t>(samples - begin, 0, options_.micro_batch);
    std::vector<Sample> mine;
    for (int64_t i = 0; i < std::max<int64_t>(count, 1); ++i) {
        const int64_t index = count > 0 ? begin + i : 0;
        mine.push_back(sample(data_.validation_sample(part, index), data_.validation_mask(part, index)));
    }
    const HostBatch host = prepare(mine);
    if (count > 0) targets += host.target_count;
    return upload(host, count > 0 ? 1.0 / validation_tokens(part) : 0.0);
}

Batch Batches::of_one(const std::vector<int32_t>& tokens) const { return upload(prepare({sample(tokens, {})}), 0); }

}  // namespace train70b
