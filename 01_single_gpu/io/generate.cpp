#include "01_single_gpu/io/generate.h"

#include <algorithm>
#include <cmath>

#include "01_single_gpu/core/random.h"

namespace train70b {

namespace {
// Samples an index from softmax(logits / temperature), given a uniform u in [0, 1).
int32_t sample(const std::vector<double>& logits, double temperature, double u) {
    const double max = *std::max_element(logits.begin(), logits.end());
    double sum = 0;
    std::vector<double> cumulative;
    for (double logit : logits) cumulative.push_back(sum += std::exp((logit - max) / temperature));
    const auto at = std::upper_bound(cumulative.begin(), cumulative.end(), u * sum);
    return static_cast<int32_t>(std::min<int64_t>(at - cumulative.begin(), int64_t(logits.size()) - 1));
}
}  // namespace

std::vector<int32_t> generate(Llama& model, std::vector<int32_t> tokens, int64_t count, int64_t seq_len,
                              uint64_t seed) {
    constexpr double kTemperature = 0.8;
    const Device device = model.options.device;
    for (int64_t i = 0; i < count; ++i) {
        const int64_t length = std::min<int64_t>(tokens.size(), seq_len);
        const std::vector<int32_t> context(tokens.end() - length, tokens.end());
        std::vector<int32_t> positions(length);
        for (int64_t t = 0; t < length; ++t) positions[t] = static_cast<int32_t>(t);
        Batch batch{.sequences = 1, .seq_len = length};
        batch.tokens = upload(context, {length}, device);
        batch.positions = upload(positions, {length}, device);
        Tape tape{.recording = false};
        const Tensor logits = model.logits(tape, batch).data;  // (T, V)
        const double u = double(random_bits(seed, i) >> 11) * 0x1p-53;
        tokens.push_back(sample(read(logits.row_slice(length - 1, length)), kTemperature, u));
    }
    return tokens;
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

}  // namespace train70b
