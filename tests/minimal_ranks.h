#pragma once
// A minimal.cpp on several ranks.
#include "tests/device_comms.h"
#include "tests/minimal.h"

namespace train70b::test {

// check(failures, ranks) on the first n ranks, for each n.
template <class Check>
void on_ranks(std::initializer_list<int> counts, const Check& check) {
    Failures failures;
    for (const int n : counts) on_first_ranks(n, [&](const Comm& ranks) { check(failures, ranks); });
    EXPECT_NONE(failures);
}

// check(failures, variant, ranks) of all variants with every backend of device tensors; on an emulated GPU one in turn.
template <class Check>
void on_gpus(int64_t variants, const Check& check) {
    Failures failures;
    const std::vector<Comm> comms = device_comms();
    const int64_t all = variants * int64_t(comms.size());
    for (int64_t i = 0; i < all; ++i)
        if (has_turn(i, all)) check(failures, i % variants, comms[size_t(i / variants)]);
    EXPECT_NONE(failures);
}

// That the program's numbers are those of the complete one, in fp64 to 1e-10, in fp32 to 5e-6. where: for a message.
inline void expect_equal(Failures& failures, const Comparison& result, DType dtype, const std::string& where) {
    failures.expect(result.worst <= (dtype == DType::f64 ? 1e-10 : 5e-6),
                    fmt::format("{}: {} at {}", where, double(result.worst), result.worst.where));
}

}  // namespace train70b::test
