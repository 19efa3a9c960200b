#include "02_data_parallel/complete/data_parallel.h"

#include "02_data_parallel/runtime/comm_roles.h"

namespace train70b {

void add_data_parallel_flags(Flags& flags, int64_t& dp, DataParallelOptions& o) {
    flags.group("Communication");
    flags.add("--dp", dp, "data-parallel ranks [default: all ranks / ranks per model copy]", integer_from(1))
        .default_text("");
    flags.add("--bucket-mb", o.bucket_mb, "bucket size of gradient all-reduces, MiB; 0: one per parameter",
              real_number(0, 1e6));
    flags.add_switch("--overlap", o.overlap, "overlap gradient reduction with the backward pass");
}

DataParallel::DataParallel(Llama& model, const Comm& ranks, const DataParallelOptions& options,
                           MakeOptimizer make_optimizer)
    : LocalStore(model, std::move(make_optimizer)), ranks_(ranks), options_(options) {
    units_ = model.units();
    std::reverse(units_.begin(), units_.end());
    runs_.resize(units_.size());
    passes_.resize(units_.size());
    for (size_t i = 0; i < units_.size(); ++i)
        unit_end_.push_back((i ? unit_end_[i - 1] : 0) + total_size(units_[i]->params));
    for (Unit* unit : model.units_run()) {
        Unit* const owner = unit->owner ? unit->owner : unit;
        const size_t i = size_t(std::find(units_.begin(), units_.end(), owner) - units_.begin());
        ++runs_[i];
        // Recorded before the unit's forward pass: runs after its backward pass.
        unit->wrappers.insert(unit->wrappers.begin(), [this, i](Tape& tape, const Var& x, const Unit::Body& body) {
            tape.record_wgrad([this, i] { unit_ready(i); });
            return body(tape, x);
        });
    }
}

void DataParallel::allocate(uint64_t seed) {
    model_.allocate_params(seed);
    CHECK(unit_end_.back() == total_size(model_.params()), "the model was narrowed after this was made");
    flat_ = Tensor({unit_end_.back()}, model_.options.grad_dtype, model_.options.device, Memory::grads);
    for (size_t i = 0; i < units_.size(); ++i) {
        const int64_t begin = i ? unit_end_[i - 1] : 0;
        bind_grads(units_[i]->params, flat_.element_slice(begin, {unit_end_[i] - begin}));
    }
    model_.zero_grads();
    divide_into_buckets();
}

void DataParallel::divide_into_buckets() {
    buckets_.clear();
    if (options_.bucket_mb > 0) {
        // Multiples of 64 elements, so that each begins aligned.
        const int64_t length =
            std::max<int64_t>(64, int64_t(options_.bucket_mb * (1 << 20)) / size_of(flat_.dtype()) / 64 * 64);
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

void DataParallel::begin_step(int64_t micro_batches) {
    LocalStore::begin_step(micro_batches);
    micro_batches_ = micro_batches;
}

void DataParallel::unit_ready(size_t number) {
    // tag::lab-overlapped-buckets-ready[]
    if (++passes_[number] < micro_batches_ * runs_[number]) return;
    // In the order of the buffer; a pipeline of several chunks per rank may complete them in another one.
    while (ready_units_ < units_.size() && passes_[ready_units_] == micro_batches_ * runs_[ready_units_])
        ++ready_units_;
    if (options_.overlap) reduce_ready_buckets();
    // end::lab-overlapped-buckets-ready[]
}

void DataParallel::reduce_ready_buckets() {
    // tag::lab-overlapped-buckets-reduce[]
    const int64_t complete = ready_units_ ? unit_end_[ready_units_ - 1] : 0;
    for (; reduced_ < buckets_.size() && buckets_[reduced_].end <= complete; ++reduced_) {
        const Bucket& bucket = buckets_[reduced_];
        in_flight_.push_back(ranks_.all_reduce(flat_.element_slice(bucket.begin, {bucket.end - bucket.begin})));
    }
    // end::lab-overlapped-buckets-reduce[]
}

double DataParallel::matrix_squares() const { return ranks_.rank() > 0 ? 0 : LocalStore::matrix_squares(); }

GroupPtr DataParallel::state_replicas(const Param&) const { return group_of(ranks_); }

void DataParallel::finish_gradients() {
    // tag::lab-overlapped-buckets-finish[]
    CHECK(ready_units_ == units_.size(), "{} of {} units are complete: not all {} micro-batches have been computed",
          ready_units_, units_.size(), micro_batches_);
    reduce_ready_buckets();
    for (Work& work : in_flight_) work.wait();
    in_flight_.clear();
    std::fill(passes_.begin(), passes_.end(), 0);
    ready_units_ = reduced_ = 0;
    // end::lab-overlapped-buckets-finish[]
}

}  // namespace train70b
