#include "01_single_gpu/trainer.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "01_single_gpu/core/profile.h"
#include "01_single_gpu/run/step_numbers.h"

namespace train70b {

Trainer::Trainer(const TrainOptions& o, Llama& model, const Dataset& data)
    : options(o),
      model(model),
      data(data),
      store(&local_store_),
      loop(&accumulate_),
      runtime(&one_rank_),
      batches(o, data),
      local_store_(model, AdamW::maker(o.adamw())),
      accumulate_(model),
      progress_(o.steps) {}

double Trainer::norm(Which which) const { return std::sqrt(groups.pp->sum(groups.tp->sum(store->squares(which)))); }

StepReport Trainer::step(int64_t number) {
    runtime->begin_step();
    if (number > 1)
        for (StepState* state : step_states) state->next_step();
    const double begin = now_seconds();
    StepReport report{.step = number, .lr = options.schedule().at(number)};
    batches.take_seconds();
    ledger().reset_peak();
    for (RunControl* control : controls) control->before_step(number);
    // tag::step[]
    const double targets = batches.begin_step(*groups.dp, *groups.dp_cp, number);
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
    const std::vector<double> mine = read(loss), losses = groups.sum_loss(mine);
    report.loss = losses[0];
    if (losses.size() > 1) report.z_loss = losses[1];
    loss = Tensor();
    report.grad_norm = norm(Which::grad);
    const double clip = options.clip > 0 ? std::min(1.0, options.clip / (report.grad_norm + 1e-6)) : 1.0;
    if (is_finite(report) && targets > 0) store->update(number, report.lr, clip);
    // end::step[]
    synchronize(model.options.device);

    report.step_s = now_seconds() - begin;
    if (batches.ignores_targets()) report.targets = int64_t(targets);
    report.memory = ledger().now();
    report.peak = ledger().peak();
    peak_.merge(report.peak);
    runtime->end_step(report);
    add_step_numbers(report, *this, mine[0]);
    for (RunControl* control : controls) control->complete(report);
    return report;
}

int64_t Trainer::last_step() const {
    int64_t last = options.steps;
    for (const RunControl* control : controls) last = std::min(last, control->last_step());
    return last;
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

void Trainer::record(const nlohmann::ordered_json& event) {
    for (RunControl* control : controls) control->recorded(event);
}

}  // namespace train70b
