#include "02_data_parallel/complete/outer_run.h"

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
    const struct {
        bool given;
        std::string flag, why;
    } refused[] = {
        {flags.given("--bucket-mb"), "--bucket-mb", "gradients are not reduced; leave it out"},
        {flags.given("--overlap"), "--overlap", "gradients are not reduced; leave it out"},
        {run.mask_document_ends, "--mask-document-ends on", "ranks need as many targets (try --outer-steps 0)"},
        {run.fp16(), "--dtype fp16", "each rank would have a loss scale of its own (try bf16)"},
        {run.skip_step, "--skip-step on", "each rank has a norm of its own (try --skip-step off)"},
        {!run.save_reference.empty(), "--save-reference " + run.save_reference,
         "no rank has the gradient of the batch (try --outer-steps 0)"}};
    for (const auto& [given, flag, why] : refused)
        if (given) usage_error("{}: with --outer-steps {} {}", flag, o.every, why);
    if (o.every % o.fragments != 0)
        usage_error("--outer-steps {} is not divisible by --outer-fragments {} (try {})", o.every, o.fragments,
                    std::gcd(o.every, o.fragments));
    if (const int64_t units = run.model.layers + 2 + run.model.multi_token; o.fragments > units)
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

namespace {
// Counts what is sent.
struct Sent : RunControl {
    explicit Sent(int64_t last_step) : last(last_step) {}
    void complete(StepReport& report) override {
        const int64_t bytes = sent_bytes(report, "dp.");
        all += bytes;
        if (report.step < last) most = std::max(most, bytes);
    }
    const int64_t last;
    int64_t all = 0, most = 0;  // most: of a step before the last
};

void print_tables(Program& p, const OuterOptions& outer, const Sent& sent) {
    const std::vector<int64_t> fragments = fragment_sizes(p.model(), outer.fragments);
    const TrainOptions& o = p.options;
    const Llama::Options& types = p.model().options;
    const int64_t n = o.model.parameters(), N = p.dp, width = size_of(stats_dtype(types.dtype));
    const ActivationFormula act =
        activation_formula(o.model, o.micro_batch, o.seq_len, types.dtype, types.recompute,
                           {.loss_chunk = types.loss_chunk, .recompute_every = types.recompute_every});
    say(memory_table(
        "bytes: peak; below it the formula, where the outer weights and their momentum are the optimizer's",
        {{fmt::format("rank {}", p.world.rank()),
          p.trainer().peak(),
          {size_of(types.dtype) * n, size_of(types.grad_dtype) * n, (AdamW::state_bytes(types.dtype) + 2 * width) * n,
           act.total, -1, -1, -1}}}));
    const int64_t largest = *std::max_element(fragments.begin(), fragments.end());
    const int64_t all = outer_bytes(fragments, width, N, outer.every, o.steps);
    Table wire(fmt::format("bytes that a rank of {} sends; 2 n (N-1)/N for an outer step of n bytes", N),
               {"", "measured", "formula"});
    wire.row({"a step before the last, at most", sent.most,
              o.steps > outer.every ? Cell(2 * largest * width * (N - 1) / N) : Cell("-")});
    wire.row({fmt::format("all {} steps", o.steps), sent.all, all});
    wire.row({"a step, on average", sent.all / o.steps, all / o.steps});
    say(wire);
}
}  // namespace

void train_by_outer_steps(Program& p, const Comm& ranks, const OuterOptions& options) {
    if (p.trainer().batches.ignores_targets())
        usage_error(
            "--outer-steps {}: ranks have unequal numbers of targets, because some are ignored (try --outer-steps 0)",
            options.every);
    OuterSteps store(p.model(), ranks, options, p.options.steps, AdamW::maker(p.options.adamw()));
    p.use(store, ranks);
    p.trainer().step_states.push_back(&store);
    p.allocate();
    say("{} data-parallel ranks over {}; weights: {} in {} fragment(s), each averaged every {} step(s)\n", p.dp,
        p.world.backend(),
        human_bytes(double(size_of(stats_dtype(p.model().options.dtype)) * p.options.model.parameters())),
        options.fragments, options.every);
    Sent sent(p.options.steps);
    p.trainer().controls.push_back(&sent);
    p.train();
    if (p.prints_tables()) print_tables(p, options, sent);
}

}  // namespace train70b
