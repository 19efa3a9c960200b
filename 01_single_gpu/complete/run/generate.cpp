#include "01_single_gpu/complete/run/generate.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "01_single_gpu/core/random.h"

namespace train70b {

namespace {
// Draws an index from softmax(logits / temperature), given a uniform u in [0, 1).
int32_t draw_token(const std::vector<double>& logits, double temperature, double u) {
    const double max = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    std::vector<double> cumulative;
    for (double logit : logits) cumulative.push_back(sum += std::exp((logit - max) / temperature));
    const auto at = std::upper_bound(cumulative.begin(), cumulative.end(), u * sum);
    return static_cast<int32_t>(std::min<int64_t>(at - cumulative.begin(), int64_t(logits.size()) - 1));
}

// The row of the batch of one sequence that holds a token; -1 if another context-parallel rank computes it.
int64_t row_of(const std::vector<TokenRange>& ranges, int64_t token) {
    int64_t row = 0;
    for (const auto [begin, count] : ranges) {
        if (begin <= token && token < begin + count) return row + token - begin;
        row += count;
    }
    return -1;
}

int32_t next_token(Trainer& trainer, const std::vector<int32_t>& context, double u) {
    constexpr double kTemperature = 0.8;
    const int64_t seq_len = trainer.options.seq_len;
    std::vector<int32_t> padded = context;
    padded.resize(size_t(seq_len + 1));  // and a target for the last one
    const int64_t row = row_of(trainer.batches.tokens(seq_len).computed, int64_t(context.size()) - 1);
    const Groups& groups = trainer.groups;
    Llama& model = trainer.model;
    double token = 0;
    model.on_logits = [&](const Tensor& logits) {  // (R, V_l)
        if (row < 0) return;
        std::vector<double> all = groups.tp->gather(read(logits.row_slice(row, row + 1)));
        all.resize(size_t(model.config.vocab));  // without the padding of the last ranks
        for (double& logit : all) logit *= model.loss_options.logit_scale;
        token = draw_token(all, kTemperature, u);
    };
    trainer.loop->forward_only(trainer.batches.of_one(padded));
    model.on_logits = {};
    return static_cast<int32_t>(groups.pp->sum(groups.cp->sum(token)));
}
}  // namespace

std::vector<int32_t> generate(Trainer& trainer, std::vector<int32_t> tokens, int64_t count, uint64_t seed) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t length = std::min<int64_t>(int64_t(tokens.size()), trainer.options.seq_len);
        const double u = double(random_bits(seed, uint64_t(i)) >> 11) * 0x1p-53;
        tokens.push_back(next_token(trainer, {tokens.end() - length, tokens.end()}, u));
    }
    return tokens;
}

std::vector<int32_t> generate(Trainer& trainer, int64_t count) {
    std::vector<int32_t> prompt;
    for (const char c : trainer.options.prompt) prompt.push_back(static_cast<unsigned char>(c));
    return generate(trainer, prompt.empty() ? trainer.data.opening(16) : prompt, count, trainer.options.seed);
}

std::string printable(const std::vector<int32_t>& tokens, bool bytes) {
    std::string text;
    for (int32_t token : tokens) {
        if (!bytes || token > 255)
            text += std::to_string(token) + " ";
        else if (token == '\n' || token == '\t' || token >= 32)
            text += static_cast<char>(token);
        else
            text += '?';
    }
    return text;
}

void report_sample(Trainer& trainer, int64_t step) {
    constexpr int64_t kTokens = 64;
    const std::vector<int32_t> tokens = generate(trainer, kTokens);
    trainer.note("          sample: " + one_line(printable(tokens, trainer.data.is_text())),
                 {{"event", "sample"}, {"step", step}, {"tokens", tokens}});
}

}  // namespace train70b
