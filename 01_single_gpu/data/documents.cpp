#include "01_single_gpu/data/documents.h"

namespace train70b {

std::vector<int32_t> document_starts(const std::vector<int32_t>& sample, int64_t seq_len, int64_t document_token) {
    std::vector<int32_t> starts;
    int32_t start = 0;
    for (int64_t t = 0; t < seq_len; ++t) {
        starts.push_back(start);
        if (sample[size_t(t)] == document_token) start = static_cast<int32_t>(t + 1);
    }
    return starts;
}

double document_pairs(const std::vector<int32_t>& starts) {
    double pairs = 0;
    for (size_t t = 0; t < starts.size(); ++t) pairs += double(t) - starts[t] + 1;
    return pairs;
}

}  // namespace train70b
