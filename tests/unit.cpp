// The unit of time (tests/run.sh): the seconds that `g++ -std=c++20 -O2 -c` takes for this file.
#define FMT_HEADER_ONLY
#include <fmt/core.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>
