#include "02_data_parallel/complete/outer_flags.h"

#include <numeric>

namespace train70b {

void add_outer_flags(Flags& flags, OuterOptions& o) {
    flags.group("Outer steps (DiLoCo)");
    flags.add("--outer-steps", o.every,
              "each rank updates weights of its own; every N steps, and after the last one, an outer step averages the "
              "changes. |g| is rank 0's, clipping each rank's own; between outer steps a validation loss is of each "
              "rank's model on its part, a sample of rank 0's model [default: off]",
              integer_from(0));
    flags.add("--outer-lr", o.lr, "learning rate of the outer step", real_number(0, kLargest, false));
    flags.add("--outer-momentum", o.momentum, "Nesterov momentum of the outer step", real_number(0, 0.999999));
    flags.add("--outer-fragments", o.fragments, "fragments of the units, each with outer steps of its own",
              integer_from(1));
}

void check_outer_steps(const OuterOptions& o, const TrainOptions& run, const Flags& flags) {
    if (o.every == 0) {
        for (const char* flag : {"--outer-lr", "--outer-momentum", "--outer-fragments"})
            if (flags.given(flag)) usage_error("{}: needs --outer-steps N, at least 1", flag);
        return;
    }
    for (const char* flag : {"--bucket-mb", "--overlap"})
        if (flags.given(flag))
            usage_error("{}: with --outer-steps {} gradients are not reduced; leave it out", flag, o.every);
    if (!run.save_reference.empty())
        usage_error(
            "--save-reference {}: with --outer-steps {} no rank has the gradient of the batch (try "
            "--outer-steps 0)",
            run.save_reference, o.every);
    if (o.every % o.fragments != 0)
        usage_error("--outer-steps {} is not divisible by --outer-fragments {} (try {})", o.every, o.fragments,
                    std::gcd(o.every, o.fragments));
    if (const int64_t units = run.model.layers + 2; o.fragments > units)
        usage_error("--outer-fragments {}: --layers {} with embedding and head are {} units (try --outer-fragments {})",
                    o.fragments, run.model.layers, units, std::gcd(o.every, units));
}

std::vector<int64_t> fragment_sizes(Llama& model, int64_t fragments) {
    std::vector<int64_t> sizes(static_cast<size_t>(fragments));
    const std::vector<Unit*> units = model.units();
    for (size_t i = 0; i < units.size(); ++i) sizes[i % sizes.size()] += total_size(units[i]->params);
    return sizes;
}

int64_t outer_bytes(const std::vector<int64_t>& fragments, int64_t width, int64_t N, int64_t every, int64_t steps) {
    const auto bytes = [&](int64_t elements) { return 2 * elements * width * (N - 1) / N; };
    const int64_t P = int64_t(fragments.size());
    int64_t sum = bytes(std::accumulate(fragments.begin(), fragments.end(), int64_t(0)));  // the last step
    for (int64_t p = 0; p < P; ++p) sum += (steps - 1 + p * every / P) / every * bytes(fragments[size_t(p)]);
    return sum;
}

OuterReport::OuterReport(Program& program, const OuterOptions& options)
    : program_(program), options_(options), fragments_(fragment_sizes(program.model(), options.fragments)) {
    program.trainer().controls.push_back(this);
}

void OuterReport::say_layout() const {
    const int64_t width = size_of(stats_dtype(program_.model().options.dtype));
    say("{} data-parallel ranks over {}; weights: {} in {} fragment(s), each averaged every {} step(s)\n", program_.dp,
        program_.world.backend(), human_bytes(double(width * program_.options.model.parameters())), options_.fragments,
        options_.every);
}

void OuterReport::complete(StepReport& report) {
    const int64_t sent = sent_bytes(report, "dp.");
    sent_ += sent;
    if (report.step < program_.trainer().last_step()) most_ = std::max(most_, sent);
}

void OuterReport::print_tables() const {
    const TrainOptions& o = program_.options;
    const Llama::Options& types = program_.model().options;
    const int64_t n = o.model.parameters(), N = program_.dp, width = size_of(stats_dtype(types.dtype));
    const ActivationFormula act = activation_formula(o.model, o.micro_batch, o.seq_len, types.dtype, types.recompute,
                                                     {.loss_chunk = types.loss_chunk});
    say(memory_table(
        "bytes: peak; below it the formula, where the outer weights and their momentum are the optimizer's",
        {{fmt::format("rank {}", program_.world.rank()),
          program_.trainer().peak(),
          {size_of(types.dtype) * n, size_of(types.grad_dtype) * n, (AdamW::state_bytes(types.dtype) + 2 * width) * n,
           act.total, -1, -1, -1}}}));
    const int64_t largest = *std::max_element(fragments_.begin(), fragments_.end());
    const int64_t all = outer_bytes(fragments_, width, N, options_.every, o.steps);
    Table wire(fmt::format("bytes that a rank of {} sends; 2 n (N-1)/N for an outer step of n bytes", N),
               {"", "measured", "formula"});
    wire.row({"a step before the last, at most", most_,
              o.steps > options_.every ? Cell(2 * largest * width * (N - 1) / N) : Cell("-")});
    wire.row({fmt::format("all {} steps", o.steps), sent_, all});
    wire.row({"a step, on average", sent_ / o.steps, all / o.steps});
    say(wire);
}

}  // namespace train70b
