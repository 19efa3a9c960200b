#include "01_single_gpu/run/step_numbers.h"

#include <cmath>
#include <nlohmann/json.hpp>

#include "01_single_gpu/run/non_finite.h"

namespace train70b {

bool is_finite(const StepReport& r) { return std::isfinite(r.loss) && std::isfinite(r.grad_norm); }

namespace {

// The ranks that update together have the same norm. Others may not: a fault in one copy of the model.
void compare_ranks(StepReport& report, Trainer& trainer, double my_loss) {
    const Groups peers = trainer.runtime->has_peers() ? trainer.groups : Groups();
    const bool documents = trainer.options.document_token.has_value();
    std::vector<double> mine = {report.step_s, report.waited_s, is_finite(report) ? 1.0 : 0.0};
    if (documents) mine.push_back(trainer.batches.document_pairs());
    const std::vector<double> all = gather(peers, mine);
    std::vector<double> step_s, waited_s;
    double pairs = 0;
    bool finite = true;
    for (size_t i = 0; i < all.size(); i += mine.size()) {
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
    throw CommonError(fmt::format("step {}: {} (try a lower --lr or more --warmup-steps)", report.step, first.text()));
}

}  // namespace

void add_step_numbers(StepReport& report, Trainer& trainer, double my_loss) {
    const StepSizes& sizes = trainer.batches.sizes();
    const double tokens = double(sizes.tokens(report.step));
    report.data_s = trainer.batches.take_seconds();
    report.tokens_per_s = tokens / report.step_s;
    if (sizes.vary()) report.size = {{sizes.sequences(report.step), sizes.seq_len(report.step)}};
    compare_ranks(report, trainer, my_loss);
    const double keys =
        report.attention_pairs ? *report.attention_pairs / tokens : double(sizes.seq_len(report.step)) / 2;
    const Llama& model = trainer.model;
    report.flops = flops_per_token(model.config, 2 * keys) * tokens;
    if (const auto peak = peak_flops(model.options.device, model.options.dtype))
        report.mfu = report.flops / (report.step_s * *peak * double(trainer.runtime->ranks()));
}

}  // namespace train70b
