#pragma once
// Documents packed into one sequence (--document-token): a document ends with the document token. Positions restart
// with each document, and a token attends to the tokens of its own document only. The token after the end is predicted
// as any other.
//
//     tokens       a b $ c d e $ f        $: the document token
//     starts       0 0 0 3 3 3 3 7        index in the sequence of the first token of each token's document
//     positions    0 1 2 0 1 2 3 0        t - starts[t]
#include <cstddef>
#include <cstdint>
#include <vector>

namespace train70b {

// The starts of the first seq_len tokens of a sample. A function of the sample alone: every rank computes the same,
// whichever part of the sequence it holds.
std::vector<int32_t> document_starts(const std::vector<int32_t>& sample, int64_t seq_len, int64_t document_token);

// Pairs (query, key) of one sequence that causal attention inside documents computes: the sum of t - starts[t] + 1. One
// document: T (T+1) / 2.
double document_pairs(const std::vector<int32_t>& starts);

}  // namespace train70b
