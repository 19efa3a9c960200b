#include "01_single_gpu/complete/trainer.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "01_single_gpu/complete/muon.h"
#include "01_single_gpu/complete/non_finite.h"
#include "01_single_gpu/core/say.h"

namespace train70b {

namespace {

bool is_finite(const StepReport& r) { return std::isfinite(r.loss) && std::isfinite(r.grad_norm); }

// --skip-step, which the report says.
bool skips(const TrainOptions& o, const SkipStep& rule, StepReport& report) {
    return o.skip_step && *(report.skipped = rule.skips(report));
}

// sums: as Llama::loss_numbers() has them, times the loss scale.
void add_losses(StepReport& report, const Llama& model, const std::vector<double>& sums, double scale) {
    report.loss = sums[0] / scale;
    if (model.loss_options.z_loss > 0) report.z_loss = sums[1] / scale;
    if (model.config.multi_token) report.multi_token_loss = sums.back() / scale;
}

// The ranks that update together have the same norm. Others may not: a fault in one copy of the model.
void compare_ranks(StepReport& report, Trainer& trainer, double my_loss) {
    const Groups peers = trainer.runtime->has_peers() ? trainer.groups : Groups();
    const bool documents = trainer.options.document_token.has_value();
    std::vector<double> local = {report.step_s, report.waited_s, is_finite(report) || report.overflowed ? 1.0 : 0.0};
    if (documents) local.push_back(trainer.batches.document_pairs());
    const std::vector<double> all = gather(peers, local);
    std::vector<double> step_s, waited_s;
    double pairs = 0;
    bool finite = true;
    for (size_t i = 0; i < all.size(); i += local.size()) {
        step_s.push_back(all[i]);
        waited_s.push_back(all[i + 1]);
        finite = finite && all[i + 2] == 1;
        if (documents) pairs += all[i + 3];
    }
    // Every rank counts its sequences whole: those of one data-parallel rank are counted once by each of its ranks.
    if (documents) report.attention_pairs = pairs * double(trainer.groups.dp->size()) / double(step_s.size());
    if (step_s.size() > 1) report.straggler = find_straggler(step_s, waited_s);
    if (finite) return;
    const NonFinite first = find_non_finite(trainer.model, *trainer.store, peers, report, my_loss);
    trainer.record(first.alarm(report.step));
    throw CommonError(
        fmt::format("step {}: {} ({})", report.step, first.text(), first.advice(report.step, trainer.options)));
}

// Completes the report of a step whose step_s and peak are there. All ranks meet, after the step's time was taken: the
// slowest is the straggler, and with documents the pairs that attention computes are summed. If a loss or norm is not
// finite on any of them, records an alarm that names the first parameter and its rank, and throws CommonError on all.
// my_loss: this rank's share, before the sum. Collective.
void add_step_numbers(StepReport& report, Trainer& trainer, double my_loss) {
    const StepSizes& sizes = trainer.batches.sizes();
    const double tokens = double(sizes.tokens(report.step));
    report.data_s = trainer.batches.take_seconds();
    report.tokens_per_s = tokens / report.step_s;
    if (sizes.vary()) report.size = {{sizes.sequences(report.step), sizes.seq_len(report.step)}};
    compare_ranks(report, trainer, my_loss);
    const Llama& model = trainer.model;
    const double attended = report.attention_pairs ? 2 * *report.attention_pairs / tokens
                                                   : model.config.attended(double(sizes.seq_len(report.step)));
    report.flops = flops_per_token(model.config, attended) * tokens;
    if (const auto peak = peak_flops(model.options.device, model.options.dtype))
        report.mfu = report.flops / (report.step_s * *peak * double(trainer.runtime->ranks()));
}

}  // namespace

Trainer::Trainer(const TrainOptions& o, Llama& model, const Dataset& data)
    : options(o),
      model(model),
      data(data),
      store(&local_store_),
      loop(&accumulate_),
      runtime(&one_rank_),
      batches(o, data),
      local_store_(model, o.optimizer == "muon" ? Muon::maker(o.adamw(), std::make_shared<Orthogonalizer>())
                                                : AdamW::maker(o.adamw())),
      accumulate_(model),
      model_state_(step_state_of(model)),
      loss_scale_(o.fp16() ? o.loss_scale : 1),
      progress_(o.steps) {
    if (model_state_) step_states.push_back(model_state_.get());
    if (o.skip_step) step_states.push_back(&skip_step_);
    if (o.fp16()) {
        step_states.push_back(&loss_scale_);
        use_fp16_products(model);
    }
    batches.sorts_rows = model.stage.embedding && model.options.device == Device::cuda;
}

double Trainer::norm(Which which) const { return std::sqrt(groups.pp->sum(groups.tp->sum(store->squares(which)))); }

StepReport Trainer::step(int64_t number) {
    runtime->begin_step();
    if (number > 1)
        for (StepState* state : step_states) state->next_step();
    const double begin = now_seconds();
    StepReport report{.step = number, .lr = options.schedule().at(batches.sizes().position(number))};
    batches.take_seconds();
    ledger().reset_peak();
    for (RunControl* control : controls) control->before_step(number);
    for (StepState* state : step_states) state->begin_step(number);
    // tag::step[]
    const double& targets = batches.begin_step(*groups.dp, *groups.dp_cp, number);
    store->begin_step(micro_batches(number));
    Tensor loss =
        loop->forward_backward({micro_batches(number), [&](int64_t index) { return micro_batch(number, index); }});
    {
        Span span("reduce_gradients", "phase");
        store->finish_gradients();
        sum_partial_gradients(model, *store);
    }
    for (RunControl* control : controls) control->gradients_ready(number);
    ledger().phase("update");
    Span span("update", "phase");
    const std::vector<double> local = read(loss);
    const double scale = loss_scale_.scale();
    add_losses(report, model, groups.sum_loss(local), scale);
    loss = Tensor();
    report.grad_norm = norm(Which::grad) / scale;
    const double clip = options.clip > 0 ? std::min(1.0, options.clip / (report.grad_norm + 1e-6)) : 1.0;
    const bool updates = is_finite(report) && targets > 0 && !skips(options, skip_step_, report);
    if (updates) store->update(number, report.lr, clip / scale);
    // end::step[]
    for (StepState* state : step_states) state->end_step(groups, report, updates);
    synchronize(model.options.device);

    report.step_s = now_seconds() - begin;
    if (batches.ignores_targets()) report.targets = int64_t(targets);
    report.memory = ledger().now();
    report.peak = ledger().peak();
    report.device_memory = device_memory(model.options.device);
    peak_.merge(report.peak);
    runtime->end_step(report);
    add_step_numbers(report, *this, local[0]);
    for (RunControl* control : controls) control->complete(report);
    return report;
}

void Trainer::run() {
    start();
    int64_t first = 1;
    for (RunControl* control : controls) first = std::max(first, control->first_step());
    step_ = first - 1;
    // A text is small and in the page cache: a thread that is woken in every step would cost more than it saves.
    if (!options.dry_run && !data.is_text()) batches.start_reading(*groups.dp, first, last_step());
    for (bool goes_on = true; goes_on && step_ < last_step();) {
        const StepReport report = step(step_ + 1);
        ++step_;
        progress_.step(report);
        if (const auto& m = report.device_memory; m && report.step == first)
            note(fmt::format(
                     "          GPU memory: {} in use, {} of it for other things than tensors (the context, kernels, "
                     "NCCL, other processes); peak of the tensors {}",
                     human_bytes(double(m->used)), human_bytes(double(m->other)),
                     human_bytes(double(report.peak.total))),
                 {});
        if (report.targets == 0)
            note(fmt::format("          step {}: all targets of the global batch are ignored: no update", step_), {});
        for (RunControl* control : controls) goes_on = control->after_step(report) && goes_on;
    }
    batches.stop_reading();
    for (auto control = controls.rbegin(); control != controls.rend(); ++control) (*control)->finish();
}

void Trainer::note(const std::string& line, const nlohmann::ordered_json& event) {
    progress_.line(line);
    if (!event.is_null()) record(event);
}

}  // namespace train70b
