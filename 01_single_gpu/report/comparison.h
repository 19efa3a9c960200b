#pragma once
// Compares two reference runs (report/reference.h).
#include <string>
#include <vector>

#include "01_single_gpu/core/tensor.h"

namespace train70b {

// The deviation of run a from run b. NaN sorts before all other values.
struct Deviation {
    std::string name;     // a parameter, or "step 3"
    double relative = 0;  // ||a - b|| / ||b||
    double size = 0;      // ||b||
    // Of tensors: a is best explained as multiple x b, up to rest = ||a - multiple b|| / ||multiple b||.
    double multiple = 1, rest = 0;
};
struct Comparison {
    DType dtype = DType::f32;    // of the less precise run; sets the default tolerance
    bool same_dtype = true;      // if so, the initial weights must be equal
    bool check_updates = false;  // both runs have the weights after step 1, and used AdamW
    bool same_tokens = true, same_targets = true;
    int64_t samples = 0, steps = 0;     // steps: that both runs have
    std::vector<std::string> problems;  // mismatched names, shapes, learning rates; a file that one run lacks
    // Settings that the two runs state differently, and what could not be checked: neither decides the verdict.
    std::vector<std::string> contradictions, not_checked;
    // Sorted by decreasing deviation. updates: of the weights after step 1, relative to the update, without what the
    // deviation of the gradients and the rounding of the stored weights explain. losses, norms: of the checked steps;
    // later_losses, later_norms: of the steps after them, which are not checked.
    std::vector<Deviation> weights, gradients, updates, losses, norms, later_losses, later_norms;

    double default_tolerance() const;
    bool within(double tolerance) const;
    std::vector<std::string> beyond(double tolerance) const;  // one line per kind that exceeds it
};
// Usage error if a folder is not a reference run.
Comparison compare_references(const std::string& a, const std::string& b);
std::string comparison_table(const Comparison& comparison, double tolerance);  // ends with the verdict

}  // namespace train70b
