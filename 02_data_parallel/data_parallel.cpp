#include "02_data_parallel/data_parallel.h"

namespace train70b {

void add_data_parallel_flags(Flags& flags, int64_t& dp, DataParallelOptions& o) {
    flags.group("Communication");
    flags.add("--dp", dp, "data-parallel ranks [what the ranks leave]", whole_number_from(1)).default_text("");
    flags.add("--bucket-mb", o.bucket_mb, "MiB of gradients per all-reduce; 0: each parameter by itself",
              real_number(0, 1e6));
    flags.add_switch("--overlap", o.overlap, "reduce gradients behind the backward pass");
}

DataParallel::DataParallel(Llama& model, const Comm& ranks, const DataParallelOptions& options)
    : model_(model), ranks_(ranks), options_(options) {
    units_ = model.units();
    std::reverse(units_.begin(), units_.end());
    passes_.resize(units_.size());
    for (size_t i = 0; i < units_.size(); ++i) {
        unit_end_.push_back((i ? unit_end_[i - 1] : 0) + total_size(units_[i]->params));
        // Recorded before the unit's forward pass: runs after its backward pass.
        units_[i]->around.insert(units_[i]->around.begin(),
                                 [this, i](Tape& tape, const Var& x, const Unit::Body& body) {
                                     tape.record_weights([this, i] { unit_is_ready(i); });
                                     return body(tape, x);
                                 });
    }
    model.allocate_grads = [this] { allocate(); };
}

void DataParallel::allocate() {
    CHECK(unit_end_.back() == total_size(model_.params()), "the model was narrowed after this was made");
    flat_ = Tensor({unit_end_.back()}, model_.options.grad_dtype, model_.options.device, Memory::grads);
    for (size_t i = 0; i < units_.size(); ++i) {
        const int64_t begin = i ? unit_end_[i - 1] : 0;
        bind_grads(units_[i]->params, flat_.element_slice(begin, {unit_end_[i] - begin}));
    }
    use(options_);
}

void DataParallel::use(const DataParallelOptions& options) {
    CHECK(under_way_.empty() && sent_ == 0, "in the middle of a step");
    options_ = options;
    buckets_.clear();
    if (options.bucket_mb > 0) {
        // Multiples of 64 elements, so that each begins aligned.
        const int64_t length =
            std::max<int64_t>(64, int64_t(options.bucket_mb * (1 << 20)) / size_of(flat_.dtype()) / 64 * 64);
        for (int64_t begin = 0; begin < flat_.size(); begin += length)
            buckets_.push_back({begin, std::min(begin + length, flat_.size())});
        return;
    }
    int64_t begin = 0;
    for (const Unit* unit : units_)
        for (const Param* param : unit->params) {
            buckets_.push_back({begin, begin + param->local.size()});
            begin = buckets_.back().end;
        }
}

void DataParallel::unit_is_ready(size_t number) {
    if (++passes_[number] < options_.micro_batches) return;
    CHECK(number == ready_units_, "{} was to be complete before {}", units_[ready_units_]->name, units_[number]->name);
    ++ready_units_;
    if (options_.overlap) send_ready_buckets();
}

void DataParallel::send_ready_buckets() {
    const int64_t mark = ready_units_ ? unit_end_[ready_units_ - 1] : 0;
    for (; sent_ < buckets_.size() && buckets_[sent_].end <= mark; ++sent_) {
        const Stretch& bucket = buckets_[sent_];
        under_way_.push_back(ranks_.all_reduce(flat_.element_slice(bucket.begin, {bucket.end - bucket.begin})));
    }
}

void DataParallel::finish() {
    CHECK(ready_units_ == units_.size(), "{} of {} units are complete: not all {} micro-batches have been computed",
          ready_units_, units_.size(), options_.micro_batches);
    send_ready_buckets();
    for (Work& work : under_way_) work.wait();
    under_way_.clear();
    std::fill(passes_.begin(), passes_.end(), 0);
    ready_units_ = sent_ = 0;
}

void DataParallel::attach(Trainer& trainer) {
    CHECK(!trainer.reduce_gradients, "what builds on data parallelism is attached after it");
    trainer.data_rank = ranks_.rank();
    trainer.data_ranks = ranks_.size();
    trainer.reduce_gradients = [this] { finish(); };
    trainer.sum_over_ranks = [this](double x) { return ranks_.sum(x); };
}

}  // namespace train70b
