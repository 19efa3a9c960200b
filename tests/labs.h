#pragma once
// What the graders of the labs share (docs/labs/NAME/grade.cpp). A grader is a file of test cases like any other; the
// rows of its lab's score card name test cases of its own and of the chapter's tests.
#include <fmt/core.h>

#include <cstdlib>
#include <nlohmann/json.hpp>

#include "01_single_gpu/core/check.h"
#include "tests/support.h"

namespace train70b::test {

// A figure of the score card: on rank 0 a line for docs/labs/lab.py, and an expectation everywhere. `formula` is what
// `expected` was computed from, `remark` what the student reads when `got` is wrong: which mistake gives this figure.
// In tests of several ranks all of them must come here with the same figures.
template <typename Number>
void figure(const std::string& what, Number got, Number expected, const std::string& unit, const std::string& formula,
            const std::string& remark = "", double relative = 0) {
    const bool good = double(got) == double(expected) ||
                      std::abs(double(got) - double(expected)) <= relative * std::abs(double(expected));
    if (this_rank == 0) {
        const nlohmann::json line = {{"what", what},       {"got", got},       {"expected", expected}, {"unit", unit},
                                     {"formula", formula}, {"remark", remark}, {"good", good}};
        fmt::print("lab: {}\n", line.dump());
        std::fflush(stdout);
    }
    INFO(what, ": ", got, ", expected ", expected);
    EXPECT(good);
}

// What `lab.sh start --seed` has drawn for the file that is graded ("drawn" in lab.json), or the course's own.
inline std::string drawn(const char* name, const std::string& own) {
    const char* value = std::getenv(name);
    return value ? value : own;
}

// Fails unless `wrong` is empty, with this line on the score card.
inline void expect_none_wrong(const std::string& wrong) {
    if (this_rank == 0 && !wrong.empty()) {
        fmt::print("found: {}\n", wrong);
        std::fflush(stdout);
    }
    EXPECT(wrong == "");
}

}  // namespace train70b::test
